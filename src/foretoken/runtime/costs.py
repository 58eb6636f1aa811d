"""What a pass of the target costs, by its rows and nodes: measured once, then followed.

Leviathan et al. assume that verification has a constant cost. On a real machine this holds only
while reading the weights takes longer than computing with them. A pass over r rows and n nodes is
modelled to cost

    a (f(r) + row (r - 1)) + b (f(n) - f(r)) seconds,

where f is the curve of a single row, and `row` the cost of a further row's context. The first term
is the pass without drafts; the second one is what verifying drafts adds. a and b change
independently: on a shared machine, reading weights may take twice as long from one second to the
next while computing does not. Both are modelled as a random walk that a Kalman filter tracks, so
that an error is attributed to the less certain coefficient.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import mean

import numpy as np
from numpy.typing import NDArray

__all__ = ["CostCurve"]

_DRIFT, _NOISE = 0.01, 0.04
"""Standard deviations: of a coefficient's change from pass to pass, of one measurement. Shares."""

_MOST_DOUBT = 0.5
"""Largest relative standard deviation that a coefficient reaches while it is not measured."""

_MOST_ERROR = 3.0
"""Errors are cut at so many standard deviations: one slow pass may be a hiccup."""

_DOUBT_MEASURED, _DOUBT_GUESSED = 0.5, 1.0
"""Relative standard deviation of b at the start, for a measured curve and for a guessed one."""

_LEAST = 0.05
"""Coefficients do not fall below this: from zero none could recover."""

_LEAST_SLOPE = 0.001
"""What every node adds at least, in passes over one node: drafts are never quite free."""

_ROW = 0.02
"""What a further row's context costs where that was not measured, in passes over one node."""

_GUESS = {nodes: 1.0 + 1.5 * (nodes - 1) / 63 for nodes in (1, 2, 4, 8, 16, 32, 64)}
"""Passes over one node, by nodes, where nothing was measured. It errs on
the low side: a draft that seems too expensive is never tried, and so never measured."""

_SHORTEST = 1e-9
"""Seconds: clocks may stand still, and costs are divided by."""


class CostCurve:
    """Expected seconds of a pass; shared by all who choose by them.

    f is linear between its points and proportional beyond the last one.

    Args:
        points: seconds by nodes of a single row, or by (rows, nodes), to start from. Without any
            the curve is a guess in passes over one node, until a first measurement scales it.

    Attributes:
        measured: whether it started from measured points.
    """

    def __init__(
        self, points: Mapping[int, float] | Mapping[tuple[int, int], float] | None = None
    ) -> None:
        self.measured = bool(points)
        self._known = self.measured  # whether its unit is the second
        shapes = {
            shape if isinstance(shape, tuple) else (1, shape): max(seconds, _SHORTEST)
            for shape, seconds in (points or _GUESS).items()
        }
        self._set_curve({nodes: s for (rows, nodes), s in shapes.items() if rows == 1})
        one = self._seconds[0]
        extra = [(s - self._alone(n)) / (r - 1) for (r, n), s in shapes.items() if r > 1]
        self._row = max(mean(extra), 0.0) if extra else _ROW * one
        self._a = self._b = 1.0
        doubt = _DOUBT_MEASURED if self.measured else _DOUBT_GUESSED
        self._covariance = (0.05**2, 0.0, doubt**2)  # of a; of a and b; of b
        self._cut = 0.0  # what was cut off the last error

    def _set_curve(self, points: Mapping[int, float]) -> None:
        self._nodes = sorted(points)
        self._seconds = [points[self._nodes[0]]]
        slope = _LEAST_SLOPE * self._seconds[0] / self._nodes[0]
        for before, nodes in zip(self._nodes, self._nodes[1:], strict=False):
            # Noise may make a larger pass look faster than a smaller one.
            least = self._seconds[-1] + slope * (nodes - before)
            self._seconds.append(max(points[nodes], least))

    def start_from(self, other: CostCurve) -> None:
        """Become a measured curve, in place, for everything that shares this one."""
        self.__dict__.update(other.__dict__)
        self.measured = True

    def __bool__(self) -> bool:
        """Whether anything has been measured."""
        return self._known

    def observe(self, positions: int, seconds: float, rows: int = 1) -> None:
        """Learn from one pass."""
        seconds = max(seconds, _SHORTEST)
        if not self._known:
            self._known, scale = True, seconds / self(positions, rows)
            self._seconds = [scale * each for each in self._seconds]
            self._row *= scale
        x, y = self._parts(positions, rows)
        aa, ab, bb = self._covariance
        aa, bb = _drifted(aa, self._a), _drifted(bb, self._b)
        expected = self._a * x + self._b * y
        noise = (_NOISE * expected) ** 2
        most = _MOST_ERROR * (aa * x * x + 2 * ab * x * y + bb * y * y + noise) ** 0.5
        error = min(max(seconds - expected, -most), most)
        before, self._cut = self._cut, seconds - expected - error
        if before * self._cut > 0:  # twice in the same direction: no outlier but a change
            aa, bb = _doubled(aa, self._a), _doubled(bb, self._b)
        shared_a, shared_b = aa * x + ab * y, ab * x + bb * y
        variance = shared_a * x + shared_b * y + noise
        self._a = max(self._a + shared_a * error / variance, _LEAST)
        self._b = max(self._b + shared_b * error / variance, _LEAST)
        self._covariance = (
            aa - shared_a * shared_a / variance,
            ab - shared_a * shared_b / variance,
            bb - shared_b * shared_b / variance,
        )

    def __call__(self, positions: float, rows: int = 1) -> float:
        """Expected seconds of a pass over so many nodes, roots included, in so many rows."""
        plain, drafted = self._parts(positions, rows)
        return self._a * plain + self._b * drafted

    def _parts(self, positions: float, rows: int) -> tuple[float, float]:
        """Seconds of the pass without drafts, and of the drafts, as they were in the beginning."""
        alone = self._alone(rows)
        drafted = self._alone(positions) - alone if positions > rows else 0.0
        return alone + self._row * (rows - 1), drafted

    def _alone(self, positions: float) -> float:
        """f, the curve of a single row."""
        last = self._nodes[-1]
        if positions > last:
            return self._seconds[-1] * positions / last
        return float(np.interp(positions, self._nodes, self._seconds))

    def drafting(self, positions: NDArray[np.float64], rows: int) -> NDArray[np.float64]:
        """Expected seconds [N] for many numbers of nodes [N] at once."""
        curve = np.interp(positions, self._nodes, self._seconds)
        curve *= np.maximum(positions / self._nodes[-1], 1.0)
        plain, _ = self._parts(rows, rows)
        drafted = np.maximum(curve - self._alone(rows), 0.0)
        seconds: NDArray[np.float64] = self._a * plain + self._b * drafted
        return seconds


def _drifted(variance: float, value: float) -> float:
    """The variance after one more step of the random walk."""
    return variance + (_DRIFT * value) ** 2 if variance < (_MOST_DOUBT * value) ** 2 else variance


def _doubled(variance: float, value: float) -> float:
    """The variance after errors that were no hiccups."""
    return 2 * variance if variance < value**2 else variance
