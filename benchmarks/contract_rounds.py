"""Verdicts on the contract's cells, and which cell gets the next round.

A test that is repeated after every round and stops at the first verdict finds one in noise sooner
or later. So a cell is looked at only after its `--rounds` rounds, and again whenever their number
has doubled; in between its verdict stays. The k-th look uses Student's interval of the logarithms
at level 1 - 0.05 / 2^k. All looks at a cell together then give a false verdict in at most 5 % of
cells, however long the run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import typer

from tokenleap.bench.contestants import BASELINE
from tokenleap.bench.rows import Interval, t_ratio
from tokenleap.bench.run import Journal

__all__ = [
    "DEFAULT",
    "FIXED",
    "FLOOR",
    "Cell",
    "Result",
    "broken_promises",
    "measure",
    "next_cell",
    "results",
]

DEFAULT, FIXED = "default", "fixed"
"""The variants besides the baseline: the default controller, and a fixed draft length."""

FLOOR = 0.97
"""The contract: the least ratio of tokens/s to those of `none`."""

ERRORS = 0.05
"""The share of cells that may get a false verdict."""


@dataclass(frozen=True)
class Cell:
    """One batch size on one kind of text."""

    batch: int
    kind: str

    def __str__(self) -> str:
        return f"{self.batch}: {self.kind}"


@dataclass(frozen=True)
class Result:
    """The measurements of a cell so far.

    Args:
        cell: the cell.
        rounds: how many it has had.
        judged: its rounds at the last look, which ratios and speeds are computed from; 0 before the
            first look, when they are computed from all rounds.
        ratios: per variant, tokens/s over those of `none`; empty before the first round.
        tokens_per_second: of `none`, the median.
        differing: outputs of any variant that differ from those of `none`, in all rounds.
    """

    cell: Cell
    rounds: int
    judged: int
    ratios: Mapping[str, Interval]
    tokens_per_second: float
    differing: int

    @property
    def state(self) -> str:
        """Of the first part of the contract: 'shown', 'broken' or 'open'."""
        ratio = self._seen(DEFAULT)
        if ratio.low is not None and ratio.low >= FLOOR:
            return "shown"
        return "broken" if ratio.high is not None and ratio.high < FLOOR else "open"

    @property
    def gain(self) -> str:
        """Of the second part: 'shown', 'not shown' or 'broken'; '-' if FIXED does not gain."""
        default, fixed = self._seen(DEFAULT), self._seen(FIXED)
        if fixed.low is None or fixed.low <= 1:
            return "-"
        if default.high is not None and default.high < 1:
            return "broken"
        return "shown" if default.low is not None and default.low > 1 else "not shown"

    def _seen(self, label: str) -> Interval:
        """The interval of the last look; before the first look nothing is known."""
        return self.ratios[label] if self.judged else Interval(1.0, None, None)


def results(
    cells: Sequence[Cell], records: Sequence[Mapping[str, Any]], rounds: int
) -> list[Result]:
    """A result for each cell, from the journal's records of rounds."""
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
    """Its number of rounds (0 before the first look) and the level of its intervals."""
    number = (rounds // wanted).bit_length()
    judged = wanted * 2 ** (number - 1) if number else 0
    return judged, 1 - ERRORS / 2 ** max(1, number)


def next_cell(found: Sequence[Result], *, more: bool) -> Cell | None:
    """The open cell with the fewest rounds, the first of equals; None if no cell needs a round.

    Args:
        found: results of all cells so far.
        more: whether cells that are still open after their rounds get further ones.
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
    """Run rounds until every cell has a verdict or its number of rounds, or the time is up.

    Args:
        cells: in order of importance.
        journal: has the rounds measured so far; new ones are added.
        rounds: of each cell.
        run: measures the round of this number of a cell.
        seconds: time limit, within which open cells get further rounds. None has no limit, and no
            further rounds.
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
    """The broken cells of both parts, with their intervals."""
    said = []
    for result in found:
        if result.state == "broken":
            said.append(f"{result.cell}: {result.ratios[DEFAULT]} is below {FLOOR}.")
        if result.gain == "broken":
            default, fixed = result.ratios[DEFAULT], result.ratios[FIXED]
            said.append(f"{result.cell}: {default}, where a fixed length has {fixed}.")
    return said
