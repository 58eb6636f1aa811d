from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from tokenleap.control import CostCurve


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
    assert [curve(n) for n in (1, 8)] == pytest.approx([2.0, 2.1], rel=0.03)
    for _ in range(200):
        curve.observe(1, 1.0)
        curve.observe(8, 3.0)
    assert [curve(n) for n in (1, 8)] == pytest.approx([1.0, 3.0], rel=0.02)


def test_what_drafts_add_returns_to_what_was_measured_while_nothing_is_drafted() -> None:
    """Else drafts that were dear once would be given up for good."""
    curve = CostCurve({1: 1.0, 8: 2.0})
    for _ in range(100):
        curve.observe(8, 5.0)
        curve.observe(1, 1.0)
    assert curve(8) == pytest.approx(5.0, rel=0.05)
    for seconds in (1.0, 0.5):  # then plain passes become twice as fast, and probably others, too
        for _ in range(1000):
            curve.observe(1, seconds)
        assert curve(8) == pytest.approx(2 * seconds, rel=0.05)


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
        assert all(curve(n * rows, rows) > 0 for n in (1, 8))


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


def test_a_row_costs_more_than_a_node() -> None:
    """Each has a context of its own to attend to: passes of several rows are points as well."""
    curve = CostCurve({(1, 1): 1.0, (1, 4): 1.2, (1, 16): 2.0, (4, 4): 1.8, (16, 16): 5.0})
    assert curve(16, rows=16) == pytest.approx(5.0)
    assert curve(4, rows=4) == pytest.approx(1.8)
    assert curve(16) == pytest.approx(2.0)
    assert curve(32, rows=16) - curve(16, rows=16) == pytest.approx(2.0)


def test_a_hiccup_of_the_machine_is_cut_and_a_change_is_believed() -> None:
    curve = CostCurve({1: 1.0, 8: 2.0})
    for _ in range(50):
        curve.observe(1, 1.0)
    curve.observe(1, 1000.0)
    assert curve(1) < 1.05
    for _ in range(50):
        curve.observe(1, 5.0)
    assert curve(1) == pytest.approx(5.0, rel=0.05)


@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("measured", [True, False])
def test_passes_with_drafts_that_seem_faster_than_plain_ones_leave_a_sane_curve(
    rows: int, measured: bool
) -> None:
    """And they may get dear again."""
    curve = CostCurve({1: 1.0, 8: 1.5, 64: 4.0} if measured else None)
    positions = range(rows, 17 * rows + 1)
    for seconds in (0.8, 3.0):
        for _ in range(500):
            curve.observe(rows, 1.0, rows)
            curve.observe(2 * rows, seconds, rows)
            costs = [curve(n, rows) for n in positions]
            assert all(less < more for less, more in pairwise(costs))
    assert curve(rows, rows) == pytest.approx(1.0, rel=0.1)
    assert curve(2 * rows, rows) == pytest.approx(3.0, rel=0.1)


@pytest.mark.parametrize("pads_rows", [False, True])
def test_uneven_drafts_cost_more_where_attention_pads_rows(pads_rows: bool) -> None:
    """A draft of 4 in one of 8 rows; from it follows what one of 4 in each row costs."""
    curve = CostCurve({1: 1.0, 64: 2.0}, pads_rows=pads_rows)
    of_node = 1 / 63
    computed = (12 + 8 * 5) / 2 if pads_rows else 12
    plain = curve(8, rows=8)
    for _ in range(200):
        curve.observe(8, plain, rows=8)
        curve.observe(12, plain + 2 * of_node * (computed - 8), rows=8, longest=5)
    assert curve(8, rows=8) == pytest.approx(plain, rel=0.02)
    assert curve(40, rows=8, longest=5) == pytest.approx(plain + 2 * of_node * 32, rel=0.05)
    assert curve(12, rows=8, longest=2) == pytest.approx(
        plain + 2 * of_node * ((12 + 16) / 2 - 8 if pads_rows else 4), rel=0.05
    )


def test_it_is_the_filter_of_the_textbook() -> None:
    """With matrices, as long as nothing is cut."""
    curve = CostCurve({1: 1.0, 9: 2.0})
    mean, covariance = np.ones(2), np.diag(np.array((0.05, 0.5)) ** 2)
    dice = np.random.default_rng(3)
    for _ in range(50):
        parts = np.array((1.0, dice.uniform(0, 1)))
        positions = 1 + 8 * parts[1]
        measured = float(parts.sum() * dice.normal(1.0, 0.02))
        curve.observe(positions, measured)
        covariance = covariance + np.diag((0.01 * mean) ** 2)
        shared = covariance @ parts
        variance = parts @ shared + (0.04 * parts @ mean) ** 2
        mean = mean + shared / variance * (measured - parts @ mean)
        covariance = covariance - np.outer(shared, shared) / variance
    assert [curve(1), curve(9)] == pytest.approx([mean[0], mean.sum()], rel=1e-3)


@pytest.mark.parametrize("seed", range(5))
def test_whatever_is_measured_costs_stay_finite_and_positive(seed: int) -> None:
    dice = np.random.default_rng(seed)
    curve = CostCurve({1: 1.0, 8: 1.5, 64: 4.0})
    for _ in range(4_000):
        rows = int(dice.integers(1, 33))
        drafted = int(dice.integers(0, 40)) if dice.random() < 0.5 else 0
        curve.observe(rows + drafted, float(10 ** dice.normal(0, 2)), rows)
    assert 0 < curve(1) < curve(9) < 1e9
    for _ in range(300):
        curve.observe(1, 1.0)
        curve.observe(8, 2.0)
    assert [curve(1), curve(8)] == pytest.approx([1.0, 2.0], rel=0.1)


def test_plain_passes_right_after_drafts_are_told_from_rows_of_them() -> None:
    """After drafts, one takes 30 percent longer, and each further one half of that."""
    curve = CostCurve({1: 1.0, 8: 1.1})
    for _ in range(40):
        for _ in range(10):
            curve.observe(8, 1.4)
        for excess in (0.3, 0.15, 0.075, 0.0375):
            curve.observe(1, 1.0 + excess)
    assert [curve(1), curve(8)] == pytest.approx([1.0, 1.4], rel=0.02)
    for _ in range(200):  # the machine becomes half as fast, and drafts go on
        curve.observe(8, 2.8)
    assert curve(1) == pytest.approx(2.0, rel=0.15)
