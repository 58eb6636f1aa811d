from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import pytest
import torch

from foretoken.control import CONTROLLERS, CostCurve, controller_class
from foretoken.control.cost_model import CostModel
from foretoken.control.evidence import LONGEST_MATCH, GuessOdds, by_match, by_rank
from foretoken.control.lookup_model import LookupModel
from foretoken.control.plain_steps import PlainSteps
from foretoken.core.acceptance import Accepted
from foretoken.core.sampler import TreeDistributions
from foretoken.core.tree import Draft, TokenTree, chain
from foretoken.decode import Outcome, StepTimes
from foretoken.request import Request
from tests.control.worlds import cheap, cpu, flat, measured, request_of, stairs, steep

LENGTH = 8

ROOT, RIGHT, WRONG = 0, 1, 2


def guess(match: int, length: int = LENGTH) -> Draft:
    """Of tokens that are right, until one of them is not."""
    if not match:
        return Draft.empty(ROOT)
    return Draft.deterministic(chain([ROOT, *[RIGHT] * length]), by_match(match, length))


def outcome(request: Request, draft: Draft, right: int) -> Outcome:
    """What comes of a draft if so many tokens are right."""
    kept = min(right, draft.tree.num_drafted)
    path = tuple(range(1, kept + 1))
    token = RIGHT if right > kept else WRONG
    rejected = (kept + 1,) if kept < draft.tree.num_drafted else ()
    logits = torch.zeros(1, 9).expand(len(draft.tree), 9)
    distributions = TreeDistributions(logits, draft.tree, request.sampler, request.output_ids)
    accepted = Accepted(path, token, rejected, "rejected" if rejected else "")
    return Outcome(request, draft, accepted, (), logits, distributions)


@dataclass(frozen=True)
class World:
    """What lookups find, and what passes cost.

    Args:
        seconds: of a pass, by positions.
        odds: that the next token is right, by length of match.
        matches: what is found, one of them at random every time; 0 is nothing.
        question: seconds of a lookup.
    """

    seconds: Callable[[int], float]
    odds: Callable[[int], float]
    matches: Sequence[int] = (0, 1, 2, 4, 8)
    question: float = 0.0

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
        """Match and depth of each step; a match of 0 where nobody asked, too."""
        dice, found = random.Random(seed), []
        request = request or request_of()
        for _ in range(count):
            (budget,) = model.budgets([request])
            match = dice.choice(self.matches) if budget.chain else 0
            (draft,) = model.trim([request], [guess(match, budget.chain)])
            right = 0
            while right < LENGTH and dice.random() < self.odds(match + right):
                right += 1
            depth = draft.tree.num_drafted
            found.append((match, depth))
            draft_seconds = self.question if budget.chain else 0.0
            times = StepTimes(draft_seconds, self.seconds(1 + depth), 0.0)
            model.observe([outcome(request, draft, right)], times)
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
        for seed in range(3)
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


def test_a_text_that_turns_predictable_is_noticed_without_a_draft() -> None:
    model, request = model_of(WORLDS["wrong"]), request_of()
    before = WORLDS["wrong"].steps(model, 200, request=request)
    after = WORLDS["always right"].steps(model, 80, request=request)
    assert sum(depth for _, depth in before[100:]) <= 10
    assert [depth for match, depth in after[-20:] if match] == [
        LENGTH for match, _ in after[-20:] if match
    ]


def test_what_is_learnt_of_one_request_is_where_the_next_begins() -> None:
    world = WORLDS["misleading"]
    model = model_of(world)
    request = request_of()
    model.budgets([request])
    (first,) = model.trim([request], [guess(8)])
    assert first.tree.num_drafted > 0
    for _ in range(20):
        world.steps(model, 40)
    another = request_of()
    model.budgets([another])
    (later,) = model.trim([another], [guess(8)])
    assert later.tree.num_drafted == 0


def test_the_nodes_of_a_batch_go_to_the_likeliest_tokens() -> None:
    """One request whose guesses are right and one whose are wrong, where nodes are dear."""
    model = LookupModel(LENGTH, costs=CostCurve({1: 0.010, 2: 0.0105, 42: 0.0505}))
    requests = [request_of(), request_of()]
    for _ in range(60):
        model.budgets(requests)
        drafts = model.trim(requests, [guess(3), guess(3)])
        outcomes = [
            outcome(request, draft, right)
            for request, draft, right in zip(requests, drafts, (LENGTH, 0), strict=True)
        ]
        positions = sum(len(draft.tree) for draft in drafts)
        model.observe(outcomes, StepTimes(0.0, model.costs(positions, 2), 0.0))
    model._plain_steps = PlainSteps()
    model.budgets(requests)
    right, wrong = model.trim(requests, [guess(3), guess(3)])
    assert right.tree.num_drafted >= 3
    assert wrong.tree.num_drafted == 0


def test_there_is_a_plain_step_now_and_then() -> None:
    """Which costs about one percent, so that what drafts are compared with stays known."""
    world = World(cpu, lambda match: 1.0, matches=(8,))
    steps = world.steps(model_of(world), 2000)
    gain = world.rate(8, LENGTH) / world.rate(8, 0)
    plain = sum(depth == 0 for _, depth in steps)
    assert plain == pytest.approx(2000 * 0.01 / (gain - 1), rel=0.5)


@pytest.mark.parametrize(("question", "most"), [(0.0, 1.0), (0.0005, 0.025), (0.01, 0.02)])
def test_dear_questions_that_bring_nothing_are_rare(question: float, most: float) -> None:
    """They cost 0.1 percent of the time, or are 64 steps apart.

    Each costs 0, 5 or 100 % of a plain pass.
    """
    world = World(cpu, bad, matches=(1, 4), question=question)
    steps = world.steps(model_of(world), 800)[200:]
    asked = sum(match > 0 for match, _ in steps) / len(steps)
    assert most / 2 < asked <= most


def plain_step(model: LookupModel, batch: list[Request]) -> list[bool]:
    """A step in which nothing is found; who was asked."""
    budgets = model.budgets(batch)
    drafts = model.trim(batch, [guess(0)] * len(batch))
    outcomes = [outcome(r, draft, 0) for r, draft in zip(batch, drafts, strict=True)]
    asked = [budget.chain > 0 for budget in budgets]
    seconds = 0.0005 if any(asked) else 0.0001
    model.observe(outcomes, StepTimes(seconds, model.costs(len(batch), len(batch)), 0.0))
    return asked


def test_who_comes_as_another_goes_is_asked_at_once_where_questions_have_paid() -> None:
    """The batch is as large as before, and everybody else in it is asked in vain."""
    model, one, two = LookupModel(LENGTH, costs=measured(cpu)), request_of(), request_of()
    asked = [plain_step(model, [one, two]) for _ in range(400)]
    assert sum(map(any, asked[200:])) < 20
    while any(plain_step(model, [one, two])):
        pass
    model._gain = 0.5
    model.release(two)
    assert plain_step(model, [one, request_of()]) == [False, True]


def test_a_question_that_pays_is_followed_by_the_next() -> None:
    """However rarely questions were asked until then."""
    world = World(cpu, bad, matches=(1,), question=0.0005)
    model, request = model_of(world), request_of()
    world.steps(model, 400, request=request)
    while not model.budgets([request])[0].chain:
        model.trim([request], [guess(0)])
        model.observe([outcome(request, guess(0), 0)], StepTimes(0.0, 0.01, 0.0))
    for _ in range(3):
        (draft,) = model.trim([request], [guess(16)])
        model.observe([outcome(request, draft, LENGTH)], StepTimes(0.0005, 0.02, 0.0))
        assert model.budgets([request])[0].chain > 0


def test_questions_that_bring_more_than_they_cost_are_asked_every_time() -> None:
    world = World(cpu, lambda match: 0.95, matches=(4,), question=0.002)
    steps = world.steps(model_of(world), 400)[100:]
    assert all(match for match, _ in steps)


def test_reading_the_prompt_is_no_cost_of_questions() -> None:
    model = LookupModel(LENGTH, costs=measured(cpu))
    request = request_of()
    for step in range(20):
        (budget,) = model.budgets([request])
        assert budget.chain == LENGTH
        (draft,) = model.trim([request], [guess(0)])
        model.observe([outcome(request, draft, 0)], StepTimes(0.0 if step else 5.0, 0.01, 0.0))


def test_the_end_of_the_output_and_unknown_costs_bound_the_budget() -> None:
    model = LookupModel(LENGTH, costs=measured(cpu))
    assert [b.chain for b in model.budgets([request_of(1), request_of(3)])] == [0, 2]
    unknown = LookupModel(LENGTH)
    request = request_of()
    assert unknown.budgets([request])[0].chain == 0
    (draft,) = unknown.trim([request], [guess(0)])
    unknown.observe([outcome(request, draft, 0)], StepTimes(0.0, 0.01, 0.0))
    assert unknown.budgets([request])[0].chain == LENGTH


def test_it_is_taken_for_lookups_under_the_same_name() -> None:
    assert controller_class("cost_model", looks_up=True) is LookupModel
    assert controller_class("cost_model") is CostModel
    for name, controller in CONTROLLERS.items():
        if name != "cost_model":
            assert controller_class(name, looks_up=True) is controller


def test_odds_rise_with_the_match_and_begin_with_those_of_all() -> None:
    overall = GuessOdds()
    of_all = [overall.of(match) for match in (1, 2, 4, 8, 16)]
    assert of_all == sorted(of_all)
    ranks = [overall.of(by_rank(rank)) for rank in range(8)]
    assert ranks == sorted(ranks, reverse=True)
    one = GuessOdds(overall)
    for _ in range(300):
        overall.add(2, right=False)
    assert one.of(2) == overall.of(2) < 0.05
    for _ in range(100):
        one.add(2, right=True)
    assert one.of(2) > 0.65 > overall.of(2)
    assert one.of(3) == overall.of(3)


def test_every_token_of_a_chain_makes_its_match_longer() -> None:
    assert by_match(1, 4) == (1, 2, 3, 4)
    assert by_match(LONGEST_MATCH - 1, 3) == (LONGEST_MATCH - 1, LONGEST_MATCH, LONGEST_MATCH)
    assert by_match(LONGEST_MATCH + 9, 2) == (LONGEST_MATCH, LONGEST_MATCH)
    assert by_match(3, 0) == ()


def test_a_guess_is_followed_as_long_as_it_is_likely() -> None:
    odds = GuessOdds()
    likely = odds.likely(guess(1, 16), 0.1)
    assert likely == [each for each in odds.likely(guess(1, 16), 0.0) if each[0] >= 0.1]
    assert 1 < len(likely) < 16
    assert likely == sorted(likely, reverse=True)
    assert [node for _, node in likely] == list(range(1, len(likely) + 1))
    assert likely[0][0] == odds.of(1)
    assert likely[1][0] == pytest.approx(odds.of(1) * odds.of(2))
    for _ in range(300):
        odds.add(1, right=False)
    assert odds.likely(guess(1, 16), 0.1) == []


def fork() -> Draft:
    """Two tokens after the root, and one after each."""
    tree = TokenTree((ROOT, RIGHT, WRONG, RIGHT, RIGHT), (-1, 0, 0, 1, 2))
    return Draft.deterministic(tree, (by_rank(0), by_rank(1), by_rank(0), by_rank(1)))


def test_a_tree_is_as_likely_as_its_paths() -> None:
    odds = GuessOdds()
    first, second = odds.of(by_rank(0)), odds.of(by_rank(1))
    likely = odds.likely(fork(), 0.0)
    assert [node for _, node in likely] == [1, 2, 3, 4]
    expected = [first, second, first * first, second * second]
    assert [p for p, _ in likely] == pytest.approx(expected)


def test_of_a_tree_every_branch_is_learnt_from_down_to_where_the_text_left_it() -> None:
    model, request = LookupModel(LENGTH, costs=measured(cpu)), request_of()
    model.budgets([request])
    model.trim([request], [fork()])
    model.observe([outcome(request, Draft.empty(ROOT), 1)], StepTimes(0.0, 0.01, 0.0))
    odds = model._requests[request.key].odds
    # The text went on with RIGHT, and nobody has computed what follows.
    assert (odds._right[by_rank(0)], odds._reached[by_rank(0)]) == (1, 1)
    assert (odds._right[by_rank(1)], odds._reached[by_rank(1)]) == (0, 1)


def test_trees_are_cut_to_their_likeliest_nodes() -> None:
    """Where positions are nearly free all are drafted, where they are dear none is."""
    best = [node for _, node in sorted(GuessOdds().likely(fork(), 0.0), reverse=True)]
    for seconds, nodes in ((flat, range(4, 5)), (cpu, range(1, 4)), (steep, range(1))):
        model, request = LookupModel(LENGTH, costs=measured(seconds)), request_of()
        model.budgets([request])
        (draft,) = model.trim([request], [fork()])
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


def test_promises_that_are_not_kept_are_believed_less() -> None:
    """A text in which guesses are worse than matches tell: that shows in what drafts bring."""
    lengths = []
    for passed in (LENGTH, 0):
        model = LookupModel(LENGTH, costs=measured(cpu))
        for step in range(40):
            request = request_of()
            (budget,) = model.budgets([request])
            (draft,) = model.trim([request], [guess(3 if step % 2 else LONGEST_MATCH, LENGTH)])
            times = StepTimes(0.0, cpu(1 + draft.tree.num_drafted), 0.0)
            model.observe([outcome(request, draft, passed)], times)
            model._overall = GuessOdds()  # the next request's guesses are as good as ever, it says
        lengths.append(draft.tree.num_drafted)
        assert budget.chain
    assert lengths[0] > lengths[1]


def test_what_is_left_out_as_unlikely_would_not_have_paid() -> None:
    """The bound on single tokens is exact: all prefixes of all of them compared."""
    for seconds in (flat, cheap, cpu, stairs, steep):
        for rows in (1, 3, 16):
            model = LookupModel(LENGTH, costs=measured(seconds))
            passes = model._expected_passes(rows)
            dice = random.Random(rows)
            odds = sorted((dice.random() for _ in range(3 * rows)), reverse=True)
            tokens = accumulate(odds, initial=float(rows))
            rates = [some / passes.relative[count] for count, some in enumerate(tokens)]
            assert all(p >= passes.least for p in odds[: rates.index(max(rates))])
