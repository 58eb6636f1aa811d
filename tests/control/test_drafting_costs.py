"""Costs of drafting: reading, drafts made at once, machines that slow down."""

from __future__ import annotations

from itertools import count, pairwise
from typing import Any

import pytest

from tests.control.worlds import learn, outcome, request_of
from tokenleap import SamplingParams
from tokenleap.control import CostCurve
from tokenleap.control.cost_model import LONGEST_REST, CostModel
from tokenleap.control.estimates import DeeperLevels, DraftingCosts, OutputLengths, reading
from tokenleap.control.planner import Expected, Plan
from tokenleap.core.references import Source
from tokenleap.request import Request

PASS = 0.01


def model_of(*, level_share: float = 1.0, stops_early: bool = False) -> CostModel:
    costs = CostCurve({1: PASS, 9: 1.1 * PASS})
    return CostModel(8, costs=costs, level_share=level_share, stops_early=stops_early)


def serve(
    model: CostModel,
    tokens: int,
    *,
    level: float = 0.5,
    start: float = 0.0,
    passed: float = 1.0,
    load: float = 1.0,
    deeper: float = 0.0,
) -> list[int]:
    """The depths chosen for one new request with so many output tokens.

    Args:
        model: chooses them.
        tokens: of the output.
        level: plain passes as long as which a level takes.
        start: plain passes that the first draft takes longer.
        passed: share of each draft that is right.
        load: factor on all times.
        deeper: of drafts made at once, what a further level takes as a share of the first one.
    """
    request = Request([1, 2], SamplingParams(max_tokens=200), vocab_size=9, max_model_len=999)
    depths = list[int]()
    while len(request.output_ids) < tokens:
        depth = model.budgets([request], 1)[0].depth
        levels = float(depth)
        if model.level_share < 1 and depth:
            levels = 1 + deeper * (depth - 1)
        drafting = level * levels + (start if depth and not any(depths) else 0.0)
        depths.append(depth)
        right = round(passed * depth)
        seconds = load * PASS * (1 + 0.0125 * depth)
        request.token_ids += [0] * (1 + right)
        learn(model, [outcome(request, [1] * depth, right)], load * PASS * drafting, seconds)
    model.release(request)
    return depths


def drafting_requests(model: CostModel, count: int, tokens: int, **world: float) -> int:
    """How many of so many requests draft at all."""
    return sum(any(serve(model, tokens, **world)) for _ in range(count))


def test_short_outputs_do_not_pay_for_reading_the_source() -> None:
    """Drafts save a third of each token's time, and reading takes six tokens' time."""
    model = model_of()
    drafting_requests(model, 4, tokens=60, start=6.0)
    assert any(serve(model, 60, start=6.0))
    drafting_requests(model, 40, tokens=8, start=6.0)
    assert drafting_requests(model, 20, tokens=8, start=6.0) <= 1
    assert model._estimates.lengths.left(0, 200) < 12


@pytest.mark.parametrize(("share", "plans"), [(0.0, 6), (0.2, 3)])
def test_where_reading_does_not_pay_planning_is_rare(
    share: float, plans: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every eighth step, or as often as takes one percent of the time."""
    model, made = model_of(), 0
    drafting_requests(model, 4, tokens=60, start=100.0)

    def best_depths(*args: object) -> list[int]:
        nonlocal made
        made += 1
        return CostModel._best_depths(model, *args)  # type: ignore[arg-type]

    clock = count(step=share * PASS)  # a plan is timed by two readings
    monkeypatch.setattr("tokenleap.core.clock.now", lambda: next(clock))
    monkeypatch.setattr(model, "_best_depths", best_depths)
    assert not any(serve(model, 41, start=100.0))
    assert made == plans


@pytest.mark.parametrize("stops_early", [False, True])
def test_many_short_requests_pay_for_one_trial_together(stops_early: bool) -> None:
    """A trial costs 3 passes, so it comes once in 300 steps, in whichever request they are."""
    model = model_of(stops_early=stops_early)
    drafting_requests(model, 4, tokens=20, start=2.0, level=1.0, passed=0.0)
    drafting = drafting_requests(model, 90, tokens=20, start=2.0, level=1.0, passed=0.0)
    assert 4 <= drafting <= 7


def test_what_trials_have_found_is_used_by_the_next_requests() -> None:
    """Drafts that did not pay begin to."""
    model = model_of()
    drafting_requests(model, 4, tokens=20, start=1.0, passed=0.0)
    assert drafting_requests(model, 8, tokens=20, start=1.0, passed=0.0) <= 1
    drafting_requests(model, 400, tokens=20, start=1.0)
    assert drafting_requests(model, 10, tokens=20, start=1.0) == 10


@pytest.mark.parametrize("load", [0.5, 2.0])
def test_a_machine_that_becomes_slower_or_faster_changes_no_decision(load: float) -> None:
    """While nothing is drafted, only passes are measured; a level costs 1.1 of them."""
    model = model_of()
    drafting_requests(model, 4, tokens=40, level=1.1)
    assert sum(serve(model, 60, level=1.1)) <= 1  # a trial
    assert sum(serve(model, 60, level=1.1, load=load)) <= 1


def test_drafts_that_are_made_at_once_are_deep_or_none() -> None:
    """One pass of the drafter makes all levels, and costs as much as two of the target's."""
    model = model_of(level_share=0.0)
    serve(model, 100, level=2.0)
    depths = serve(model, 200, level=2.0)
    assert set(depths) <= {0, 8}
    assert depths.count(8) > 15
    level_by_level = model_of()
    serve(level_by_level, 100, level=2.0)
    assert not any(serve(level_by_level, 50, level=2.0))


def test_deeper_drafts_that_are_made_at_once_take_longer() -> None:
    """Two tokens of a draft are right, and each further level costs a third of a pass."""
    model = model_of(level_share=0.0)
    for _ in range(3):
        serve(model, 200, level=0.5, deeper=0.7, passed=0.3)
    depths = serve(model, 200, level=0.5, deeper=0.7, passed=0.3)
    without = model_of(level_share=0.0)
    for _ in range(3):
        serve(without, 200, level=0.5, passed=0.3)
    assert max(depths[-20:]) < max(serve(without, 200, level=0.5, passed=0.3)[-20:])


def test_drafts_are_deeper_where_a_call_makes_further_levels_cheaply() -> None:
    """The first level costs a third of a pass; a call for each level would make all as dear."""
    means = []
    for share in (1.0, 0.25):
        model = model_of(level_share=share, stops_early=True)
        for _ in range(3):
            serve(model, 200, level=0.33, deeper=0.15, passed=0.3)
        depths = serve(model, 200, level=0.33, deeper=0.15, passed=0.3)
        means.append(sum(depths) / len(depths))
    assert means[1] > 1.5 * means[0]


def test_the_cost_of_deeper_levels() -> None:
    """The share is that of the line, also with an outlier, and stays if all depths are alike."""
    levels = DeeperLevels(0.0)
    assert levels.levels(8) == 1
    for step in range(60):
        depth = 2 + step % 5
        levels.add(depth, 3.0 * (1 + 0.2 * (depth - 1)))
    assert levels.share == pytest.approx(0.2, abs=0.01)
    assert levels.levels(6) == pytest.approx(2, abs=0.05)
    levels.add(4, 500.0)
    assert levels.share == pytest.approx(0.2, abs=0.03)
    share = levels.share
    for _ in range(200):
        levels.add(3, 4.2)
    assert levels.share == pytest.approx(share, abs=0.1)


def test_reading_is_told_apart_from_levels() -> None:
    costs = DraftingCosts()
    costs.add(9.0, 8, caught_up=False, read=100)
    assert costs.bound
    assert costs.token is None
    costs.add(4.0, 8, caught_up=True)
    assert costs.level == 0.5
    assert costs.token == pytest.approx(0.05)


def test_planning_and_learning_count_as_drafting(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = count(step=0.25 * PASS)  # four readings: a plan's time, all planning's, and learning's
    monkeypatch.setattr("tokenleap.core.clock.now", lambda: next(clock))
    model, request = model_of(), request_of()
    costs, add = [], model._estimates.drafting.add

    def noted(cost: float, *args: float, **more: Any) -> None:
        costs.append(cost)
        add(cost, *args, **more)

    monkeypatch.setattr(model._estimates.drafting, "add", noted)
    for _ in range(2):
        assert model.budgets([request], 1)[0].depth
        learn(model, [outcome(request, [1], 1)], 0.5 * PASS, PASS)
    assert costs[1] == pytest.approx(0.5 + 4 * 0.25, rel=0.05)


@pytest.mark.parametrize(("share", "plans"), [(0.02, 60), (0.1, 20), (0.3, 7)])
def test_where_planning_takes_long_several_steps_have_the_same_budgets(
    share: float, plans: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plans then take three percent of the time of passes and drafts."""
    model, request, made = model_of(), request_of(max_tokens=8 * 60 + 5), 0

    def best_plan(*args: object) -> Plan:
        nonlocal made
        made += 1
        return CostModel._best_plan(model, *args)  # type: ignore[arg-type]

    clock = count(step=share * PASS / 3)  # planning is three of its readings
    monkeypatch.setattr("tokenleap.core.clock.now", lambda: next(clock))
    monkeypatch.setattr(model, "_best_plan", best_plan)
    for left in range(60, 0, -1):
        (budget,) = model.budgets([request], 1)
        assert 0 < budget.depth <= request.remaining - 1
        learn(model, [outcome(request, [1] * budget.depth, budget.depth)], 0.0, 1.05 * PASS)
        request.token_ids += [0] * (request.remaining - 8 * (left - 1) - 5)
    assert made == pytest.approx(plans, abs=4)


def test_a_plan_during_which_the_machine_stood_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not count for hundreds of steps."""
    model, request, now, plans = model_of(), request_of(), 0.0, list[int]()

    def best_plan(*args: object) -> Plan:
        nonlocal now
        now += 100 * PASS * (len(plans) == 2)
        plans.append(step)
        return CostModel._best_plan(model, *args)  # type: ignore[arg-type]

    monkeypatch.setattr("tokenleap.core.clock.now", lambda: now)
    monkeypatch.setattr(model, "_best_plan", best_plan)
    for step in range(60):  # noqa: B007 - `best_plan` reads it
        (budget,) = model.budgets([request], 1)
        drafted = budget.depth
        learn(model, [outcome(request, [1] * drafted, drafted)], 0.0, (1 + 0.05 * drafted) * PASS)
    assert max(after - before for before, after in pairwise([*plans, 60])) <= LONGEST_REST + 4


def test_probes_are_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """In steps that have the budgets of an earlier one, because planning takes long."""
    clock = count(step=0.1 * PASS)
    monkeypatch.setattr("tokenleap.core.clock.now", lambda: next(clock))
    model, requests = model_of(), [request_of(), request_of()]
    probed, drafted = [], 0
    for _ in range(400):
        budgets = model.budgets(requests, 2)
        outcomes = [
            outcome(request, [1] * budget.depth, right * budget.depth)
            for request, budget, right in zip(requests, budgets, (1, 0), strict=True)
        ]
        learn(model, outcomes, 0.0, model.costs(2 + sum(budget.depth for budget in budgets), 2))
        drafted += budgets[0].depth > 0
        probed.append(budgets[1].depth > 0)
    assert drafted > 300
    late = probed[100:]
    assert any(late)
    assert not any(one and other for one, other in pairwise(late))


def test_a_source_is_read_too() -> None:
    params = SamplingParams()
    plain = Request([1] * 40, params, vocab_size=9, max_model_len=99)
    assert reading(plain) == 40
    source = Source((1,) * 70)
    translation = Request([1], params, vocab_size=9, max_model_len=99, source=source)
    assert reading(translation) == 71
    assert reading(Request([1], params, vocab_size=9, max_model_len=99)) == 32


def test_how_long_outputs_become() -> None:
    lengths = OutputLengths()
    assert lengths.left(0, 50) == 50
    lengths.add(10)
    lengths.add(30)
    assert lengths.left(0, 50) == 20
    assert lengths.left(20, 50) == 10
    assert lengths.left(20, 5) == 5
    assert lengths.left(40, 50) == 40


def test_a_reading_that_seemed_free_does_not_stay_so() -> None:
    costs = DraftingCosts()
    costs.add(0.5, 1.0, caught_up=True)
    costs.add(0.4, 1.0, caught_up=False, read=100)  # less than a level: nothing is left for it
    assert costs.token == 0
    costs.add(2.5, 1.0, caught_up=False, read=100)
    assert costs.token == pytest.approx(2.0 / 100, rel=0.2)


@pytest.mark.parametrize("passed", [0.3, 0.5])
def test_a_short_unlucky_output_does_not_keep_the_next_one_from_drafting(passed: float) -> None:
    """After it, drafts seem not to pay, or too little for what reading takes: two passes."""
    model = model_of(stops_early=True)
    serve(model, 16, level=0.35, start=2.0, passed=passed)
    depths = serve(model, 128, level=0.35, start=2.0)
    assert 0 < depths.count(0) < 30
    assert len(depths) < 60


def test_useless_drafts_are_tried_by_four_requests_and_then_by_few() -> None:
    """A trial costs 2.4 passes, so after four requests it comes once in 240 steps."""
    model = model_of(stops_early=True)
    world = {"level": 0.35, "start": 2.0, "passed": 0.0}
    assert drafting_requests(model, 4, tokens=64, **world) == 4
    assert 9 <= drafting_requests(model, 50, tokens=64, **world) <= 1 + 50 * 64 / 240


def test_a_step_with_better_drafts_from_elsewhere_says_nothing_about_the_next() -> None:
    """A lookup is worth more than a trained draft, and in the next step there is none."""
    model = model_of()
    serve(model, 60, level=0.2)
    model.be_patient()
    request = Request([1, 2], SamplingParams(max_tokens=200), vocab_size=9, max_model_len=999)
    plain, lookup = Expected.plain(1), Expected(50.0, 9.0, 0.0)
    (beside,) = model.budgets_beside([request], 1, plain, lookup, [True])
    assert beside.depth == 0
    assert model.budgets_beside([request], 1, plain, plain, [False])[0].depth == 8
