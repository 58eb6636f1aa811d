"""Intervals of ratios, and in which order contestants are measured."""

from __future__ import annotations

import random
from collections import Counter
from math import exp
from statistics import geometric_mean

import pytest

from tokenleap.bench.run import order
from tokenleap.bench.summary import Interval, bootstrap_ratio, t_ratio


def test_the_geometric_mean_of_twice_and_half_is_one() -> None:
    assert geometric_mean([2.0, 0.5]) == pytest.approx(1)


def test_a_bootstrap_interval_contains_the_mean_and_is_reproducible() -> None:
    ratios = [1.1, 1.3, 0.9, 1.2, 1.05]
    interval = bootstrap_ratio(ratios, seed=4)
    assert interval.low is not None
    assert interval.high is not None
    assert min(ratios) <= interval.low < interval.mean < interval.high <= max(ratios)
    assert interval == bootstrap_ratio(ratios, seed=4)
    assert bootstrap_ratio([1.25]).low is None
    assert bootstrap_ratio([1.0, 1.0]) == Interval(1.0, 1.0, 1.0)


def test_a_t_interval_is_that_of_the_logarithms() -> None:
    """Student's t for 2 degrees of freedom at 95 % is 4.303."""
    found = t_ratio([0.5, 1.0, 2.0], 0.95)
    half = 4.302652729696142 * 0.6931471805599453 / 3**0.5
    assert found.mean == pytest.approx(1.0)
    assert (found.low, found.high) == pytest.approx((exp(-half), exp(half)))
    assert t_ratio([1.1], 0.95).low is None
    assert t_ratio([1.1] * 3, 0.95).high == pytest.approx(1.1)


def test_t_intervals_over_five_rounds_hold_the_truth_as_often_as_they_say() -> None:
    """95 % of 500, within four standard deviations of 1 %; a bootstrap's hold it in 83 %."""
    dice, held = random.Random(0), 0
    for _ in range(500):
        found = t_ratio([exp(dice.gauss(0, 0.05)) for _ in range(5)], 0.95)
        assert found.low is not None
        assert found.high is not None
        held += found.low <= 1 <= found.high
    assert held / 500 == pytest.approx(0.95, abs=4 * 0.01)


@pytest.mark.parametrize("methods", [["none", "a"], ["none", "a", "b"], ["none", "a", "b", "c"]])
def test_over_a_full_turn_every_method_is_as_often_before_as_after_every_other(
    methods: list[str],
) -> None:
    rounds = [order(methods, index) for index in range(2 * len(methods))]
    assert all(sorted(each) == sorted(methods) for each in rounds)
    before = Counter((a, b) for each in rounds for i, a in enumerate(each) for b in each[i + 1 :])
    assert len(set(before.values())) == 1
