"""What a forward pass costs, by the number of positions it computes and of rows: measured.

Leviathan et al. take the cost of verifying for a constant; on a real machine it is flat only as
long as reading the weights outweighs computing with them.
"""

from __future__ import annotations

from bisect import bisect_left
from math import log2

__all__ = ["CostCurve"]

_WEIGHT_OF_NEW = 0.1
"""How much one more measurement moves a known point: slow enough to ride over noise."""


class CostCurve:
    """Seconds per pass; linear between measured points, proportional beyond the last.

    The curve is that of one row. A pass over several rows of the same number of positions also
    attends to several contexts: that is a factor on the curve, by the number of rows.

    Args:
        points: seconds by number of positions, to start from.
    """

    def __init__(self, points: dict[int, float] | None = None) -> None:
        self._seconds: dict[int, float] = dict(sorted((points or {}).items()))
        self._sizes: list[int] = list(self._seconds)
        self._factors: dict[int, float] = {1: 1.0}

    def observe(self, positions: int, seconds: float, rows: int = 1) -> None:
        """Take one measurement into account: of the curve, or of the factor of its rows."""
        if rows > 1:
            seen, expected = seconds / self(positions), self._factor(rows)
            known = rows in self._factors
            self._factors[rows] = expected + (_WEIGHT_OF_NEW if known else 0.5) * (seen - expected)
            return
        if positions not in self._seconds:
            # One measurement alone is noise as well: begin with what the curve says.
            self._seconds[positions] = self(positions) if self._sizes else seconds
            self._sizes.insert(bisect_left(self._sizes, positions), positions)
        known_seconds = self._seconds[positions]
        self._seconds[positions] = known_seconds + _WEIGHT_OF_NEW * (seconds - known_seconds)

    def __len__(self) -> int:
        return len(self._sizes)

    def __call__(self, positions: int, rows: int = 1) -> float:
        """Expected seconds of a pass over this many positions; 1 where nothing is known."""
        return self._of_one_row(positions) * self._factor(rows)

    def _factor(self, rows: int) -> float:
        """Of the nearest number of rows that is known, in proportion."""
        return self._factors[min(self._factors, key=lambda known: abs(log2(known / rows)))]

    def _of_one_row(self, positions: int) -> float:
        sizes, seconds = self._sizes, self._seconds
        if not sizes:
            return 1.0
        at = bisect_left(sizes, positions)
        if at == len(sizes):
            return seconds[sizes[-1]] * positions / sizes[-1]
        if at == 0 or sizes[at] == positions:
            return seconds[sizes[at]]
        low, high = sizes[at - 1], sizes[at]
        share = (positions - low) / (high - low)
        return seconds[low] + share * (seconds[high] - seconds[low])
