"""Several requests share a step: whose levels are drafted."""

from __future__ import annotations

import random
from itertools import product

import pytest

from tests.control.worlds import (
    acceptance_rates,
    cheap,
    learn,
    measured,
    outcome,
    request_of,
    steep,
)
from tokenleap.analysis import expected_tokens
from tokenleap.control import CostCurve
from tokenleap.control.cost_model import CostModel
from tokenleap.control.planner import levels_of_one


def after(model: CostModel, good: int, bad: int, steps: int = 60) -> list[int]:
    """Depths for two requests, one of which passes `good` levels of 4, the other one `bad`."""
    requests = [request_of(), request_of()]
    for _ in range(steps):
        outcomes = [outcome(requests[0], [1] * 4, good), outcome(requests[1], [1] * 4, bad)]
        learn(model, outcomes, 0.0, model.costs(10, 2))
    model._drafted_steps = 0
    return [budget.chain for budget in model.budgets(requests, len(requests))]


def test_it_gives_the_nodes_to_those_who_use_them() -> None:
    """Verifying is dear: only what is nearly sure pays, and only one of the two is."""
    model = CostModel(4, costs=CostCurve({1: 0.01, 2: 0.011, 12: 0.031}))
    assert after(model, good=4, bad=0) == [4, 0]


def test_it_is_near_the_best_rate_of_all_lengths_of_two_requests() -> None:
    """By trying them all: tokens per second as the module's docstring has it.

    Near, because the order of worth does not know that a second row of the same depth is drafted
    for nothing.
    """
    model = CostModel(5, costs=CostCurve({1: 0.010, 4: 0.012, 8: 0.017, 12: 0.024}))
    batch = [request_of(), request_of()]
    for accepted in (4, 3, 4, 4, 2) * 8:
        for request, passed in zip(batch, (accepted, accepted // 2), strict=True):
            learn(model, [outcome(request, [1] * 4, passed)], 0, model.costs(5))
    model._estimates.drafting.add(0.0005, 1, caught_up=True)
    model._drafted_steps = 0
    alphas = [acceptance_rates(model, request)[0] for request in batch]
    drafts = [model._estimates.history(request).draft_rate() for request in batch]

    def rate(lengths: tuple[int, ...]) -> float:
        parts = list(zip(alphas, drafts, lengths, strict=True))
        tokens = sum(1 + d * (expected_tokens(alpha, n) - 1) for alpha, d, n in parts)
        seconds = model.costs(2 + sum(d * n for _, d, n in parts), 2)
        return tokens / (max(lengths) * 0.0005 + seconds)

    chosen = tuple(budget.chain for budget in model.budgets(batch, len(batch)))
    best = max(rate(lengths) for lengths in product(range(6), repeat=2))
    assert rate(chosen) == pytest.approx(best, rel=0.05)
    assert len(set(chosen)) == 2


def test_trees_of_several_requests_keep_their_levels_in_order() -> None:
    """The second level has fewer nodes than the first, and is worth more for each: it comes after.

    Every depth of both is compared with the one chosen.
    """
    model = CostModel(9, costs=CostCurve({1: 0.010, 8: 0.013, 20: 0.030}), levels=(6, 1, 2))
    batch = [request_of(), request_of()]
    for step in range(60):
        outcomes = [outcome(batch[0], (6, 1, 2), 3), outcome(batch[1], (6, 1, 2), step % 2)]
        learn(model, outcomes, 0, model.costs(20, 2))
    model._drafted_steps = 0
    sizes = (0, 6, 7, 9)
    rates = [acceptance_rates(model, request) for request in batch]

    def rate(depths: tuple[int, ...]) -> float:
        tokens = 2.0
        for each, depth in zip(rates, depths, strict=True):
            passed = 1.0
            for level in each[:depth]:
                passed *= level
                tokens += passed
        return tokens / model.costs(2 + sum(sizes[depth] for depth in depths), 2)

    chosen = tuple(budget.depth for budget in model.budgets(batch, len(batch)))
    best = max(rate(depths) for depths in product(range(4), repeat=2))
    assert rate(chosen) == pytest.approx(best, rel=0.05)
    assert chosen[0] == 3


def test_it_probes_each_request_by_itself() -> None:
    """Others that draft do not keep a request from being tried again."""
    options = CostModel.Options(probe_every=10)
    model = CostModel(4, options, CostCurve({1: 0.01, 2: 0.011, 12: 0.031}))
    requests = [request_of(), request_of()]
    for _ in range(60):
        outcomes = [outcome(requests[0], [1] * 4, 4), outcome(requests[1], [1] * 4, 0)]
        learn(model, outcomes, 0.0, model.costs(10, 2))
    model._drafted_steps = 0
    lengths = [model.budgets(requests, len(requests))[1].chain for _ in range(50)]
    assert lengths.count(1) == 5
    assert lengths.count(0) == 45


def test_it_knows_that_a_drafter_often_has_no_guess() -> None:
    model = CostModel(4, costs=CostCurve({1: 0.01, 9: 0.01}))
    request = request_of()
    for step in range(100):
        model.budgets([request], 1)
        sizes, passed = ((), 0) if step % 4 else ([1] * 4, 4)
        learn(model, [outcome(request, sizes, passed)], 0.001, 0.01)
    assert model._estimates.history(request).draft_rate() == pytest.approx(0.25, abs=0.1)
    assert acceptance_rates(model, request)[0] > 0.8


def test_a_batch_in_which_drafts_cost_too_much_stops_drafting() -> None:
    """By one row's curve they are cheap; with sixteen rows each of them costs like a token."""
    model = CostModel(4, costs=measured(cheap))
    batch = [request_of() for _ in range(16)]
    drafted = []
    for _ in range(200):
        budgets = model.budgets(batch, len(batch))
        positions = 16 + sum(budget.chain for budget in budgets)
        drafted.append(positions - 16)
        outcomes = [
            outcome(request, [1] * budget.chain, budget.chain // 2)
            for request, budget in zip(batch, budgets, strict=True)
        ]
        learn(model, outcomes, 0.0, 0.001 * positions)
    assert max(drafted[:5]) > 0
    assert sum(drafted[100:]) / 100 < 0.1 * 16


def test_what_others_compute_counts() -> None:
    """A draft that pays for one request alone may hold up a whole batch."""
    model = CostModel(8, costs=CostCurve({1: 0.01, 9: 0.014, 64: 0.07}))
    request = request_of()
    for _ in range(40):
        learn(model, [outcome(request, [1] * 4, 3)], 0, model.costs(5))
    model._drafted_steps = 0
    alone = model.budgets([request], 1)[0].chain
    assert model.budgets([request], 16)[0].chain < alone


def depths_with_newcomers(level_seconds: float, lives: int, steps: int = 90) -> list[int]:
    """Levels drafted at each step for three rows, one of which is new in nearly every step.

    Half of the tokens pass. A request's first draft takes five passes' time longer.
    """
    dice = random.Random(0)
    model = CostModel(4, costs=CostCurve({1: 0.01, 8: 0.011, 16: 0.012}))
    batch = [request_of() for _ in range(3)]
    served: dict[int, int] = {}
    drafted = []
    for step in range(steps):
        if step % lives:
            batch[step % 3] = request_of()
        lengths = [budget.chain for budget in model.budgets(batch, len(batch))]
        new = sum(n > 0 and r.key not in served for r, n in zip(batch, lengths, strict=True))
        served |= {r.key: n for r, n in zip(batch, lengths, strict=True) if n}
        passed = [next(i for i in range(n + 1) if i == n or dice.random() < 0.5) for n in lengths]
        outcomes = [outcome(r, [1] * n, k) for r, n, k in zip(batch, lengths, passed, strict=True)]
        drafting = level_seconds * max(lengths) + 0.05 * new
        learn(model, outcomes, drafting, model.costs(3 + sum(lengths), 3))
        drafted.append(sum(lengths))
    return drafted


@pytest.mark.parametrize("lives", [2, 3, 8])
def test_newcomers_do_not_make_a_dear_drafter_seem_free(lives: int) -> None:
    """In nearly every step one of them catches up, so that what a level costs hardly shows."""
    dear = depths_with_newcomers(0.02, lives)
    assert sum(count > 0 for count in dear[10:]) <= 8
    cheap = depths_with_newcomers(0.0005, lives)
    assert sum(count > 0 for count in cheap[10:]) >= 70


def test_the_first_measurement_is_not_spoilt_by_newcomers() -> None:
    """The step after a start asks for the same requests, and for the new one in the next."""
    model = CostModel(4, costs=CostCurve({1: 0.01, 16: 0.011}))
    first, second = request_of(), request_of()
    seen = []
    # Two requests that draft together take longer than one of them.
    for step, seconds in enumerate((1.0, 0.004, 1.0, 0.004 * levels_of_one(1.0, 2.0))):
        batch = [first, second] if step else [first]
        lengths = [budget.chain for budget in model.budgets(batch, len(batch))]
        seen.append(lengths)
        outcomes = [outcome(r, [1] * n, n) for r, n in zip(batch, lengths, strict=True)]
        learn(model, outcomes, seconds, 0.011)
    assert seen == [[4], [4, 0], [4, 4], [4, 4]]
    assert not model._estimates.drafting.bound
    assert model._estimates.level_seconds == pytest.approx(0.001, rel=0.05)


def test_steps_without_drafts_go_on_when_requests_end_but_not_when_others_come() -> None:
    model, batch = CostModel(4, costs=measured(steep)), [request_of() for _ in range(4)]
    for _ in range(40):
        budgets = model.budgets(batch, 4)
        outcomes = [
            outcome(request, [1] * budget.chain, 0)
            for request, budget in zip(batch, budgets, strict=True)
        ]
        learn(model, outcomes, 0.0, steep(4 + sum(budget.chain for budget in budgets)))
        if model.resting:
            break
    assert model.resting
    model.budgets(batch[1:], 3)
    assert model.resting
    model.budgets([*batch[1:], request_of()], 4)
    assert not model.resting
