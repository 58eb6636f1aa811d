"""Seconds of drafting: what is measured, what is a bound, and what says nothing."""

from __future__ import annotations

import pytest

from foretoken.control.drafting_costs import DraftingCosts, Seconds


def test_a_mean_that_hiccups_move_little() -> None:
    seconds = Seconds()
    for _ in range(5):
        seconds.add(1.0)
    seconds.add(1000.0)
    assert seconds.value == pytest.approx(1.1)
    for _ in range(80):
        seconds.add(3.0)
    assert seconds.value == pytest.approx(3.0, rel=0.01)


def test_the_first_measurement_replaces_the_lowest_bound() -> None:
    seconds = Seconds()
    for bound in (5.0, 3.0, 4.0):
        seconds.add(bound, at_most=True)
    assert (seconds.value, seconds.bounded) == (3.0, True)
    assert (seconds.believed(), seconds.believed(trying=True)) == (3.0, 0.0)
    seconds.add(8.0)  # slower than a step with more to do: the bound was of another time
    assert (seconds.value, seconds.bounded) == (8.0, False)
    assert seconds.believed(trying=True) == 8.0
    seconds.add(9.0, at_most=True)
    assert seconds.value == 8.0
    seconds.add(4.0, at_most=True)
    assert seconds.value == pytest.approx(7.6)


def test_no_seconds_at_all_are_no_measurement() -> None:
    seconds = Seconds()
    assert (seconds.value, seconds.believed()) == (None, 0.0)
    seconds.add(0.0)
    assert (seconds.value, seconds.measured, seconds.bounded) == (0.0, False, False)
    seconds.add(2.0)
    seconds.add(0.0)
    assert (seconds.value, seconds.measured) == (2.0, True)
    bound = Seconds()
    bound.add(0.0)
    bound.add(2.0, at_most=True)
    assert (bound.value, bound.bounded) == (2.0, True)


def test_a_step_says_something_of_levels_or_of_asking_and_maybe_of_starts() -> None:
    costs = DraftingCosts()
    costs.add(4.0, 2, caught_up=False)
    assert (costs.level.value, costs.start.value, costs.asking.value) == (2.0, 4.0, None)
    bounded = [costs.bounded]
    costs.add(1.0, 2, caught_up=True)
    assert (costs.level.value, costs.start.value) == (0.5, 4.0)
    assert [*bounded, costs.bounded] == [True, False]
    costs.add(0.25, 0, caught_up=True)
    assert costs.asking.value == 0.25
