"""Counts over all steps of a trace: the summary that `foretoken trace` shows."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foretoken.trace import StepTrace, Trace

__all__ = ["TraceSummary", "depths", "kept"]


def depths(step: StepTrace) -> list[int]:
    """Depth of every drafted token; 1 is right below the root."""
    found: list[int] = []
    for parent in step.parents:
        found.append(1 if parent < 0 else found[parent] + 1)
    return found


def kept(step: StepTrace) -> int:
    """Drafted tokens that became output; a stop may have cut off accepted ones."""
    return min(len(step.accepted), step.committed)


@dataclass
class TraceSummary:
    """Counts over all steps, as in `Metrics`; a draft is a step with a drafted token.

    `drafted_per_position` counts the drafts that reach each depth, `accepted_per_position` the
    drafts whose token at that depth was kept.
    """

    steps: int = 0
    tokens: int = 0
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    rejected: int = 0
    drafted_per_position: Counter[int] = field(default_factory=Counter)
    accepted_per_position: Counter[int] = field(default_factory=Counter)
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    accept_seconds: float = 0.0

    @staticmethod
    def of(trace: Trace) -> TraceSummary:
        """The summary of a trace."""
        summary = TraceSummary()
        for step in trace:
            summary._add(step)
        return summary

    def _add(self, step: StepTrace) -> None:
        self.steps += 1
        self.tokens += step.committed
        self.drafts += bool(step.drafted)
        self.drafted += len(step.drafted)
        self.accepted += kept(step)
        self.rejected += len(step.rejected)
        self.drafted_per_position.update(range(1, max(depths(step), default=0) + 1))
        self.accepted_per_position.update(range(1, kept(step) + 1))
        self.draft_seconds += step.draft_seconds
        self.verify_seconds += step.verify_seconds
        self.accept_seconds += step.accept_seconds

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted / drafts."""
        return 1 + self.accepted / self.drafts if self.drafts else 1.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted / (accepted + rejected)."""
        tried = self.accepted + self.rejected
        return self.accepted / tried if tried else 0.0

    @property
    def positions(self) -> list[tuple[int, int]]:
        """Per depth from 1 on: drafts that reach it, and how many of them were kept there."""
        deepest = max(self.drafted_per_position, default=0)
        return [
            (self.drafted_per_position[depth], self.accepted_per_position[depth])
            for depth in range(1, deepest + 1)
        ]

    def as_dict(self) -> dict[str, Any]:
        """The summary for JSON."""
        return {
            "steps": self.steps,
            "tokens": self.tokens,
            "num_drafts": self.drafts,
            "num_draft_tokens": self.drafted,
            "num_accepted_tokens": self.accepted,
            "num_rejected_tokens": self.rejected,
            "mean_acceptance_length": self.mean_acceptance_length,
            "acceptance_rate": self.acceptance_rate,
            "drafted_per_position": [drafted for drafted, _ in self.positions],
            "accepted_per_position": [accepted for _, accepted in self.positions],
            "draft_seconds": self.draft_seconds,
            "verify_seconds": self.verify_seconds,
            "accept_seconds": self.accept_seconds,
        }
