from __future__ import annotations

from foretoken.control.plain_steps import SOONEST, PlainSteps


def test_a_plain_step_is_due_when_it_costs_a_percent() -> None:
    steps, waited = PlainSteps(), 0
    while not steps.due(gain=1.5):
        steps.count(drafted=True)
        waited += 1
    assert waited == 50
    steps.count(drafted=False)
    assert not steps.due(gain=1.5)
    for _ in range(SOONEST):
        assert not steps.due(gain=1.0)
        steps.count(drafted=True)
    assert steps.due(gain=1.0)


def test_a_plain_step_that_surprises_is_followed_by_another_and_not_for_ever() -> None:
    steps, plain = PlainSteps(), 0
    steps.count(drafted=True, surprised=True)
    assert not steps.due(gain=9.0)
    steps.count(drafted=False, surprised=True)
    while steps.due(gain=9.0):
        steps.count(drafted=False, surprised=True)
        plain += 1
    assert plain == SOONEST - 1
    steps.count(drafted=True)
    steps.count(drafted=False, surprised=True)
    assert steps.due(gain=9.0)
    steps.count(drafted=False)
    assert not steps.due(gain=9.0)
