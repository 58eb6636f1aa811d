from __future__ import annotations

import numpy as np
import pytest

from foretoken.control import CostCurve


def test_the_curve_is_linear_between_points_and_proportional_beyond() -> None:
    curve = CostCurve({1: 1.0, 4: 1.0, 8: 2.0})
    assert [curve(n) for n in (1, 6, 8, 16)] == pytest.approx([1, 1.5, 2, 4], rel=0.002)
    assert 1 < curve(2) < curve(4) < 1.01  # positions are never free


def test_longer_passes_are_never_taken_to_be_faster() -> None:
    curve = CostCurve({1: 1.2, 2: 1.0, 4: 2.0})
    assert [curve(n) for n in (1, 2, 4)] == pytest.approx([1.2, 1.2, 2.0], rel=0.002)


def test_what_is_plain_keeps_pace_with_the_machine() -> None:
    """Half as fast for a while."""
    curve = CostCurve({1: 1.0, 8: 2.0})
    for _ in range(20):
        curve.observe(1, 2.0)
    assert curve(1) == pytest.approx(2.0, rel=0.05)
    assert curve(8) - curve(1) == pytest.approx(1.0)  # nothing was said about what drafts add


def test_what_drafts_add_is_followed_apart_from_what_is_plain() -> None:
    """Reading the weights takes longer, computing does not: drafts cost less than they did."""
    curve = CostCurve({1: 1.0, 8: 1.5})
    for _ in range(200):
        curve.observe(1, 2.0)
        curve.observe(8, 2.1)
    assert [curve(n) for n in (1, 8)] == pytest.approx([2.0, 2.1], rel=0.02)
    for _ in range(200):
        curve.observe(1, 1.0)
        curve.observe(8, 3.0)
    assert [curve(n) for n in (1, 8)] == pytest.approx([1.0, 3.0], rel=0.02)


def test_what_drafts_add_is_doubted_in_their_favour_where_there_were_none_for_long() -> None:
    curve = CostCurve({1: 1.0, 9: 2.0})
    added = []
    for passes in (50, 350, 10_000, 10_000):
        for _ in range(passes):
            curve.observe(1, 1.0)
        added.append(curve.drafting(np.array([9.0]), 1).item() - curve(1))
    assert added == pytest.approx([1.0, 0.9, 0.6, 0.6])
    assert curve(9) - curve(1) == pytest.approx(1.0)
    curve.observe(9, 2.0)  # nothing has changed
    assert curve.drafting(np.array([9.0]), 1).item() - curve(1) == pytest.approx(1.0, rel=0.01)


def test_the_shape_of_the_curve_is_learnt() -> None:
    curve = CostCurve({1: 1.0, 8: 2.0, 16: 3.0})
    for _ in range(300):
        for positions, seconds in ((1, 1.0), (8, 1.2), (16, 3.0)):
            curve.observe(positions, seconds)
    assert [curve(n) for n in (1, 8, 16)] == pytest.approx([1.0, 1.2, 3.0], rel=0.05)


def test_beyond_the_last_point_there_are_new_ones() -> None:
    curve = CostCurve({1: 1.0, 8: 2.0})
    for _ in range(300):
        for positions, seconds in ((1, 1.0), (8, 2.0), (40, 4.0)):
            curve.observe(positions, seconds)
    assert [curve(n) for n in (1, 8, 40)] == pytest.approx([1.0, 2.0, 4.0], rel=0.05)


def test_a_hiccup_of_the_machine_is_cut() -> None:
    curve = CostCurve({1: 1.0, 8: 2.0})
    curve.observe(8, 1000.0)
    assert curve(8) < 2.7
    assert curve(1) < 1.1
    for _ in range(100):
        curve.observe(8, 1000.0)
    assert curve(8) > 100  # it was none


def test_without_measurements_longer_passes_cost_a_little_more_in_any_unit() -> None:
    curve = CostCurve()
    assert not curve
    assert not curve.measured
    assert curve(1) == 1 < curve(8) < curve(64) < 8
    shape = curve(9) / curve(1)
    curve.observe(1, 0.005)
    assert curve
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
        for _ in range(50):
            curve.observe(positions, 0.0, rows)
        assert curve(positions, rows) > 0
        assert (curve.drafting(np.array([1.0, 8.0]) * rows, rows) > 0).all()


def test_a_row_costs_more_than_a_node() -> None:
    """Each has a context of its own to look at."""
    curve = CostCurve({1: 1.0, 4: 1.2, 16: 2.0, 32: 3.0})
    for _ in range(100):
        curve.observe(4, 1.8, rows=4)
        curve.observe(16, 5.0, rows=16)
        curve.observe(1, 1.0)
    assert curve(16, rows=16) == pytest.approx(5.0, rel=0.02)
    assert curve(10, rows=10) == pytest.approx(1.6 + 9 * 0.2, rel=0.02)
    assert curve(16) == pytest.approx(2.0, rel=0.05)
    assert curve(32, rows=16) - curve(16, rows=16) == pytest.approx(1.0, rel=0.1)


def test_many_at_once_are_the_same_as_one_by_one() -> None:
    positions = np.array([2.5, 4.0, 6.5, 8.0, 20.0])
    for curve in (CostCurve({1: 1.0, 4: 1.5, 8: 2.0}), CostCurve({1: 1.0, 9: 1.0})):
        for _ in range(30):
            curve.observe(2, 1.5, rows=2)
            curve.observe(8, 2.5, rows=2)
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


@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("measured", [True, False])
def test_passes_with_drafts_that_are_faster_than_plain_ones_leave_a_sane_curve(
    rows: int, measured: bool
) -> None:
    """On a machine where kernels for more rows are the better ones; and they may get dear again."""
    curve = CostCurve({1: 1.0, 8: 1.5, 64: 4.0} if measured else None)
    positions = rows + np.arange(16.0 * rows + 1)
    for seconds in (0.8, 3.0):
        for _ in range(500):
            curve.observe(rows, 1.0, rows)
            curve.observe(2 * rows, seconds, rows)
            assert (np.diff(curve.drafting(positions, rows)) > 0).all()
        assert curve(rows, rows) == pytest.approx(1.0, rel=0.2)
    assert curve(2 * rows, rows) == pytest.approx(3.0, rel=0.1)
