"""The cost curve: expected seconds of a target's pass, by its numbers of rows and nodes.

Controllers choose draft lengths by it. `profiling.py` measures it once. Then every pass updates it.

Leviathan et al. assume that verification has a constant cost. On a real machine, this holds only
while reading the weights takes longer than computing with them. Here a pass over r rows and n nodes
is modelled to cost

    a (f(r) + row (r - 1) - c (1 - h)) + b (f(n) - f(r)) seconds.

f is the curve of a single row, and `row` is the cost of one more row's context. The first term is
the pass without drafts. The second is what verifying drafts adds. Where attention pads rows, n is
the mean of the nodes and of the rectangle that they are padded to: only attention computes padding.
For a small model, four drafted tokens in one of 8 rows cost as much as three in each of them.

c is what plain passes save in a row, where no drafter takes the caches from them: h is 1 for passes
with drafts and for the plain one that follows, and halves with every further one. For a model of a
few million weights, it is a quarter of a pass. Without it, plain decoding would seem so much slower
than it is, because between drafts it is only seen in single passes. It is learnt by comparing them
with the first one after drafts.

a and b change independently: on a shared machine, reading weights may take twice as long from one
second to the next, while computing does not. Both are modelled as random walks, but during plain
passes, which say nothing about it, b returns to the measured curve: a b that is too high ends all
drafts, and would never be corrected. A Kalman filter tracks both and attributes an error to the
less certain coefficient.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from statistics import mean

from tokenleap.core.peers import ALONE, Peers

_DRIFT, _NOISE = 0.01, 0.04
"""Relative standard deviations: of a coefficient's change from pass to pass; of one measurement."""

_RETURN = 0.005
"""Part of the way that b returns in a plain pass: to 1, or to a if plain passes became faster."""

_COMPARED = range(2, 9)
"""Which plain passes after drafts are compared with the first one to learn c."""

_OF_ONE_COMPARISON, _MOST_SAVED = 0.05, 0.5
"""Least weight of one of them; the most that c can be, in passes over one node."""

_MOST_DOUBT = 0.5
"""A coefficient's relative standard deviation grows up to this while nothing measures it."""

_MOST_ERROR = 3.0
"""Errors are clipped at this many standard deviations: one slow pass may be an outlier."""

_DOUBT_MEASURED, _DOUBT_GUESSED = 0.5, 1.0
"""Relative standard deviation of b at the start: of a measured curve; of a guessed one."""

_LEAST = 0.05
"""Coefficients do not fall below this: their changes are relative, so 0 would be final."""

_LEAST_SLOPE = 0.001
"""The least that each further node costs, in passes over one node: no draft is free."""

_ROW = 0.02  # `row` where it was not measured, in passes over one node

_GUESS = {nodes: 1.0 + 1.5 * (nodes - 1) / 63 for nodes in (1, 2, 4, 8, 16, 32, 64)}
"""f where it was not measured: cost by number of nodes, in passes over one node. It is low on
purpose: a draft that seems too expensive is never tried, and then its cost is never measured."""

_SHORTEST = 1e-9  # least seconds of a pass: a coarse clock may measure 0, and costs are divisors


class CostCurve:
    """Expected seconds of a pass. All controllers of a target share one curve.

    f is linear between its points. Beyond the last one, it is proportional to the number of nodes.
    Points are measured seconds by the nodes of a single row, or by (rows, nodes). Without them the
    curve is a guess in passes over one node, until the first observed pass scales it to seconds.
    `agreed` gives all processes the seconds that the first one measured: whatever a controller
    measures goes through it. `pads_rows` is `Network.pads_rows`.
    """

    def __init__(
        self,
        points: Mapping[int, float] | Mapping[tuple[int, int], float] | None = None,
        peers: Peers = ALONE,
        *,
        pads_rows: bool = False,
    ) -> None:
        self.agreed, self._pads_rows = peers.agreed, pads_rows
        self.measured = bool(points)
        self._known = self.measured  # whether costs are in seconds
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
        self._covariance = (0.05**2, 0.0, doubt**2)  # variance of a, covariance, variance of b
        self._cut = 0.0  # what clipping took off the last error
        self._saved, self._comparisons = 0.0, 0  # c, and how often it was learnt
        self._plain_passes = _COMPARED.stop  # since the last drafts
        self._first = (0, 0.0)  # rows and seconds of the first of them

    def _set_curve(self, points: Mapping[int, float]) -> None:
        self._nodes = sorted(points)
        self._seconds = [points[self._nodes[0]]]
        slope = _LEAST_SLOPE * self._seconds[0] / self._nodes[0]
        for before, nodes in zip(self._nodes, self._nodes[1:], strict=False):
            # Noise may make a larger pass look faster than a smaller one.
            least = self._seconds[-1] + slope * (nodes - before)
            self._seconds.append(max(points[nodes], least))

    def start_from(self, other: CostCurve) -> None:
        """Become a measured curve, in place, because other objects share this one."""
        self.__dict__.update(other.__dict__)
        self.measured = True

    def __bool__(self) -> bool:
        """Whether any pass has been measured, so that costs are in seconds."""
        return self._known

    def observe(self, positions: float, seconds: float, rows: int = 1, longest: float = 1) -> None:
        """Learn from one pass over this many nodes, roots included, in this many rows."""
        seconds = max(self.agreed(seconds), _SHORTEST)
        positions = self._padded(positions, rows, longest)
        if not self._known:
            self._known, scale = True, seconds / self(positions, rows)
            self._seconds = [scale * each for each in self._seconds]
            self._row *= scale
        if positions > rows:
            self._plain_passes, self._first = 0, (0, 0.0)
        else:
            self.settle()
            self._compare(seconds, rows)
        x, y = self._parts(positions, rows, self._plain_passes)
        aa, ab, bb = self._covariance
        aa, bb = _drifted(aa, self._a), _drifted(bb, self._b)
        expected = self._a * x + self._b * y
        noise = (_NOISE * expected) ** 2
        most = _MOST_ERROR * (aa * x * x + 2 * ab * x * y + bb * y * y + noise) ** 0.5
        error = min(max(seconds - expected, -most), most)
        before, self._cut = self._cut, seconds - expected - error
        if before * self._cut > 0:  # clipped twice on the same side: not an outlier
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

    def _compare(self, seconds: float, rows: int) -> None:
        """Learn how much less a plain pass takes that does not follow drafts."""
        if self._plain_passes == 1:
            self._first = rows, seconds
            self._saved *= 1 - _RETURN
        elif self._plain_passes in _COMPARED and rows == self._first[0]:
            saved = (self._first[1] - seconds) / self._a / _regained(self._plain_passes)
            most = _MOST_SAVED * self._seconds[0]
            self._comparisons += 1
            share = max(_OF_ONE_COMPARISON, 1 / self._comparisons)
            self._saved += share * (min(max(saved, -most), most) - self._saved)

    def settle(self) -> None:
        """Believe a little less of what drafts seemed to add: after a pass without any."""
        self._plain_passes += 1
        if self.measured:
            aa, ab, bb = self._covariance
            self._b += _RETURN * (min(self._a, 1.0) - self._b)
            self._covariance = (aa, (1 - _RETURN) * ab, (1 - _RETURN) ** 2 * bb)

    def __call__(self, positions: float, rows: int = 1, longest: float = 1) -> float:
        """Expected seconds of a pass.

        Args:
            positions: nodes, roots included.
            longest: most nodes of a row.
        """
        positions = self._padded(positions, rows, longest)
        plain, drafted = self._parts(positions, rows, 0 if positions > rows else _COMPARED.stop)
        return self._a * plain + self._b * drafted

    def _padded(self, positions: float, rows: int, longest: float) -> float:
        rectangle = rows * longest
        pads = self._pads_rows and rectangle > positions
        return (positions + rectangle) / 2 if pads else positions

    def _parts(self, positions: float, rows: int, plain_passes: int = 0) -> tuple[float, float]:
        """Seconds of the pass without drafts, and of its drafts, where a = b = 1.

        Args:
            plain_passes: since drafts were verified, this one included.
        """
        alone = self._alone(rows)
        drafted = self._alone(positions) - alone if positions > rows else 0.0
        saved = max(self._saved, 0.0) * _regained(plain_passes)
        return alone + self._row * (rows - 1) - saved, drafted

    def _alone(self, positions: float) -> float:
        nodes, seconds = self._nodes, self._seconds
        if positions > nodes[-1]:
            return seconds[-1] * positions / nodes[-1]
        if positions <= nodes[0]:
            return seconds[0]
        # Not by NumPy: for a single number, its calls take ten times as long.
        right = bisect_left(nodes, positions)
        left = right - 1
        share = (positions - nodes[left]) / (nodes[right] - nodes[left])
        return seconds[left] + share * (seconds[right] - seconds[left])


def _regained(plain_passes: int) -> float:
    """1 - h in the last of so many plain passes after drafts."""
    return 1 - 0.5 ** max(0, plain_passes - 1)


def _drifted(variance: float, value: float) -> float:
    """The variance after one more step of the random walk."""
    return variance + (_DRIFT * value) ** 2 if variance < (_MOST_DOUBT * value) ** 2 else variance


def _doubled(variance: float, value: float) -> float:
    """The variance after two errors that were clipped on the same side."""
    return 2 * variance if variance < value**2 else variance
