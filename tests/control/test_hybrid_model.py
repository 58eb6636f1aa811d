"""Lookups or trained drafts, in worlds with known costs and known acceptance."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import mean

import pytest

from tests.control.worlds import cheap, cpu, flat, judged, learn, measured, request_of, steep
from tokenleap.control import CONTROLLERS, Budget, CostCurve, controller_class
from tokenleap.control.cost_model import CostModel
from tokenleap.control.features import agreed, by_match, by_rank, disagreed, is_graft, prior_rate
from tokenleap.control.lookup_models import HybridModel, LookupModel
from tokenleap.control.planner import LookupPlan
from tokenleap.core.tree import Draft, TokenTree, chain
from tokenleap.decode import Outcome
from tokenleap.drafters.combine import graft
from tokenleap.request import Request

LENGTH, LEVELS = 12, (1, 1, 1, 1)
ROOT, RIGHT, WRONG = 0, 1, 2


@dataclass
class Clock:
    """Time passes only where a world says so."""

    now: float = 0.0

    def read(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("tokenleap.core.clock.now", clock.read)
    return clock


def proposal(right: int, length: int) -> TokenTree:
    """A chain of which so many tokens are right."""
    return chain([ROOT, *[RIGHT] * min(right, length), *[WRONG] * (length - right)])


def outcome(request: Request, draft: Draft) -> Outcome:
    """The outcome of a draft if the text goes on with RIGHT for ever."""
    tree, path = draft.tree, list[int]()
    children = tree.children[0]
    while right := [child for child in children if tree.tokens[child] == RIGHT]:
        path.append(right[0])
        children = tree.children[right[0]]
    return judged(request, draft, path, RIGHT)


@dataclass(frozen=True)
class Text:
    """How predictable a text is.

    Args:
        lookup: probability that a looked-up token is right if the one before was.
        trained: the same of a trained draft.
        found: tokens that a lookup finds; 0 for none.
        match: length of its match.
    """

    lookup: float
    trained: float
    found: int = LENGTH
    match: int = 6


CHAT = Text(lookup=0.3, trained=0.7, found=2, match=1)
COPY = Text(lookup=0.97, trained=0.6, match=12)
NOISE = Text(lookup=0.005, trained=0.005, found=3, match=2)


@dataclass
class World:
    """A batch of requests with texts of their own.

    Args:
        seconds: of a pass, by positions.
        clock: the time.
        level_seconds: of a level of trained drafts.
        lookup_seconds: of a lookup.
    """

    seconds: Callable[[int], float]
    clock: Clock
    level_seconds: float = 0.0008
    lookup_seconds: float = 0.00002
    dice: random.Random = field(default_factory=lambda: random.Random(1))

    def run(
        self, model: HybridModel, requests: Sequence[Request], texts: Sequence[Text], steps: int
    ) -> tuple[float, list[str]]:
        """Tokens per second, and what the first request verified in each step."""
        tokens, began, kinds = 0, self.clock.now, []
        for _ in range(steps):
            step_tokens, kind = self.step(model, requests, texts)
            tokens += step_tokens
            kinds.append(kind)
        return tokens / (self.clock.now - began), kinds

    def step(
        self, model: HybridModel, requests: Sequence[Request], texts: Sequence[Text]
    ) -> tuple[int, str]:
        rows = len(requests)
        budgets = model.budgets(requests, rows)
        drafts, depths = [Draft.empty(request.root) for request in requests], [0] * rows
        if not model.resting:
            self.clock.now += self.lookup_seconds * sum(budget.chain > 0 for budget in budgets)
            found = [
                self.lookup(text, min(text.found, budget.chain))
                for text, budget in zip(texts, budgets, strict=True)
            ]
            chosen = model.choose(requests, budgets, found)
            depths = [min(budget.chain, len(LEVELS)) for budget in chosen]
            self.clock.now += self.level_seconds * max(depths)
            drafts = [
                Draft.deterministic(proposal(self.right(text.trained), depth)) if depth else draft
                for text, depth, draft in zip(texts, depths, found, strict=True)
            ]
            drafts = model.trim(requests, drafts, rows)
        outcomes = [outcome(*each) for each in zip(requests, drafts, strict=True)]
        verify = self.seconds(sum(len(draft.tree) for draft in drafts))
        self.clock.now += verify
        learn(model, outcomes, 0.0, verify)
        kind = "trained" if depths[0] else "lookup" if drafts[0].tree.num_drafted else "plain"
        return sum(1 + len(each.accepted.path) for each in outcomes), kind

    def lookup(self, text: Text, length: int) -> Draft:
        tree = proposal(self.right(text.lookup), length)
        return Draft.deterministic(tree, by_match(text.match, length))

    def right(self, odds: float) -> int:
        right = 0
        while right < LENGTH and self.dice.random() < odds:
            right += 1
        return right


def model_of(world: World) -> HybridModel:
    return HybridModel(LENGTH, costs=measured(world.seconds), levels=LEVELS)


def share(kinds: Sequence[str], kind: str) -> float:
    return kinds.count(kind) / len(kinds)


@pytest.mark.parametrize("seconds", [flat, cheap, cpu], ids=["free", "cheap", "cpu"])
@pytest.mark.parametrize(("text", "kind"), [(CHAT, "trained"), (COPY, "lookup")])
def test_what_pays_more_is_verified(
    text: Text, kind: str, seconds: Callable[[int], float], clock: Clock
) -> None:
    world = World(seconds, clock)
    model = model_of(world)
    _, kinds = world.run(model, [request_of()], [text], 400)
    assert share(kinds[100:], kind) > 0.85


def test_wrong_first_drafts_do_not_end_drafting(clock: Clock) -> None:
    """Of a new process, so that they are all that is known."""
    shares = list[float]()
    for seed in range(16):
        world = World(cheap, clock, dice=random.Random(seed))
        request, model = request_of(), model_of(world)
        drafts = 0
        while drafts < 2:
            _, (kind,) = world.run(model, [request], [replace(CHAT, trained=0)], 1)
            drafts += kind == "trained"
        _, kinds = world.run(model, [request], [CHAT], 60)
        shares.append(share(kinds, "trained"))
    assert mean(shares) > 0.75


def test_a_text_may_change_its_kind(clock: Clock) -> None:
    world, request = World(cpu, clock), request_of()
    model = model_of(world)
    for _ in range(3):
        world.run(model, [request], [CHAT], 120)
        _, copying = world.run(model, [request], [COPY], 60)
        assert share(copying[10:], "lookup") > 0.85
        _, chatting = world.run(model, [request], [CHAT], 60)
        assert share(chatting[20:], "trained") > 0.7


@pytest.mark.parametrize("seconds", [cpu, steep], ids=["cpu", "steep"])
@pytest.mark.parametrize("rows", [1, 4, 32])
def test_where_nothing_pays_it_switches_itself_off(
    rows: int, seconds: Callable[[int], float], clock: Clock
) -> None:
    """At most 2 % of the time of plain decoding is lost."""
    world = World(seconds, clock)
    model = model_of(world)
    requests, texts = [request_of() for _ in range(rows)], [NOISE] * rows
    world.run(model, requests, texts, 60)
    rate, kinds = world.run(model, requests, texts, 400)
    assert rate > 0.98 * rows / seconds(rows)
    assert share(kinds, "plain") > 0.95


def test_where_trained_drafts_do_not_pay_they_are_rarely_considered(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lookups go on in the meantime. Here they find something in every second step."""
    world, request = World(cpu, clock), request_of()
    model, considered = model_of(world), 0
    world.run(model, [request], [NOISE], 100)

    def beside(*args: object) -> list[Budget]:
        nonlocal considered
        considered += 1
        return CostModel.budgets_beside(model._trained, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(model._trained, "budgets_beside", beside)
    kinds = list[str]()
    for step in range(400):
        text = replace(COPY, trained=0.005) if step % 2 else replace(NOISE, found=0)
        kinds += world.run(model, [request], [text], 1)[1]
    assert considered < 400 / 4
    assert share(kinds, "lookup") > 0.45


def test_where_nothing_pays_planning_is_rare(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Yet trained drafts are probed every 64 steps, and a new request is planned for at once."""
    world = World(cpu, clock, lookup_seconds=0.0002)
    requests = [request_of(), request_of()]
    model, texts = model_of(world), [NOISE, NOISE]
    world.run(model, requests, texts, 300)
    plans = 0

    def plan(*args: object) -> LookupPlan:
        nonlocal plans
        plans += 1
        return LookupModel.plan(model._lookups, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(model._lookups, "plan", plan)
    _, kinds = world.run(model, requests, texts, 640)
    assert 10 <= plans <= 640 / 5
    assert 8 <= kinds.count("trained") <= 12
    for _ in range(20):
        before = plans
        world.run(model, [*requests, request_of()], [*texts, NOISE], 1)
        assert plans == before + 1


def test_each_request_of_a_batch_has_what_suits_it(clock: Clock) -> None:
    world = World(cheap, clock, level_seconds=0.0002)
    model = model_of(world)
    requests = [request_of() for _ in range(4)]
    for first in (CHAT, COPY):
        others = [COPY, CHAT, NOISE]
        world.run(model, requests, [first, *others], 150)
        _, kinds = world.run(model, requests, [first, *others], 150)
        assert share(kinds, "trained" if first is CHAT else "lookup") > 0.8


def test_expensive_levels_leave_lookups_alone(clock: Clock) -> None:
    """A trained draft that takes longer than a pass is only probed."""
    world = World(cheap, clock, level_seconds=0.03)
    _, kinds = world.run(model_of(world), [request_of()], [CHAT], 400)
    assert share(kinds[100:], "trained") < 0.05


def test_trained_drafts_begin_when_the_text_becomes_predictable(clock: Clock) -> None:
    world, request = World(cpu, clock), request_of()
    model = model_of(world)
    world.run(model, [request], [NOISE], 300)
    _, kinds = world.run(model, [request], [Text(0.0, 0.8, found=0)], 400)
    assert share(kinds[250:], "trained") > 0.9


# Grafts


def trained_with_graft(model: HybridModel, request: Request, right: int = 6) -> Draft:
    """A trained draft of two tokens that a lookup continues, before it is cut."""
    budgets = model.budgets([request], 1)
    found = Draft.deterministic(proposal(right, 6), by_match(1, 6))
    model.choose([request], budgets, [found])
    return graft(Draft.deterministic(proposal(right, 2)), found, LENGTH, siblings=False)


def test_grafts_are_kept_as_far_as_they_pay(clock: Clock) -> None:
    kept = []
    for seconds in (flat, cpu, steep):
        model, request = HybridModel(LENGTH, costs=measured(seconds), levels=LEVELS), request_of()
        draft = trained_with_graft(model, request)
        (cut,) = model.trim([request], [draft], 1)
        assert cut.tree.tokens[:3] == draft.tree.tokens[:3]  # the trained draft stays whole
        kept.append(cut.tree.num_drafted)
    assert kept[0] > 2
    assert kept == sorted(kept, reverse=True)
    assert kept[-1] == 2


@pytest.mark.parametrize("right", [0, 1, 2, 3, 6])
def test_grafts_do_not_count_as_trained_levels(right: int, clock: Clock) -> None:
    """The same outcomes with and without grafts teach the same about the trained drafter."""
    rates = []
    for grafted in (True, False):
        model, request = model_of(World(flat, clock)), request_of()
        longest = 0
        for _ in range(30):
            draft = trained_with_graft(model, request, right)
            if not grafted:
                draft = Draft.deterministic(proposal(right, 2))
            (cut,) = model.trim([request], [draft], 1)
            longest = max(longest, cut.tree.num_drafted)
            learn(model, [outcome(request, cut)], 0.0, 0.01)
        assert (longest > 2) == grafted
        rates.append(model._trained._estimates.acceptance_rates[:2])
    assert rates[0] == rates[1]


def test_what_lookups_are_worth_beside_a_trained_draft_is_learnt(clock: Clock) -> None:
    model, request = model_of(World(flat, clock)), request_of()
    for _ in range(40):
        draft = trained_with_graft(model, request, right=2)
        (cut,) = model.trim([request], [draft], 1)
        learn(model, [outcome(request, cut)], 0.0, 0.01)
    assert model._rates.of(agreed(1)) > 0.9
    assert model._rates.of(3) < 0.1  # of the first token after the trained draft
    assert model._rates.of(disagreed(3)) == prior_rate(disagreed(3))


def test_features_say_where_a_token_comes_from() -> None:
    for feature in (by_match(3, 1)[0], by_rank(2)):
        assert is_graft(feature)
        assert is_graft(disagreed(feature))
        assert not is_graft(agreed(feature))
        assert prior_rate(disagreed(feature)) < prior_rate(feature) < prior_rate(agreed(feature))
    assert not is_graft(0)


# Odds and ends


def test_it_is_taken_for_hybrids_under_the_same_name() -> None:
    assert controller_class("cost_model", hybrid=True) is HybridModel
    for name, controller in CONTROLLERS.items():
        if name != "cost_model":
            assert controller_class(name, hybrid=True) is controller


def test_nothing_is_drafted_before_a_pass_was_timed() -> None:
    model, request = HybridModel(LENGTH, costs=CostCurve(), levels=LEVELS), request_of()
    budgets = model.budgets([request], 1)
    assert budgets == [Budget(0, 0)]
    (chosen,) = model.choose([request], budgets, [Draft.empty(ROOT)])
    assert chosen.chain == 0


def test_after_a_failure_each_request_is_chosen_for_alone(clock: Clock) -> None:
    """`Speculation` then proposes for one request after the other, and one of them has nothing."""
    model = model_of(World(flat, clock))
    requests = [request_of(), request_of()]
    budgets = model.budgets(requests, 2)
    found = [Draft.deterministic(proposal(6, 6), by_match(16, 6)) for _ in requests]
    model.choose(requests, budgets, found)
    (second,) = model.choose(requests[1:], budgets[1:], found[1:])
    assert second.chain == 0  # so long a match is better
    drafts = model.trim(requests, [Draft.empty(ROOT), found[1]], 2)
    assert [draft.tree.num_drafted for draft in drafts] == [0, 6]
    learn(model, [outcome(*each) for each in zip(requests, drafts, strict=True)], 0.0, 0.01)


def test_the_end_of_the_output_bounds_both(clock: Clock) -> None:
    model = model_of(World(flat, clock))
    last, two_left = request_of(1), request_of(2)
    budgets = model.budgets([last, two_left], 2)
    assert [budget.chain for budget in budgets] == [0, 1]
    chosen = model.choose([last, two_left], budgets, [Draft.empty(ROOT)] * 2)
    assert [budget.chain for budget in chosen] == [0, 1]


def test_a_released_request_is_forgotten(clock: Clock) -> None:
    model, request = model_of(World(flat, clock)), request_of()
    draft = trained_with_graft(model, request)
    (cut,) = model.trim([request], [draft], 1)
    learn(model, [outcome(request, cut)], 0.0, 0.01)
    model.release(request)
    assert not model._found
    assert not model._drafts
    assert not model._trained._estimates._histories
    assert not model._lookups._states
