"""A sum whose coefficients drift, followed through single noisy measurements of it."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["Tracked"]

_DRIFT = 0.01
"""How far a coefficient may have moved from one measurement to the next: a share of it."""

_NOISE = 0.04
"""The standard deviation of a measurement, as a share of it."""

_MOST_DOUBT = 0.3
"""What was not measured for long is not doubted more than so: a share of it."""

_MOST_SURPRISE = 3.0
"""A measurement that is off by more standard deviations is cut there, and nothing is doubted less
for it: it may be a hiccup."""

_DOUBT_AFTER = 2.0
"""Where the next one is off to the same side it was none: variances grow by this factor, so that
those that follow teach more."""

_LEAST_LEFT = 0.5
"""No measurement leaves less of a coefficient: they stay positive."""


class Tracked:
    """Coefficients c >= 0 of `sum(c_i x_i)`: a Kalman filter in which each takes a random walk.

    Where measurements tell coefficients apart, each is learnt; where they do not, what surprises is
    blamed on those that are least certain. (Kalman, "A New Approach to Linear Filtering and
    Prediction Problems", 1960.)

    Args:
        values: what to begin with.
        doubts: standard deviations of those, as shares of them.
    """

    __slots__ = ("_covariance", "_cut", "values")

    def __init__(self, values: Sequence[float], doubts: Sequence[float]) -> None:
        self.values = list(values)
        self._cut = 0.0  # of the last surprise, what was cut off
        self._covariance = [
            [(value * doubt) ** 2 if row == column else 0.0 for column in range(len(values))]
            for row, (value, doubt) in enumerate(zip(values, doubts, strict=True))
        ]

    def __call__(self, xs: Sequence[float]) -> float:
        """The sum."""
        return sum(value * x for value, x in zip(self.values, xs, strict=True))

    @property
    def surprised(self) -> bool:
        """Whether the last measurement was so far off that it was cut."""
        return self._cut != 0

    def doubt(self, index: int) -> float:
        """Standard deviation of a coefficient, as a share of it."""
        value = self.values[index]
        return float(self._covariance[index][index] ** 0.5 / value) if value else 0.0

    def add(self, xs: Sequence[float], measured: float) -> None:
        """One more measurement of the sum."""
        values, covariance = self.values, self._covariance
        for index, value in enumerate(values):
            if covariance[index][index] < (_MOST_DOUBT * value) ** 2:
                covariance[index][index] += (_DRIFT * value) ** 2
        expected = self(xs)
        shared = [sum(c * x for c, x in zip(row, xs, strict=True)) for row in covariance]
        variance = sum(s * x for s, x in zip(shared, xs, strict=True)) + (_NOISE * expected) ** 2
        if not variance:
            return
        most = _MOST_SURPRISE * variance**0.5
        surprise = min(max(measured - expected, -most), most)
        before, self._cut = self._cut, measured - expected - surprise
        gains = [each / variance for each in shared]
        for index, gain in enumerate(gains):
            values[index] = max(values[index] + gain * surprise, _LEAST_LEFT * values[index])
        if self._cut:
            if self._cut * before > 0:
                self._doubt_all()
            return
        for gain, row in zip(gains, covariance, strict=True):
            for other, each in enumerate(shared):
                row[other] -= gain * each

    def _doubt_all(self) -> None:
        for index, value in enumerate(self.values):
            if self._covariance[index][index] < value**2:
                self._covariance[index][index] *= _DOUBT_AFTER
