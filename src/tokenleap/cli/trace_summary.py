"""Counts over all steps of a trace: the summary that `tokenleap trace` shows."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenleap.trace import StepTrace, Trace

__all__ = ["TraceSummary"]


class TraceSummary:
    """Counts and times over all steps of a trace.

    Args:
        trace: the trace.

    Attributes:
        metrics: the counts and times as in the output's own metrics.
        drafted_per_position: drafts that reach each depth.
    """

    def __init__(self, trace: Trace) -> None:
        from tokenleap.metrics import Metrics

        self.metrics = Metrics()
        self.drafted_per_position: Counter[int] = Counter()
        for step in trace:
            self._add(step)

    def _add(self, step: StepTrace) -> None:
        metrics = self.metrics
        metrics.count(step)
        metrics.draft_seconds += step.draft_seconds
        metrics.verify_seconds += step.verify_seconds
        metrics.accept_seconds += step.accept_seconds
        self.drafted_per_position.update(range(1, max(step.depths, default=0) + 1))

    @property
    def positions(self) -> list[tuple[int, int]]:
        """Per depth from 1 on: drafts that reach it, and how many of them were kept there."""
        kept = enumerate(self.metrics.accepted_per_position, start=1)
        return [(self.drafted_per_position[depth], count) for depth, count in kept]

    def as_dict(self) -> dict[str, Any]:
        """The summary for JSON."""
        metrics = self.metrics
        return {
            "steps": metrics.target_passes,
            "tokens": metrics.generated_tokens,
            "num_drafts": metrics.num_drafts,
            "num_draft_tokens": metrics.num_draft_tokens,
            "num_accepted_tokens": metrics.num_accepted_tokens,
            "num_rejected_tokens": metrics.num_rejected_tokens,
            "mean_acceptance_length": metrics.mean_acceptance_length,
            "acceptance_rate": metrics.acceptance_rate,
            "drafted_per_position": [drafted for drafted, _ in self.positions],
            "accepted_per_position": metrics.accepted_per_position,
            "draft_seconds": metrics.draft_seconds,
            "verify_seconds": metrics.verify_seconds,
            "accept_seconds": metrics.accept_seconds,
        }
