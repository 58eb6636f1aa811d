from __future__ import annotations

import numpy as np
import pytest

from foretoken.control import CostCurve


def test_the_curve_is_linear_between_points_and_proportional_beyond() -> None:
    curve = CostCurve({1: 1.0, 4: 1.0, 8: 2.0})
    assert [curve(n) for n in (1, 2, 4, 6, 8, 16)] == [1, 1, 1, 1.5, 2, 4]
    assert len(curve) == 3


def test_all_sizes_keep_pace_with_the_machine() -> None:
    """Twice as slow for a while: what was not measured meanwhile is known to be so, too."""
    curve = CostCurve({1: 1.0, 4: 1.2, 8: 2.0})
    for _ in range(15):
        curve.observe(4, 2.4)
    assert curve(4) == pytest.approx(2.4, rel=0.05)
    assert curve(8) / curve(4) == pytest.approx(2.0 / 1.2, rel=0.2)
    for _ in range(100):
        for size, seconds in ((1, 0.5), (4, 0.6), (8, 1.0)):
            curve.observe(size, seconds)
    assert [curve(n) for n in (1, 4, 8)] == pytest.approx([0.5, 0.6, 1.0], rel=0.01)


def test_what_sizes_cost_beside_others_is_learnt() -> None:
    curve = CostCurve({1: 1.0, 8: 1.2})
    for _ in range(150):
        curve.observe(1, 1.0)
        curve.observe(8, 3.0)
    assert [curve(n) for n in (1, 8)] == pytest.approx([1.0, 3.0], rel=0.05)


def test_a_size_that_was_not_measured_for_long_is_soon_set_right() -> None:
    """Others have kept up the pace, so that what surprises is its own."""
    curves = CostCurve({1: 1.0, 8: 1.2}), CostCurve({1: 1.0, 8: 1.2})
    for curve, passes in zip(curves, (1, 60), strict=True):
        curve.observe(1, 1.0)
        for _ in range(passes):
            curve.observe(8, 1.2)
        curve.observe(1, 1.4)
    ratios = [curve(8) / curve(1) for curve in curves]
    assert ratios[1] < ratios[0] < 1.2


def test_a_new_point_of_the_curve_begins_with_what_the_curve_said() -> None:
    curve = CostCurve({1: 1.0, 8: 2.0})
    curve.observe(16, 7.0)
    assert curve(16) == pytest.approx(4 + (7 - 4) / 3)
    for _ in range(60):
        curve.observe(16, 7.0)
    assert curve(16) == pytest.approx(7.0, rel=0.01)


def test_a_hiccup_of_the_machine_is_cut() -> None:
    curve = CostCurve({1: 1.0, 8: 2.0})
    curve.observe(8, 1000.0)
    assert curve(8) < 2.3
    assert curve(1) < 1.1
    for _ in range(100):
        curve.observe(8, 1000.0)
    assert curve(8) > 100  # it was none


def test_without_measurements_longer_passes_cost_a_little_more_in_any_unit() -> None:
    curve = CostCurve()
    assert len(curve) == 0
    assert not curve.measured
    assert curve(1) == 1 < curve(8) < curve(64) < 8
    shape = curve(9) / curve(1)
    curve.observe(1, 0.005)
    assert curve(1) == pytest.approx(0.005)
    assert curve(9) == pytest.approx(0.005 * shape)


def test_without_measurements_the_curve_is_learnt() -> None:
    curve = CostCurve()
    for _ in range(40):
        for positions in (1, 3, 9):
            curve.observe(positions, 0.002 * positions)
    assert [curve(n) for n in (1, 3, 9)] == pytest.approx([0.002, 0.006, 0.018], rel=0.05)


def test_a_clock_that_stands_still_is_no_division_by_zero() -> None:
    curve = CostCurve()
    for positions, rows in ((1, 1), (5, 1), (4, 4), (8, 4)):
        curve.observe(positions, 0.0, rows)
        assert curve(positions, rows) > 0


def test_rows_cost_more_than_nodes_of_one_row() -> None:
    curve = CostCurve({1: 1.0, 16: 2.0})
    assert curve(16, rows=16) == 2.0  # nothing known yet
    for _ in range(60):
        curve.observe(16, 5.0, rows=16)
        curve.observe(1, 1.0)
    assert curve(16, rows=16) == pytest.approx(5.0, rel=0.01)
    assert curve(16) == pytest.approx(2.0, rel=0.1)
    assert curve(16, rows=12) == pytest.approx(5.0, rel=0.01)  # the nearest that is known
    assert curve(16, rows=3) == curve(16)


def test_drafts_may_cost_more_the_more_rows_there_are() -> None:
    """A plain pass of many rows says nothing about one with drafts, once that has been seen."""
    curve = CostCurve({1: 1.0, 64: 2.0})
    for _ in range(60):
        curve.observe(16, 2.0, rows=16)
    before = curve(32, rows=16) / curve(16, rows=16)
    for _ in range(60):
        curve.observe(32, 6.0, rows=16)
        curve.observe(16, 2.0, rows=16)
    assert curve(32, rows=16) == pytest.approx(6.0, rel=0.01)
    assert curve(16, rows=16) == pytest.approx(2.0, rel=0.01)
    assert curve(24, rows=12) / curve(12, rows=12) > 2 * before  # as at the nearest that is known
    alone = CostCurve({1: 1.0, 64: 2.0})  # what one row costs by itself is as it was
    assert curve(33) / curve(1) == pytest.approx(alone(33) / alone(1))


def test_many_at_once_are_the_same_as_one_by_one() -> None:
    positions = np.array([2.5, 4.0, 6.5, 8.0, 20.0])
    for curve in (CostCurve({1: 1.0, 4: 1.5, 8: 2.0}), CostCurve({1: 1.0, 9: 1.0})):
        curve.observe(8, 4.0, rows=2)
        expected = [curve(n, rows=2) for n in positions]
        assert curve.drafting(positions, rows=2).tolist() == pytest.approx(expected)


def test_a_measured_curve_takes_the_place_of_a_learnt_one() -> None:
    curve = CostCurve()
    curve.observe(1, 1.0)
    curve.start_from(CostCurve({1: 3.0, 5: 4.0}))
    assert (curve(1), curve(5)) == (3.0, 4.0)
    assert curve.measured
    unchanged = CostCurve()
    unchanged.observe(1, 1.0)
    unchanged.start_from(unchanged)
    assert unchanged(1) == 1.0
    assert unchanged.measured
