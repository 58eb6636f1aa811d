"""The report of `benchmarks.quick`: Markdown for people, a dictionary for JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.report import command_line, markdown_table
from benchmarks.timing import Row, Timed, row, spread
from foretoken.bench.ratios import Interval

__all__ = ["CONTROL", "FLOOR", "Report", "rows_of", "verdict"]

CONTROL = "control"
"""Kind of the prompts in which there is nothing to find."""

FLOOR = 0.97
"""Least ratio of tokens/s on the control."""

HEADER = (
    "prompts: method",
    "prompts",
    "tokens/s over none",
    "after prefill",
    "tokens/s none",
    "tokens/s method",
    "mean acceptance length",
    "target passes over none",
    "passes with a draft",
    "time in drafter",
    "outputs differing",
)


def rows_of(timed: Sequence[Timed], methods: Sequence[str], seed: int) -> list[Row]:
    """A row per method for each kind, for all kinds together, and for the control."""
    kinds = dict.fromkeys(item.kind for item in timed if item.kind != CONTROL)
    groups = {kind: [item for item in timed if item.kind == kind] for kind in kinds}
    if len(kinds) > 1:
        groups["all"] = [item for item in timed if item.kind != CONTROL]
    groups[CONTROL] = [item for item in timed if item.kind == CONTROL]
    return [
        row(label, method, members, seed)
        for label, members in groups.items()
        if members
        for method in methods
    ]


def verdict(ratio: Interval) -> str:
    """What an interval says about the floor: 'shown', 'missed', or 'open' where it contains it."""
    if ratio.low is None or ratio.high is None:
        return "open"
    if ratio.low >= FLOOR:
        return "shown"
    return "missed" if ratio.high < FLOOR else "open"


@dataclass(frozen=True)
class Report:
    """Everything that was measured.

    Args:
        timed: all runs, the control's among them.
        rows: their summary.
        facts: the machine.
        settings: of the run.
        ended: prompts whose output went on past an end-of-sequence token.
    """

    timed: Sequence[Timed]
    rows: Sequence[Row]
    facts: dict[str, Any]
    settings: dict[str, Any]
    ended: int

    @property
    def good(self) -> bool:
        """Whether all outputs are those of plain decoding and no control has missed the floor."""
        missed = (r.label == CONTROL and verdict(r.ratio) == "missed" for r in self.rows)
        return not any(missed) and not any(r.differing for r in self.rows)

    def markdown(self) -> str:
        """The table, what it depends on, and the verdicts."""
        facts = [f"{name} {value}" for name, value in self.facts.items() if value is not None]
        return "\n\n".join(
            [
                f"`{command_line('benchmarks.quick')}`",
                ", ".join(facts),
                markdown_table(HEADER, [_cells(r) for r in self.rows]),
                *self._notes(),
            ]
        )

    def _notes(self) -> list[str]:
        prompts = sum(item.kind != CONTROL for item in self.timed)
        notes = [
            f"Equal runs lie {spread(self.timed):.1%} apart (longest less shortest of a prompt and "
            "method over their median; the median of that).",
            f"{self.ended} of {prompts} outputs went on past an end-of-sequence token.",
        ]
        notes += [
            f"{r.label}, {r.method}: on {r.learning} prompts the rounds took different numbers of "
            "target passes. It learns from earlier runs, which had the same prompt: its figures "
            "are not comparable with --rounds above 1."
            for r in self.rows
            if r.learning
        ]
        return notes + [
            f"Control, {r.method}: {r.ratio} against {FLOOR}, with a draft in "
            f"{r.drafting_share:.1%} of the passes: {verdict(r.ratio)}."
            for r in self.rows
            if r.label == CONTROL
        ]

    def as_dict(self) -> dict[str, Any]:
        """For JSON; the token ids are left out."""
        return {
            "command": command_line("benchmarks.quick"),
            "machine": self.facts,
            "settings": self.settings,
            "spread": spread(self.timed),
            "ended": self.ended,
            "rows": [asdict(r) for r in self.rows],
            "prompts": [_prompt_as_dict(item) for item in self.timed],
        }


def _cells(r: Row) -> list[str]:
    return [
        f"{r.label}: {r.method}",
        str(r.prompts),
        str(r.ratio),
        str(r.decode_ratio),
        f"{r.baseline_speed:.1f}",
        f"{r.speed:.1f}",
        f"{r.mean_acceptance_length:.2f}",
        f"{r.passes_ratio:.3f}",
        f"{r.drafting_share:.1%}",
        f"{r.draft_time_share:.2%}",
        str(r.differing),
    ]


def _prompt_as_dict(item: Timed) -> dict[str, Any]:
    return {
        "prompt": item.prompt,
        "kind": item.kind,
        "prompt_tokens": item.prompt_tokens,
        "runs": {method: [run.as_dict() for run in runs] for method, runs in item.runs.items()},
    }
