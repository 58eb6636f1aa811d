"""What a forward pass costs, by the number of positions it computes and of rows: measured.

Leviathan et al. take the cost of verifying for a constant; on a real machine it is flat only as
long as reading the weights outweighs computing with them.
"""

from __future__ import annotations

from bisect import bisect_left
from math import log2

import numpy as np
from numpy.typing import NDArray

__all__ = ["CostCurve"]

_WEIGHT_OF_NEW = 0.1
"""How much one more measurement moves a known point: slow enough to ride over noise."""

_WEIGHT_AFTER_LONG, _LONG = 0.5, 50
"""The same where a point was not measured for so many passes: the machine may have changed."""

_MOST_OF_KNOWN, _MOST_OF_GUESSED = 1.5, 3.0
"""A measurement above this many times what was expected is cut there: it may be the machine's
hiccup, and if it is not the next ones say so, too."""

_KNOWN = round(1 / _WEIGHT_OF_NEW)
"""How many measurements make it so."""

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

    def add(self, value: float, now: int) -> None:
        """One more measurement; `now` counts those of all."""
        most = _MOST_OF_KNOWN if self.count >= _KNOWN else _MOST_OF_GUESSED
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
    """

    def __init__(self, points: dict[int, float] | None = None) -> None:
        self.measured = bool(points)
        self._sizes: list[int] = []
        self._seconds: list[float] = []
        self._means: dict[int, _Mean] = {}
        self._plain: dict[int, _Mean] = {1: _Mean(1.0)}
        self._drafting: dict[int, _Mean] = {1: _Mean(1.0)}
        self._observed = 0
        for size, seconds in sorted((points or {}).items()):
            self._insert(size, _Mean(seconds, count=_KNOWN))

    def start_from(self, other: CostCurve) -> None:
        """Go on as the other curve, which is given up: whoever holds this one sees it."""
        self.__dict__.update(other.__dict__)
        self.measured = True

    def observe(self, positions: int, seconds: float, rows: int = 1) -> None:
        """Take one measurement into account: of the curve, or of the factor of its rows."""
        seconds = max(seconds, _SHORTEST)
        self._observed += 1
        if not self._sizes:
            scale = seconds / _assumed(positions)
            for size, passes in _ASSUMED.items():
                self._insert(size, _Mean(passes * scale))
        if rows > 1:
            factors = self._drafting if positions > rows else self._plain
            if rows not in factors:
                factors[rows] = _Mean(self.factor(rows, drafting=positions > rows))
            factors[rows].add(seconds / self.of_one_row(positions), self._observed)
            return
        if positions not in self._means:
            self._insert(positions, _Mean(self.of_one_row(positions)))
        self._means[positions].add(seconds, self._observed)
        self._seconds[bisect_left(self._sizes, positions)] = self._means[positions].value

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
        """The curve itself."""
        sizes, seconds = self._sizes, self._seconds
        if not sizes:
            return _assumed(positions)
        at = bisect_left(sizes, positions)
        if at == len(sizes):
            return seconds[-1] * positions / sizes[-1]
        if at == 0 or sizes[at] == positions:
            return seconds[at]
        low, high = sizes[at - 1], sizes[at]
        share = (positions - low) / (high - low)
        return seconds[at - 1] + share * (seconds[at] - seconds[at - 1])

    def drafting(self, positions: NDArray[np.float64], rows: int) -> NDArray[np.float64]:
        """Expected seconds of passes with drafts over these numbers of positions."""
        sizes = self._sizes or list(_ASSUMED)
        curve = np.interp(positions, sizes, self._seconds or list(_ASSUMED.values()))
        beyond = np.maximum(positions / sizes[-1], 1.0)
        seconds: NDArray[np.float64] = curve * beyond * self.factor(rows, drafting=True)
        return seconds

    def factor(self, rows: int, *, drafting: bool) -> float:
        """Of the nearest number of rows that is known, in proportion.

        What drafts add where they have not been seen yet is what they add at that number of rows.
        """
        plain = _nearest(self._plain, rows)[1]
        if not drafting:
            return plain
        known, factor = _nearest(self._drafting, rows)
        return factor if known == rows else plain * factor / _nearest(self._plain, known)[1]


def _nearest(factors: dict[int, _Mean], rows: int) -> tuple[int, float]:
    """The nearest number of rows, and its factor."""
    if rows not in factors:
        rows = min(factors, key=lambda known: abs(log2(known / rows)))
    return rows, factors[rows].value


def _assumed(positions: float) -> float:
    (low, least), (high, most) = _ASSUMED.items()
    return least + (most - least) * max(0.0, positions - low) / (high - low)
