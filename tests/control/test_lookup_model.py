from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import pytest

from tests.control.worlds import (
    cheap,
    cpu,
    flat,
    judged,
    learn,
    measured,
    request_of,
    stairs,
    steep,
)
from tokenleap.control import CONTROLLERS, CostCurve, controller_class
from tokenleap.control.cost_model import CostModel
from tokenleap.control.features import (
    LONGEST_MATCH,
    AcceptanceRates,
    by_match,
    by_rank,
    path_probs,
    prior_rate,
)
from tokenleap.control.lookup_models import LookupModel
from tokenleap.core.tree import Draft, TokenTree, chain
from tokenleap.decode import Outcome
from tokenleap.request import Request

LENGTH = 8

ROOT, RIGHT, WRONG = 0, 1, 2


def guess(match: int, length: int = LENGTH) -> Draft:
    """Of tokens that are right, until one of them is not."""
    if not match:
        return Draft.empty(ROOT)
    return Draft.deterministic(chain([ROOT, *[RIGHT] * length]), by_match(match, length))


@pytest.fixture(autouse=True)
def stopped_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of learning is no part of the worlds."""
    monkeypatch.setattr("tokenleap.core.clock.now", lambda: 0.0)


def outcome(request: Request, draft: Draft, right: int) -> Outcome:
    """The outcome of a draft if so many tokens are right."""
    kept = min(right, draft.tree.num_drafted)
    return judged(request, draft, range(1, kept + 1), RIGHT if right > kept else WRONG)


@dataclass(frozen=True)
class World:
    """A world in which lookups find texts and passes have costs.

    Args:
        seconds: of a pass, by positions.
        odds: that the next token is right, by length of match.
        matches: what is found, one of them at random every time; 0 is nothing.
        lookup_seconds: of a lookup.
    """

    seconds: Callable[[int], float]
    odds: Callable[[int], float]
    matches: Sequence[int] = (0, 1, 2, 4, 8)
    lookup_seconds: float = 0.0

    def rate(self, match: int, depth: int) -> float:
        """Tokens per second of a step that drafts so much of such a guess."""
        passed, tokens = 1.0, 1.0
        for level in range(depth):
            passed *= self.odds(match + level)
            tokens += passed
        return tokens / self.seconds(1 + depth)

    def best(self, match: int) -> int:
        """The depth of most tokens per second, by trying all."""
        return max(range(LENGTH + 1 if match else 1), key=lambda depth: self.rate(match, depth))

    def steps(
        self, model: LookupModel, count: int, seed: int = 0, request: Request | None = None
    ) -> list[tuple[int, int]]:
        """Match and depth of each step; also a match of 0 where none was asked for."""
        dice, found = random.Random(seed), []
        request = request or request_of()
        for _ in range(count):
            (budget,) = model.budgets([request], 1)
            match = dice.choice(self.matches) if budget.chain else 0
            (draft,) = model.trim([request], [guess(match, budget.chain)], 1)
            right = 0
            while right < LENGTH and dice.random() < self.odds(match + right):
                right += 1
            depth = draft.tree.num_drafted
            found.append((match, depth))
            draft_seconds = self.lookup_seconds if budget.chain else 0.0
            times = (draft_seconds, self.seconds(1 + depth))
            learn(model, [outcome(request, draft, right)], *times)
        return found


def good(match: int) -> float:
    return 1 - 0.6 / match**0.8 if match else 0.0


def bad(match: int) -> float:
    return 0.005


def misleading(match: int) -> float:
    """Long matches are worth nothing, short ones much."""
    return 0.8 if match < 4 else 0.1


WORLDS = {
    "free": World(flat, good),
    "cheap": World(cheap, good),
    "cpu": World(cpu, good),
    "stairs": World(stairs, good),
    "steep": World(steep, good),
    "wrong": World(cpu, bad),
    "misleading": World(cpu, misleading),
    "always right": World(cpu, lambda match: 1.0),
}


def model_of(world: World, *, costs: bool = True) -> LookupModel:
    return LookupModel(LENGTH, costs=measured(world.seconds) if costs else None)


@pytest.mark.parametrize("costs", [True, False], ids=["measured", "learnt"])
@pytest.mark.parametrize("name", WORLDS)
def test_guesses_are_cut_to_the_best_depth(name: str, costs: bool) -> None:
    """In tokens per second: neighbours of the best depth are nearly as good."""
    world = WORLDS[name]
    steps = [
        step
        for seed in range(2)
        for step in world.steps(model_of(world, costs=costs), 600, seed)[300:]
    ]
    chosen = sum(world.rate(match, depth) for match, depth in steps)
    best = sum(world.rate(match, world.best(match)) for match, _ in steps)
    learnt = 0.8 if name == "stairs" else 0.95  # the curve starts from points, and bends slowly
    assert chosen > (0.97 if costs else learnt) * best


@pytest.mark.parametrize("name", ["wrong", "steep"])
def test_where_drafts_do_not_pay_there_are_none(name: str) -> None:
    """Not even to find that out: what was cut is learnt from as well."""
    steps = WORLDS[name].steps(model_of(WORLDS[name]), 800)
    assert sum(depth for _, depth in steps[200:]) <= 60  # by a few lucky guesses
    assert sum(match > 0 for match, _ in steps[200:]) > 400


@pytest.mark.parametrize("seed", range(3))
def test_a_text_unlike_others_is_known_by_its_first_tokens(seed: int) -> None:
    """Rates that all texts share would take as long as they remember: 260 tokens, not 40."""
    right, wrong = WORLDS["always right"], WORLDS["wrong"]
    model = model_of(right)
    right.steps(model, 300, seed)
    for _ in range(3):
        request = request_of()
        assert sum(depth for _, depth in wrong.steps(model, 40, seed, request)) < 60
        model.release(request)
    assert sum(depth for _, depth in right.steps(model, 40, seed)) > 120


def test_a_text_that_turns_predictable_is_noticed_without_a_draft() -> None:
    model, request = model_of(WORLDS["wrong"]), request_of()
    before = WORLDS["wrong"].steps(model, 200, request=request)
    after = WORLDS["always right"].steps(model, 80, request=request)
    assert sum(depth for _, depth in before[100:]) <= 70  # by a few lucky guesses
    assert [depth for match, depth in after[-20:] if match] == [
        LENGTH for match, _ in after[-20:] if match
    ]


def test_what_is_learnt_of_one_request_serves_the_next() -> None:
    world = WORLDS["misleading"]
    model = model_of(world)
    request = request_of()
    model.budgets([request], 1)
    (first,) = model.trim([request], [guess(8)], 1)
    assert first.tree.num_drafted > 0
    for _ in range(20):
        world.steps(model, 40)
    another = request_of()
    model.budgets([another], 1)
    (later,) = model.trim([another], [guess(8)], 1)
    assert later.tree.num_drafted == 0


def test_the_nodes_of_a_batch_go_to_the_likeliest_tokens() -> None:
    """Long matches are right and short ones are wrong, where nodes are dear."""
    model = LookupModel(LENGTH, costs=CostCurve({1: 0.010, 2: 0.0105, 42: 0.0505}))
    requests = [request_of(), request_of()]
    for _ in range(60):
        budgets = model.budgets(requests, 2)
        guesses = [
            guess(match if budget.chain else 0)
            for match, budget in zip((9, 1), budgets, strict=True)
        ]
        drafts = model.trim(requests, guesses, 2)
        outcomes = [
            outcome(request, draft, right)
            for request, draft, right in zip(requests, drafts, (LENGTH, 0), strict=True)
        ]
        positions = sum(len(draft.tree) for draft in drafts)
        learn(model, outcomes, 0.0, model.costs(positions, 2))
    right, wrong = drafts
    assert right.tree.num_drafted >= 3
    assert wrong.tree.num_drafted == 0


@pytest.mark.parametrize(("seconds", "most"), [(0.0, 1.0), (0.0005, 0.05), (0.01, 0.02)])
def test_lookups_that_do_not_pay_are_rare(seconds: float, most: float) -> None:
    """They cost 0.2 percent of the time, or are 64 steps apart.

    Each costs 0, 5 or 100 % of a plain pass.
    """
    world = World(cpu, bad, matches=(1, 4), lookup_seconds=seconds)
    steps = world.steps(model_of(world), 800)[200:]
    asked = sum(match > 0 for match, _ in steps) / len(steps)
    assert most / 2 < asked <= most


def test_lookups_that_pay_are_made_in_every_step() -> None:
    world = World(cpu, lambda match: 0.95, matches=(4,), lookup_seconds=0.002)
    steps = world.steps(model_of(world), 400)[100:]
    assert all(match for match, _ in steps)


def test_drafts_in_every_step_leave_a_few_out() -> None:
    """Else a plain pass that became faster would not be noticed."""
    world = World(cpu, lambda match: 0.95, matches=(4,))
    steps = world.steps(model_of(world), 3000)
    plain = [step for step, (_, depth) in enumerate(steps) if not depth]
    assert 4 <= len(plain) <= 8
    assert all(after - before > 300 for before, after in pairwise(plain))


def test_a_batch_is_polled_in_turns_and_wholly_after_one_that_pays() -> None:
    world = World(cpu, bad)
    model, requests = model_of(world), [request_of() for _ in range(8)]

    def asked(right: int) -> list[int]:
        """The rows with a lookup, of which so many tokens are right."""
        budgets = model.budgets(requests, 8)
        guesses = [guess(4 if budget.chain else 0) for budget in budgets]
        drafts = model.trim(requests, guesses, 8)
        outcomes = [outcome(*each, right) for each in zip(requests, drafts, strict=True)]
        positions = sum(len(draft.tree) for draft in drafts)
        rows = [row for row, budget in enumerate(budgets) if budget.chain]
        learn(model, outcomes, 0.0005 * len(rows), model.costs(positions, 8))
        return rows

    for _ in range(400):
        asked(0)
    polls = [rows for _ in range(64) if (rows := asked(0))]
    assert 3 <= len(polls) <= 4
    assert max(map(len, polls)) < 8
    assert {row for rows in polls for row in rows} == {*range(8)}
    for _ in range(300):
        last = asked(LENGTH)
    assert last == [*range(8)]


def test_reading_the_prompt_is_no_cost_of_lookups() -> None:
    model = LookupModel(LENGTH, costs=measured(cpu))
    request = request_of()
    for step in range(20):
        (budget,) = model.budgets([request], 1)
        assert budget.chain == LENGTH
        (draft,) = model.trim([request], [guess(0)], 1)
        learn(model, [outcome(request, draft, 0)], 0.0 if step else 5.0, 0.01)


def test_the_end_of_the_output_and_unknown_costs_bound_the_budget() -> None:
    model = LookupModel(LENGTH, costs=measured(cpu))
    assert [b.chain for b in model.budgets([request_of(1), request_of(3)], 1)] == [0, 2]
    unknown = LookupModel(LENGTH)
    request = request_of()
    assert unknown.budgets([request], 1)[0].chain == 0
    (draft,) = unknown.trim([request], [guess(0)], 1)
    learn(unknown, [outcome(request, draft, 0)], 0.0, 0.01)
    assert unknown.budgets([request], 1)[0].chain == LENGTH


def test_it_is_taken_for_lookups_under_the_same_name() -> None:
    assert controller_class("cost_model", looks_up=True) is LookupModel
    assert controller_class("cost_model") is CostModel
    for name, controller in CONTROLLERS.items():
        if name != "cost_model":
            assert controller_class(name, looks_up=True) is controller


def test_rates_begin_with_the_match_and_follow_the_text() -> None:
    rates = AcceptanceRates()
    by_length = [rates.of(match) for match in (1, 2, 4, 8, 16)]
    assert by_length == sorted(by_length)
    ranks = [rates.of(by_rank(rank)) for rank in range(8)]
    assert ranks == sorted(ranks, reverse=True)
    for _ in range(100):
        rates.add(2, right=False)
    assert rates.of(2) < 0.05
    for _ in range(100):
        rates.add(2, right=True)
    assert rates.of(2) > 0.9
    assert rates.of(3) == prior_rate(3)


def test_every_token_of_a_chain_makes_its_match_longer() -> None:
    assert by_match(1, 4) == (1, 2, 3, 4)
    assert by_match(LONGEST_MATCH - 1, 3) == (LONGEST_MATCH - 1, LONGEST_MATCH, LONGEST_MATCH)
    assert by_match(LONGEST_MATCH + 9, 2) == (LONGEST_MATCH, LONGEST_MATCH)
    assert by_match(3, 0) == ()


def fork() -> Draft:
    """Two tokens after the root, and one after each."""
    tree = TokenTree((ROOT, RIGHT, WRONG, RIGHT, RIGHT), (-1, 0, 0, 1, 2))
    return Draft.deterministic(tree, (by_rank(0), by_rank(1), by_rank(0), by_rank(1)))


def test_of_a_tree_every_branch_is_learnt_from_down_to_where_the_text_left_it() -> None:
    model, request = LookupModel(LENGTH, costs=measured(cpu)), request_of()
    model.budgets([request], 1)
    model.trim([request], [fork()], 1)
    learn(model, [outcome(request, Draft.empty(ROOT), 1)], 0.0, 0.01)
    # The text went on with RIGHT, and what follows has not been computed.
    assert model._rates.of(by_rank(0)) > prior_rate(by_rank(0))
    assert model._rates.of(by_rank(1)) < prior_rate(by_rank(1))


def test_trees_are_cut_to_their_likeliest_nodes() -> None:
    """Where positions are nearly free all are drafted, where they are dear none is."""
    paths = path_probs(fork(), prior_rate)
    best = sorted(range(1, 5), key=lambda node: -paths[node - 1])
    for seconds, nodes in ((flat, range(4, 5)), (cpu, range(1, 4)), (steep, range(1))):
        model, request = LookupModel(LENGTH, costs=measured(seconds)), request_of()
        model.budgets([request], 1)
        (draft,) = model.trim([request], [fork()], 1)
        count = draft.tree.num_drafted
        assert count in nodes
        expected = fork().only(best[:count])
        assert sorted(draft.tree.tokens) == sorted(expected.tree.tokens)
        assert sorted(draft.features) == sorted(expected.features)


def test_cutting_keeps_nodes_with_their_distributions_and_features() -> None:
    draft = guess(3, 5)
    assert draft.only([1, 2, 3, 4, 5]) is draft
    short = draft.only([1, 2])
    assert (short.tree, short.features, len(short.q)) == (chain([ROOT, RIGHT, RIGHT]), (3, 4), 2)
    assert draft.only([]).tree.num_drafted == 0
    branch = fork().only([2, 4])
    assert branch.tree == chain([ROOT, WRONG, RIGHT])
    assert [distribution.certain for distribution in branch.q] == [WRONG, RIGHT]
    assert branch.features == (by_rank(1), by_rank(1))


def test_a_slow_first_lookup_is_forgotten_at_the_next_probe() -> None:
    slow, fast = (World(cheap, good, lookup_seconds=s * cheap(1)) for s in (20.0, 0.01))
    model, request = LookupModel(LENGTH, costs=measured(cheap)), request_of()
    slow.steps(model, 3, request=request)
    depths = [depth for _, depth in fast.steps(model, 300, request=request)]
    assert not any(depths[:20])
    assert sum(depth > 0 for depth in depths[150:]) > 75
