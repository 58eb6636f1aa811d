"""A sum whose coefficients drift, followed through single noisy measurements of it."""

from __future__ import annotations

__all__ = ["Tracked", "Triple"]

_DRIFT = 0.01
"""How far a coefficient may have moved from one measurement to the next: a share of it."""

_NOISE = 0.04
"""The standard deviation of a measurement, as a share of it."""

_MOST_DOUBT = 0.5
"""What was not measured for long is not doubted more than so: a share of it."""

_MOST_SURPRISE = 3.0
"""A measurement that is off by more standard deviations is cut there, and nothing is doubted less
for it: it may be a hiccup."""

_DOUBT_AFTER = 2.0
"""Where the next one is off to the same side it was none: variances grow by this factor, so that
those that follow teach more."""

_LEAST_LEFT, _LEAST = 0.5, 0.05
"""Shares of a coefficient that are left by any measurement, and of what it began with by all: at
zero it could not walk."""

Triple = tuple[float, float, float]


class Tracked:
    """Coefficients a, b, c >= 0 of `ax + by + cz`: a Kalman filter, each takes a random walk.

    Where measurements tell coefficients apart, each is learnt; where they do not, what surprises is
    blamed on those that are least certain. (Kalman, "A New Approach to Linear Filtering and
    Prediction Problems", 1960.) Written out for three, because it runs between two passes.

    Args:
        values: what to begin with.
        doubts: standard deviations of those, as shares of them.

    Attributes:
        values: the coefficients.
        variances: of those.
    """

    __slots__ = ("_covariances", "_cut", "_least", "values", "variances")

    def __init__(self, values: Triple, doubts: Triple) -> None:
        self.values = values
        a, b, c = values
        da, db, dc = doubts
        self._least: Triple = (_LEAST * a, _LEAST * b, _LEAST * c)
        self.variances: Triple = ((a * da) ** 2, (b * db) ** 2, (c * dc) ** 2)
        self._covariances: Triple = (0.0, 0.0, 0.0)  # of a and b, a and c, b and c
        self._cut = 0.0  # of the last surprise, what was cut off

    def __call__(self, x: float, y: float, z: float) -> float:
        """The sum."""
        a, b, c = self.values
        return a * x + b * y + c * z

    @property
    def surprised(self) -> bool:
        """Whether the last measurement was so far off that it was cut."""
        return self._cut != 0

    def add(self, x: float, y: float, z: float, measured: float) -> None:
        """One more measurement of the sum."""
        a, b, c = self.values
        aa, bb, cc = self.variances
        ab, ac, bc = self._covariances
        aa, bb, cc = _drifted(aa, a), _drifted(bb, b), _drifted(cc, c)
        shared_a = aa * x + ab * y + ac * z
        shared_b = ab * x + bb * y + bc * z
        shared_c = ac * x + bc * y + cc * z
        expected = a * x + b * y + c * z
        variance = shared_a * x + shared_b * y + shared_c * z + (_NOISE * expected) ** 2
        if not variance:
            return
        most = _MOST_SURPRISE * variance**0.5
        surprise = min(max(measured - expected, -most), most)
        before, self._cut = self._cut, measured - expected - surprise
        by = surprise / variance
        told = (a + shared_a * by, b + shared_b * by, c + shared_c * by)
        least_a, least_b, least_c = self._least
        self.values = (
            max(told[0], _LEAST_LEFT * a, least_a),
            max(told[1], _LEAST_LEFT * b, least_b),
            max(told[2], _LEAST_LEFT * c, least_c),
        )
        if self._cut * before > 0:
            aa, bb, cc = _doubted(aa, a), _doubted(bb, b), _doubted(cc, c)
        elif not self._cut and told == self.values:
            aa, ab, ac = (
                aa - shared_a * shared_a / variance,
                ab - shared_a * shared_b / variance,
                ac - shared_a * shared_c / variance,
            )
            bb, bc = bb - shared_b * shared_b / variance, bc - shared_b * shared_c / variance
            cc -= shared_c * shared_c / variance
        self.variances, self._covariances = (aa, bb, cc), (ab, ac, bc)


def _drifted(variance: float, value: float) -> float:
    """The variance after one more step of the walk."""
    return variance + (_DRIFT * value) ** 2 if variance < (_MOST_DOUBT * value) ** 2 else variance


def _doubted(variance: float, value: float) -> float:
    """The variance after two surprises to the same side."""
    return _DOUBT_AFTER * variance if variance < value**2 else variance
