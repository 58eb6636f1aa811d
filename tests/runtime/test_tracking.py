from __future__ import annotations

import random

import numpy as np
import pytest

from foretoken.runtime.tracking import Tracked


def test_coefficients_that_measurements_tell_apart_are_learnt() -> None:
    tracked = Tracked((1.0, 1.0, 1.0), (0.5, 0.5, 0.5))
    dice = random.Random(1)
    for step in range(600):
        y, z = float(step % 3), float(step % 5)
        truth = 2.0 + 0.3 * y + 0.7 * z
        tracked.add(1.0, y, z, truth * dice.gauss(1.0, 0.03))
    assert tracked.values == pytest.approx((2.0, 0.3, 0.7), rel=0.15)


def test_what_was_not_measured_grows_doubtful_and_then_learns_fast() -> None:
    """Two that know the same; one of them long ago."""
    late, fresh = (Tracked((1.0, 1.0, 0.0), (0.05, 0.05, 0.0)) for _ in range(2))
    for _ in range(1000):
        late.add(1.0, 0.0, 0.0, 1.0)
    doubts = [variance**0.5 for variance in late.variances]
    assert doubts == pytest.approx((0.02, 0.32, 0), abs=0.01)
    for tracked in (late, fresh):
        tracked.add(1.0, 1.0, 0.0, 2.2)
    assert late.values[1] > 1.1 > fresh.values[1]
    assert late.values[0] < fresh.values[0]


def test_it_is_the_filter_of_the_textbook() -> None:
    """With matrices, as long as nothing is cut."""
    values, doubts = (1.0, 0.5, 0.2), (0.05, 0.2, 0.1)
    tracked = Tracked(values, doubts)
    mean, covariance = np.array(values), np.diag((np.array(values) * doubts) ** 2)
    dice = np.random.default_rng(3)
    for _ in range(50):
        weights = dice.uniform(0, 2, 3)
        x, y, z = weights.tolist()
        measured = float(weights @ (1.0, 0.5, 0.2) * dice.normal(1.0, 0.02))
        tracked.add(x, y, z, measured)
        covariance = covariance + np.diag((0.01 * mean) ** 2)
        shared = covariance @ weights
        variance = weights @ shared + (0.04 * weights @ mean) ** 2
        mean = mean + shared / variance * (measured - weights @ mean)
        covariance = covariance - np.outer(shared, shared) / variance
        assert not tracked.surprised
    assert tracked.values == pytest.approx(tuple(mean))
    assert tracked.variances == pytest.approx(tuple(np.diag(covariance)))


def test_one_surprise_is_cut_and_more_are_believed() -> None:
    tracked = Tracked((1.0, 0.0, 0.0), (0.05, 0.0, 0.0))
    for _ in range(50):
        tracked.add(1.0, 0.0, 0.0, 1.0)
    values, surprises = list[float](), list[bool]()
    for _ in range(31):
        tracked.add(1.0, 0.0, 0.0, 5.0)
        values.append(tracked.values[0])
        surprises.append(tracked.surprised)
    assert (surprises[0], surprises[-1]) == (True, False)
    assert values[0] < 1.05
    assert values[-1] == pytest.approx(5.0, rel=0.02)


def test_coefficients_stay_positive() -> None:
    tracked = Tracked((1.0, 0.5, 0.0), (1.0, 1.0, 1.0))
    for _ in range(20_000):
        tracked.add(1.0, 5.0, 1.0, 1e-9)
    assert tracked.values == pytest.approx((0.05, 0.025, 0.0))
    assert min(tracked.variances) >= 0
    for _ in range(200):  # and come back
        tracked.add(1.0, 5.0, 1.0, 7.0)
    assert tracked(1.0, 5.0, 1.0) == pytest.approx(7.0, rel=0.01)


def test_where_nothing_is_weighed_nothing_is_learnt() -> None:
    tracked = Tracked((1.0, 2.0, 3.0), (0.1, 0.1, 0.1))
    tracked.add(0.0, 0.0, 0.0, 1.0)
    assert tracked.values == (1.0, 2.0, 3.0)
    assert tracked(2.0, 3.0, 1.0) == 11.0
