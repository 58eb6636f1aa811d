"""Rounds of the contract's cells: kept in a journal, judged, and spent where they still matter.

Whoever looks after every round and stops at the first verdict finds one in noise sooner or later.
So a cell is looked at after its rounds, and again whenever they have doubled; in between it stays
what it was found to be. The k-th look asks for an interval that misses the truth in one of 20 x 2^k
cases, so that all the looks at a cell together err in at most 5 %, however long a run goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import typer

from benchmarks.loading import BASELINE
from benchmarks.speed_report import FLOOR
from benchmarks.student import t_ratio
from foretoken.bench.journal import Journal
from foretoken.bench.ratios import Interval

__all__ = [
    "DEFAULT",
    "FIXED",
    "Cell",
    "Result",
    "broken_promises",
    "measure",
    "next_cell",
    "results",
]

DEFAULT, FIXED = "default", "fixed"
"""The variants besides the baseline: with the controller of who names none, and with none."""

ERRORS = 0.05
"""How many cells may get a false verdict, as a share."""


@dataclass(frozen=True)
class Cell:
    """One batch size on one kind of text."""

    batch: int
    kind: str

    def __str__(self) -> str:
        return f"{self.batch}: {self.kind}"


@dataclass(frozen=True)
class Result:
    """What the rounds of a cell have come to.

    Args:
        cell: which.
        rounds: how many it has had.
        judged: over how many of them it was looked at last, which is what ratios and speeds are of;
            0 before the first look, when they are of all.
        ratios: per variant tokens/s over those of `none`; empty before the first round.
        tokens_per_second: of `none`, the median.
        differing: outputs of any variant that are not those of `none`, in all rounds.
    """

    cell: Cell
    rounds: int
    judged: int
    ratios: Mapping[str, Interval]
    tokens_per_second: float
    differing: int

    @property
    def state(self) -> str:
        """'shown', 'broken' or 'open'."""
        ratio = self._seen(DEFAULT)
        if ratio.low is not None and ratio.low >= FLOOR:
            return "shown"
        return "broken" if ratio.high is not None and ratio.high < FLOOR else "open"

    @property
    def gain(self) -> str:
        """Whether it is over 1: 'shown', 'not shown' or 'broken'; '-' if no fixed length is."""
        default, fixed = self._seen(DEFAULT), self._seen(FIXED)
        if fixed.low is None or fixed.low <= 1:
            return "-"
        if default.high is not None and default.high < 1:
            return "broken"
        return "shown" if default.low is not None and default.low > 1 else "not shown"

    def _seen(self, label: str) -> Interval:
        """What a look has said; before the first nothing is."""
        return self.ratios[label] if self.judged else Interval(1.0, None, None)


def results(
    cells: Sequence[Cell], records: Sequence[Mapping[str, Any]], rounds: int
) -> list[Result]:
    """A result for each cell, from the journal's records of all rounds."""
    return [
        _result(cell, [r for r in records if (r["batch"], r["kind"]) == _key(cell)], rounds)
        for cell in cells
    ]


def _key(cell: Cell) -> tuple[int, str]:
    return cell.batch, cell.kind


def _result(cell: Cell, records: Sequence[Mapping[str, Any]], wanted: int) -> Result:
    judged, level = _last_look(len(records), wanted)
    speeds = [record["tokens_per_second"] for record in records[: judged or None]]
    base = sorted(speed[BASELINE.label] for speed in speeds)
    ratios = {
        label: t_ratio([speed[label] / speed[BASELINE.label] for speed in speeds], level)
        for label in (DEFAULT, FIXED)
        if speeds
    }
    median = base[len(base) // 2] if base else 0.0
    differing = sum(record["differing"] for record in records)
    return Result(cell, len(records), judged, ratios, median, differing)


def _last_look(rounds: int, wanted: int) -> tuple[int, float]:
    """Over how many rounds it was, none if there was none yet, and the level of its intervals."""
    number = (rounds // wanted).bit_length()
    judged = wanted * 2 ** (number - 1) if number else 0
    return judged, 1 - ERRORS / 2 ** max(1, number)


def next_cell(found: Sequence[Result], *, more: bool) -> Cell | None:
    """The open cell with the fewest rounds, the first of several; None where all are done.

    Args:
        found: results of all cells so far.
        more: whether a cell that is open after its rounds gets another one.
    """
    wanted = [r for r in found if r.state == "open" and (more or not r.judged)]
    return min(wanted, key=lambda result: result.rounds).cell if wanted else None


def measure(
    cells: Sequence[Cell],
    journal: Journal,
    rounds: int,
    run: Callable[[Cell, int], Mapping[str, Any]],
    seconds: float | None = None,
) -> list[Result]:
    """Run rounds until every cell has had its own, or is settled, or the time is up.

    Args:
        cells: in order of importance.
        journal: what has been measured already; rounds are added to it.
        rounds: of each cell.
        run: measures one more round of a cell, of this number.
        seconds: time for it, in which open cells may have more rounds; None takes what it takes.
    """
    began = time.monotonic()
    while seconds is None or time.monotonic() - began < seconds:
        found = results(cells, journal.records, rounds)
        cell = next_cell(found, more=seconds is not None)
        if cell is None:
            break
        index = next(result.rounds for result in found if result.cell == cell)
        typer.echo(f"{cell}, round {index + 1}", err=True)
        journal.add({**asdict(cell), "round": index, **run(cell, index)})
    return results(cells, journal.records, rounds)


def broken_promises(found: Sequence[Result]) -> list[str]:
    """Cells below the floor beyond doubt, and cells that miss what a fixed length gains."""
    said = []
    for result in found:
        if result.state == "broken":
            said.append(f"{result.cell}: {result.ratios[DEFAULT]} is below {FLOOR}.")
        if result.gain == "broken":
            default, fixed = result.ratios[DEFAULT], result.ratios[FIXED]
            said.append(f"{result.cell}: {default}, where a fixed length has {fixed}.")
    return said
