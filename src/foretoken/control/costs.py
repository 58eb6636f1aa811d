"""What a forward pass costs, by the number of positions it computes and of rows: measured.

Leviathan et al. take the cost of verifying for a constant; on a real machine it is flat only as
long as reading the weights outweighs computing with them.

A machine has other tenants, and contexts grow: from one moment to the next all passes may become
dearer or cheaper. That is the pace, which follows quickly, whatever was measured. What passes cost
compared with each other, which is what decides whether to draft, moves slowly; otherwise whichever
was measured in a bad moment would look dear.
"""

from __future__ import annotations

from bisect import bisect_left
from math import log2

import numpy as np
from numpy.typing import NDArray

__all__ = ["CostCurve"]

_WEIGHT_OF_NEW, _WEIGHT_IN_PACE = 0.03, 0.15
"""How much one more measurement moves a known point beside others, and all of them together."""

_WEIGHT_AFTER_LONG, _LONG = 0.3, 50
"""The former where a point was not measured for so many passes: others have kept up the pace, and
what is still surprising about this one is its own."""

_MOST_OF_KNOWN, _MOST_OF_GUESSED = 1.5, 3.0
"""A measurement above this many times what was expected is cut there: it may be the machine's
hiccup, and if it is not the next ones say so, too."""

_KNOWN = 10
"""How many measurements make it so."""

_MEASURED = 30
"""How many those of a curve to start from are worth: medians, taken one soon after the other."""

_SHORTEST = 1e-9
"""Seconds: clocks may stand still, costs are divided by."""

_ASSUMED = {1: 1.0, 64: 2.5}
"""Before anything has been measured: seconds by positions, in passes over one. Rather too little,
because what is thought too dear is not done, and never measured."""


class _Mean:
    """A running mean that turns into an exponential one.

    Args:
        value: what to begin with.
        count: how many measurements that is worth; a guess two, as one alone is noise as well.
    """

    __slots__ = ("count", "seen", "value")

    def __init__(self, value: float, count: int = 2) -> None:
        self.value, self.count, self.seen = value, count, 0

    @property
    def known(self) -> bool:
        """Whether it is more than a guess."""
        return self.count >= _KNOWN

    def add(self, value: float, now: int) -> None:
        """One more measurement; `now` counts those of all."""
        most = _MOST_OF_KNOWN if self.known else _MOST_OF_GUESSED
        self.count += 1
        late = min(1.0, (now - self.seen) / _LONG)
        weight = max(_WEIGHT_OF_NEW, 1 / self.count, late * _WEIGHT_AFTER_LONG)
        self.value += weight * (min(value, most * self.value) - self.value)
        self.seen = now


class CostCurve:
    """Seconds per pass; linear between measured points, proportional beyond the last.

    The curve is that of one row. A pass over several rows of the same number of positions also
    attends to several contexts: that is a factor on the curve, by the number of rows, and one for
    passes with drafts and without, because how much dearer drafts make a pass depends on the rows.

    Args:
        points: seconds by number of positions, to start from. Without any the curve is a guess, and
            its unit a pass over one position, until a first measurement says how long that is.

    Attributes:
        measured: whether it started from points, or has been replaced by such a curve.
        pace: what a pass costs now over what points and factors say.
    """

    def __init__(self, points: dict[int, float] | None = None) -> None:
        self.measured = bool(points)
        self.pace = 1.0
        self._observed = 0
        self._sizes: list[int] = []
        self._seconds: list[float] = []
        self._means: dict[int, _Mean] = {}
        self._plain: dict[int, _Mean] = {1: _Mean(1.0)}
        self._drafting: dict[int, _Mean] = {1: _Mean(1.0)}
        for size, seconds in sorted((points or {}).items()):
            self._insert(size, _Mean(seconds, count=_MEASURED))

    def start_from(self, other: CostCurve) -> None:
        """Go on as the other curve, which is given up: whoever holds this one sees it."""
        self.__dict__.update(other.__dict__)
        self.measured = True

    def observe(self, positions: int, seconds: float, rows: int = 1) -> None:
        """Take one measurement into account: of the curve or the factor of its rows, and of pace.

        What was guessed so far is corrected first, so that the pace is not blamed for it.
        """
        seconds = max(seconds, _SHORTEST)
        self._observed += 1
        if not self._sizes:
            scale = seconds / _assumed(positions)
            for size, passes in _ASSUMED.items():
                self._insert(size, _Mean(passes * scale))
        if rows > 1:
            mean = self._factor_of(rows, drafting=positions > rows)
            mean.add(seconds / self.of_one_row(positions), self._observed)
        else:
            if positions not in self._means:
                self._insert(positions, _Mean(self.of_one_row(positions) / self.pace))
            mean = self._means[positions]
            mean.add(seconds / self.pace, self._observed)
            self._seconds[bisect_left(self._sizes, positions)] = mean.value
        if mean.known:
            expected = self(positions, rows)
            surprise = min(max(seconds / expected, 1 / _MOST_OF_KNOWN), _MOST_OF_KNOWN)
            self.pace *= surprise**_WEIGHT_IN_PACE

    def _factor_of(self, rows: int, *, drafting: bool) -> _Mean:
        """The factor of this number of rows itself; a new one begins as the nearest."""
        factors = self._drafting if drafting else self._plain
        if rows not in factors:
            factors[rows] = _Mean(self.factor(rows, drafting=drafting))
        return factors[rows]

    def _insert(self, size: int, mean: _Mean) -> None:
        at = bisect_left(self._sizes, size)
        self._sizes.insert(at, size)
        self._seconds.insert(at, mean.value)
        self._means[size] = mean

    def __len__(self) -> int:
        return len(self._sizes)

    def __call__(self, positions: float, rows: int = 1) -> float:
        """Expected seconds of a pass over this many positions."""
        return self.of_one_row(positions) * self.factor(rows, drafting=positions > rows)

    def of_one_row(self, positions: float) -> float:
        """The curve itself, at the present pace."""
        sizes, seconds, pace = self._sizes, self._seconds, self.pace
        if not sizes:
            return _assumed(positions)
        at = bisect_left(sizes, positions)
        if at == len(sizes):
            return pace * seconds[-1] * positions / sizes[-1]
        if at == 0 or sizes[at] == positions:
            return pace * seconds[at]
        low, high = sizes[at - 1], sizes[at]
        share = (positions - low) / (high - low)
        return pace * (seconds[at - 1] + share * (seconds[at] - seconds[at - 1]))

    def drafting(self, positions: NDArray[np.float64], rows: int) -> NDArray[np.float64]:
        """Expected seconds of passes with drafts over these numbers of positions."""
        sizes = self._sizes or list(_ASSUMED)
        curve = np.interp(positions, sizes, self._seconds or list(_ASSUMED.values()))
        beyond = np.maximum(positions / sizes[-1], 1.0)
        factor = self.pace * self.factor(rows, drafting=True)
        seconds: NDArray[np.float64] = curve * beyond * factor
        return seconds

    def factor(self, rows: int, *, drafting: bool) -> float:
        """Of the nearest number of rows that is known, in proportion.

        What drafts add where they have not been seen yet is what they add at that number of rows.
        They never make a pass cheaper, whatever the machine did while it was measured.
        """
        plain = _nearest(self._plain, rows)[1]
        if not drafting:
            return plain
        known, factor = _nearest(self._drafting, rows)
        return plain * max(1.0, factor / _nearest(self._plain, known)[1])


def _nearest(factors: dict[int, _Mean], rows: int) -> tuple[int, float]:
    """The nearest number of rows, and its factor."""
    if rows not in factors:
        rows = min(factors, key=lambda known: abs(log2(known / rows)))
    return rows, factors[rows].value


def _assumed(positions: float) -> float:
    (low, least), (high, most) = _ASSUMED.items()
    return least + (most - least) * max(0.0, positions - low) / (high - low)
