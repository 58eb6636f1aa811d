from __future__ import annotations

import pytest

from tests.control.worlds import (
    World,
    acceptance_rates,
    cheap,
    cpu,
    flat,
    learn,
    measured,
    outcome,
    request_of,
    stairs,
    steep,
)
from tokenleap.analysis import expected_tokens
from tokenleap.control import CostCurve
from tokenleap.control.cost_model import CostModel

CHAIN, TREE = (1,) * 8, (4, 8, 8, 8)


WORLDS = {
    "free": World(flat, CHAIN, [0.8] * 8),
    "cpu": World(cpu, CHAIN, [0.8] * 8),
    "cpu, unsure": World(cpu, CHAIN, [0.5] * 8),
    "cpu, wrong": World(cpu, CHAIN, [0.02] * 8),
    "stairs": World(stairs, CHAIN, [0.7] * 8),
    "no gain": World(steep, CHAIN, [0.8] * 8),
    "draft model": World(cpu, CHAIN, [0.7] * 8, level_seconds=0.003),
    "dear draft model": World(cpu, CHAIN, [0.4] * 8, level_seconds=0.006),
    "rare guesses": World(cpu, CHAIN, [0.8] * 8, guesses=0.2),
    "rare guesses of a model": World(cpu, CHAIN, [0.8] * 8, level_seconds=0.002, guesses=0.05),
    "tree": World(cpu, TREE, [0.9, 0.8, 0.7, 0.6], level_seconds=0.002),
    "deep tree": World(cheap, TREE, [0.9, 0.8, 0.7, 0.6], level_seconds=0.0005),
    "wrong tree": World(cpu, TREE, [0.2] * 4, level_seconds=0.002),
    "tree that ends": World(flat, TREE, [0.9, 0.8, 0.0, 0.0], level_seconds=0.002),
    "tree with a hard first level": World(flat, (2,) * 4, [0.5, 0.95, 0.95, 0.95], 0.002),
}


def model_of(world: World, *, costs: bool = True, sizes: bool = True) -> CostModel:
    """An `LLM`'s controller; without `sizes` the drafter could not tell how its trees look."""
    nodes = sum(world.sizes)
    levels = None if world.sizes == CHAIN else world.sizes if sizes else [1] * nodes
    return CostModel(nodes, costs=measured(world.seconds) if costs else None, levels=levels)


@pytest.mark.parametrize("name", WORLDS)
def test_it_settles_at_the_best_of_all_depths(name: str) -> None:
    """In tokens per second, probes included: neighbours of the best depth are nearly as good."""
    world = WORLDS[name]
    depths = [depth for seed in range(2) for depth in world.steps(model_of(world), 250, seed)[100:]]
    assert world.share_of_best(depths) > 0.97


@pytest.mark.parametrize("name", [name for name, world in WORLDS.items() if world.sizes != CHAIN])
def test_it_learns_how_large_trees_are(name: str) -> None:
    world = WORLDS[name]
    steps = [world.steps(model_of(world, sizes=False), 250, seed)[100:] for seed in range(2)]
    deepest = len(world.sizes)
    assert world.share_of_best([min(d, deepest) for each in steps for d in each]) > 0.96


@pytest.mark.parametrize("name", WORLDS)
def test_it_learns_the_costs_where_none_were_measured(name: str) -> None:
    world = WORLDS[name]
    steps = [world.steps(model_of(world, costs=False), 250, seed)[100:] for seed in range(2)]
    share = world.share_of_best([depth for each in steps for depth in each])
    most = 0.8 if name == "stairs" else 0.9  # the curve starts from points, and bends slowly
    assert share > max(most, 0.97 * world.rate(0) / world.rate(world.best))


@pytest.mark.parametrize("name", [name for name, world in WORLDS.items() if not world.best])
def test_where_drafts_do_not_pay_there_are_few(name: str) -> None:
    world = WORLDS[name]
    depths = world.steps(model_of(world), 600)
    if world.sizes == CHAIN:
        assert sum(depth > 0 for depth in depths[50:]) <= 550 // 64 + 2
    assert world.share_of_best(depths) > (0.97 if world.sizes == CHAIN else 0.99)


def test_the_best_depth_at_a_known_rate_is_that_of_the_theory() -> None:
    model = CostModel(8, costs=CostCurve({1: 0.010, 4: 0.011, 9: 0.020}))
    request = request_of()
    for _ in range(60):
        model.budgets([request], 1)
        learn(model, [outcome(request, [1] * 4, 3)], 0.004, model.costs(5))
    (alpha, *others) = acceptance_rates(model, request)
    assert alpha == pytest.approx(0.75, abs=0.05)
    assert set(others) == {alpha}
    rates = [expected_tokens(alpha, n) / (0.001 * n + model.costs(n + 1)) for n in range(9)]
    assert model.budgets([request], 1)[0].chain == rates.index(max(rates))


def test_levels_of_a_tree_have_rates_of_their_own() -> None:
    model = CostModel(14, levels=(2, 4, 8))
    request = request_of()
    for step in range(80):
        learn(model, [outcome(request, (2, 4, 8), 2 if step % 2 else 1)], 0, 0.01)
    first, second, third = acceptance_rates(model, request)
    assert first > 0.9
    assert second == pytest.approx(0.5, abs=0.1)
    assert third < 0.15


def test_the_budget_of_a_tree_is_its_depth() -> None:
    """Nodes are all that the user allows; nothing at all is the empty budget."""
    world = WORLDS["deep tree"]
    model = model_of(world)
    world.steps(model, 100)
    (budget,) = model.budgets([request_of()], 1)
    assert budget.nodes == sum(world.sizes)
    assert 1 <= budget.depth <= len(world.sizes)
    (last,) = model.budgets([request_of(max_tokens=2)], 1)
    assert last.depth == 1
    wrong = model_of(WORLDS["wrong tree"])
    WORLDS["wrong tree"].steps(wrong, 100)
    (nothing,) = wrong.budgets([request_of()], 1)
    assert (nothing.nodes, nothing.depth) == (0, 0)


def test_it_probes_now_and_then() -> None:
    model = CostModel(8, CostModel.Options(probe_every=10), CostCurve({1: 0.01, 9: 0.09}))
    request = request_of()
    for _ in range(30):
        learn(model, [outcome(request, [1] * 4, 0)], 0, model.costs(5))
    learn(model, [outcome(request, (), 0)], 0, model.costs(1))
    lengths = [model.budgets([request], 1)[0].chain for _ in range(100)]
    assert lengths.count(0) == 90
    assert lengths.count(1) == 10


@pytest.mark.parametrize("name", ["free", "cpu", "cpu, unsure", "deep tree"])
def test_it_has_no_draft_now_and_then_to_know_what_that_costs(name: str) -> None:
    """Which is about one percent of the time, however much the drafts gain."""
    world = WORLDS[name]
    depths = world.steps(model_of(world), 2000)
    gain = world.rate(world.best) / world.rate(0)
    assert depths.count(0) == pytest.approx(2000 * 0.01 / (gain - 1), rel=0.5)


@pytest.mark.parametrize(("start_cost", "after"), [(0.0, 20), (0.001, 30), (0.01, 120)])
def test_a_new_request_is_tried_soon_where_that_is_cheap(start_cost: float, after: int) -> None:
    """After others whose drafts did not pay, unless the drafter has to read much first.

    A probe costs a fifth of a plain step, so that it may come once in twenty.
    """
    model = CostModel(4, costs=CostCurve({1: 0.01, 2: 0.012, 5: 0.05}))
    for request in [request_of() for _ in range(20)]:
        before = 0
        for _ in range(8):
            (budget,) = model.budgets([request], 1)
            drafting = start_cost if budget.chain and not before else 0.0
            times, before = (drafting, model.costs(1 + budget.chain)), budget.chain
            learn(model, [outcome(request, [1] * budget.chain, 0)], *times)
    model._probing._since_trial = 0.0
    another, depths = request_of(), []
    for _ in range(130):
        depths.append(model.budgets([another], 1)[0].depth)
        learn(model, [outcome(another, (), 0)], 0, model.costs(1))
    assert abs(depths.index(1) - after) <= 8  # it is asked once in eight steps


def test_the_first_step_is_plain_where_no_costs_are_known() -> None:
    world = WORLDS["free"]
    assert world.steps(model_of(world, costs=False), 10)[0] == 0
    assert world.steps(model_of(world, costs=True), 10)[0] > 0


def test_it_notices_that_a_pass_has_become_dearer() -> None:
    """Costs that were right at the start and are not any more."""
    model = model_of(WORLDS["free"])
    WORLDS["free"].steps(model, 100)
    depths = WORLDS["no gain"].steps(model, 600)
    assert sum(depths[400:]) < 0.1 * 8 * 200


def test_catching_up_is_no_cost_of_drafting() -> None:
    """The first draft of a request reads its prompt: that will not come again."""
    model = CostModel(4, costs=CostCurve({1: 0.01, 9: 0.011}))
    for request in (request_of(), request_of()):
        for step in range(4):
            (budget,) = model.budgets([request], 1)
            assert budget.chain == 4
            times = (0.001 if step else 1.0, model.costs(5))
            learn(model, [outcome(request, [1] * 4, 4)], *times)


def test_requests_that_end_after_their_first_draft_tell_what_it_costs_at_most() -> None:
    """Their drafts never pay for the reading, and no later one says how much of it that was."""
    model = CostModel(4, costs=CostCurve({1: 0.01, 9: 0.011}))
    lengths = []
    for _ in range(30):
        request = request_of(max_tokens=6)
        (budget,) = model.budgets([request], 1)
        lengths.append(budget.chain)
        times = (0.2 if budget.chain else 0.0, model.costs(1 + budget.chain))
        learn(model, [outcome(request, [1] * budget.chain, budget.chain)], *times)
        model.release(request)
    assert lengths[0] == 4
    assert sum(length > 0 for length in lengths) == 1
