"""What a forward pass costs, by the number of positions it computes and of rows: measured.

Leviathan et al. take the cost of verifying for a constant; on a real machine it is flat only as
long as reading the weights outweighs computing with them. A pass over r rows and n positions takes

    plain f(r) + row (r - 1) + drafted (f(n) - f(r)) seconds,

where f is the curve of one row: linears, which do not care whose positions they are; what another
row's context costs, however many positions look at it; and what is drafted. The three coefficients
are followed apart from each other, because they move apart: on a machine with other tenants reading
weights may take twice as long from one second to the next, while computing does not, so that drafts
are dear in one second and next to nothing in the next; and contexts grow.
"""

from __future__ import annotations

from bisect import bisect_left

import numpy as np
from numpy.typing import NDArray

from foretoken.runtime.tracking import Tracked, Triple

__all__ = ["CostCurve"]

_WEIGHT_OF_NEW = 0.04
"""How much one more measurement moves the curve's points beside it."""

_MOST_OF_DRAFTS, _MOST_OF_PASS = 0.3, 0.05
"""What it is off by more is cut there: a share of what drafts were expected to add, or of the pass
where those were thought to add nothing."""

_LEAST_SLOPE = 0.001
"""What a position adds at least, in passes over one: of what is thought to cost nothing it could
not be learnt how much it does."""

_ROW = 0.02
"""Before it is known: what another row costs, in passes over one position."""

_MEASURED, _GUESSED = (0.05, 1.0, 0.2), (0.2, 1.0, 1.0)
"""How much the coefficients are doubted in the beginning, if the curve was measured or not."""

_DOUBT, _TRUSTED, _MOST_DOUBT = 0.01, 0.1, 0.4
"""How much what drafts add is doubted after one pass without any, growing with the root of their
number; that is nothing up to the second, and no more than the third. See `CostCurve.drafting`."""

_SHORTEST = 1e-9
"""Seconds: clocks may stand still, costs are divided by."""

_ASSUMED = {size: 1.0 + 1.5 * (size - 1) / 63 for size in (1, 2, 4, 8, 16, 32, 64)}
"""Before anything has been measured: seconds by positions, in passes over one. Rather too little,
because what is thought too dear is not done, and never measured."""

_DRAFTED = 2
"""Which coefficient is that of drafts."""


class CostCurve:
    """Seconds per pass; f is linear between its points, proportional beyond the last.

    Args:
        points: f, seconds by number of positions, to start from. Without any it is a guess, and its
            unit a pass over one position, until a first measurement says how long that is.

    Attributes:
        measured: whether it started from points, or has been replaced by such a curve.
    """

    def __init__(self, points: dict[int, float] | None = None) -> None:
        self.measured = bool(points)
        self._scaled = self.measured
        self._without_drafts = 0  # passes since the last one with
        self._sizes: list[int] = []
        self._seconds: list[float] = []
        self._begin(points or _ASSUMED)

    def _begin(self, points: dict[int, float]) -> None:
        self._sizes = sorted(points)
        self._seconds = [max(points[size], _SHORTEST) for size in self._sizes]
        self._straighten()
        doubts = _MEASURED if self.measured else _GUESSED
        self._tracked = Tracked((1.0, _ROW * self._seconds[0], 1.0), doubts)

    def start_from(self, other: CostCurve) -> None:
        """Go on as the other curve, which is given up: whoever holds this one sees it."""
        self.__dict__.update(other.__dict__)
        self.measured = True

    def __bool__(self) -> bool:
        """Whether anything has been measured."""
        return self._scaled

    @property
    def surprised(self) -> bool:
        """Whether the last measurement was far from what was expected."""
        return self._tracked.surprised

    def observe(self, positions: int, seconds: float, rows: int = 1) -> None:
        """Take one measurement into account: of the coefficients, and of the curve beside it."""
        seconds = max(seconds, _SHORTEST)
        if not self._scaled:
            self._scaled = True
            scale = seconds / self(positions, rows)
            self._begin({size: passes * scale for size, passes in _ASSUMED.items()})
        parts = self._parts(positions, rows)
        self._tracked.add(*parts, seconds)
        self._without_drafts += 1
        if positions > rows:
            self._without_drafts = 0
            self._bend(positions, parts, seconds)

    def _bend(self, positions: int, parts: Triple, seconds: float) -> None:
        """Move the points beside a pass with drafts by what the coefficients leave unexplained."""
        sizes, curve = self._sizes, self._seconds
        while positions > sizes[-1]:
            sizes.append(2 * sizes[-1])
            curve.append(2 * curve[-1])
        expected, slope = self._tracked(*parts), self._tracked.values[_DRAFTED]
        most = max(_MOST_OF_DRAFTS * slope * parts[_DRAFTED], _MOST_OF_PASS * expected)
        off = _WEIGHT_OF_NEW * min(max(seconds - expected, -most), most) / slope
        at = bisect_left(sizes, positions)
        # Points up to the number of rows say what is plain, which is the coefficients' affair.
        if sizes[at] == positions or not at:
            curve[at] += off
        else:
            share = (positions - sizes[at - 1]) / (sizes[at] - sizes[at - 1])
            curve[at] += share * off
            if sizes[at - 1] > parts[1] + 1:
                curve[at - 1] += (1 - share) * off
        self._straighten()

    def _straighten(self) -> None:
        """A longer pass that was faster was lucky, or the shorter one was not."""
        sizes, curve = self._sizes, self._seconds
        slope = _LEAST_SLOPE * curve[0] / sizes[0]
        for at in range(1, len(curve)):
            least = curve[at - 1] + slope * (sizes[at] - sizes[at - 1])
            if curve[at] < least:
                curve[at] = least

    def _parts(self, positions: float, rows: int) -> Triple:
        """What the coefficients are multiplied with."""
        plain = self._alone(rows)
        return plain, rows - 1.0, (self._alone(positions) - plain if positions > rows else 0.0)

    def _alone(self, positions: float) -> float:
        """The curve of one row, f."""
        sizes, seconds = self._sizes, self._seconds
        at = bisect_left(sizes, positions)
        if at == len(sizes):
            return seconds[-1] * positions / sizes[-1]
        if at == 0 or sizes[at] == positions:
            return seconds[at]
        low, high = sizes[at - 1], sizes[at]
        share = (positions - low) / (high - low)
        return seconds[at - 1] + share * (seconds[at] - seconds[at - 1])

    def __call__(self, positions: float, rows: int = 1) -> float:
        """Expected seconds of a pass over this many positions."""
        return self._tracked(*self._parts(positions, rows))

    def drafting(self, positions: NDArray[np.float64], rows: int) -> NDArray[np.float64]:
        """Seconds to reckon with for passes with drafts over these numbers of positions.

        What drafts add is doubted the more the longer there were none. It may have become less, and
        nobody would know: that doubt counts in their favour, so that they are tried again.
        """
        sizes = self._sizes
        curve = np.interp(positions, sizes, self._seconds) * np.maximum(positions / sizes[-1], 1.0)
        plain, before, _ = self._parts(rows, rows)
        doubt = _DOUBT * self._without_drafts**0.5 - _TRUSTED
        drafted = self._tracked.values[_DRAFTED] * (1 - min(max(0.0, doubt), _MOST_DOUBT))
        seconds: NDArray[np.float64] = self._tracked(plain, before, 0.0) + drafted * np.maximum(
            curve - plain, 0.0
        )
        return seconds
