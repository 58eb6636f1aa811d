from __future__ import annotations

import random

import pytest

from foretoken.control.tracking import Tracked


def test_coefficients_that_measurements_tell_apart_are_learnt() -> None:
    tracked = Tracked([1.0, 1.0], [0.5, 0.5])
    dice = random.Random(1)
    for step in range(400):
        xs = (1.0, float(step % 3))
        truth = 2.0 + 0.3 * xs[1]
        tracked.add(xs, truth * dice.gauss(1.0, 0.03))
    assert tracked.values == pytest.approx([2.0, 0.3], rel=0.15)


def test_what_was_not_measured_grows_doubtful_and_then_learns_fast() -> None:
    """Two that know the same; one of them long ago."""
    late, fresh = Tracked([1.0, 1.0], [0.05, 0.05]), Tracked([1.0, 1.0], [0.05, 0.05])
    for _ in range(1000):
        late.add((1.0, 0.0), 1.0)
    assert late.doubt(1) == pytest.approx(0.3, rel=0.05)
    assert late.doubt(0) < 0.05
    for tracked in (late, fresh):
        tracked.add((1.0, 1.0), 2.2)
    assert late.values[1] > 1.1 > fresh.values[1]
    assert late.values[0] < fresh.values[0]


def test_coefficients_stay_positive() -> None:
    tracked = Tracked([1.0, 0.5, 0.0], [1.0, 1.0, 1.0])
    for _ in range(200):
        tracked.add((1.0, 5.0, 1.0), 1e-9)
    assert min(tracked.values[:2]) > 0
    assert tracked.values[2] == 0.0
    assert tracked.doubt(2) == 0.0


def test_where_nothing_is_weighed_nothing_is_learnt() -> None:
    tracked = Tracked([1.0, 2.0], [0.1, 0.1])
    tracked.add((0.0, 0.0), 1.0)
    assert tracked.values == [1.0, 2.0]
    assert tracked((2.0, 3.0)) == 8.0
