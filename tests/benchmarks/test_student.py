"""Student's t against SciPy's, and what its intervals over a few rounds are worth."""

from __future__ import annotations

import random
from math import exp

import pytest
from benchmarks.student import quantile, t_ratio
from scipy.stats import t


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 5, 9, 30, 79])
@pytest.mark.parametrize("level", [0.5, 0.95, 0.975, 0.9984])
def test_quantiles(freedom: int, level: float) -> None:
    assert quantile(level, freedom) == pytest.approx(t.ppf((1 + level) / 2, freedom), rel=1e-9)


def test_the_interval_is_that_of_the_logarithms() -> None:
    found = t_ratio([0.5, 1.0, 2.0], 0.95)
    half = t.ppf(0.975, 2) * 0.6931471805599453 / 3**0.5
    assert found.mean == pytest.approx(1.0)
    assert (found.low, found.high) == pytest.approx((exp(-half), exp(half)))


def test_a_single_round_has_no_interval_and_equal_ones_have_none_to_speak_of() -> None:
    assert t_ratio([1.1], 0.95).low is None
    assert t_ratio([1.1] * 3, 0.95).high == pytest.approx(1.1)


def test_five_rounds_hold_the_truth_as_often_as_is_said() -> None:
    """95 % of 2000, give or take 0.5 %; a percentile bootstrap's intervals hold it in 83 %."""
    dice, held = random.Random(0), 0
    for _ in range(2000):
        found = t_ratio([exp(dice.gauss(0, 0.05)) for _ in range(5)], 0.95)
        assert found.low is not None
        assert found.high is not None
        held += found.low <= 1 <= found.high
    assert held / 2000 == pytest.approx(0.95, abs=4 * 0.005)
