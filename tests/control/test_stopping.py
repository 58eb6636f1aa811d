"""Chains that end where the drafter is unsure."""

from __future__ import annotations

import random
from dataclasses import replace
from math import nan

import pytest
from benchmarks.draft_replay import LENGTHS, Text, replay

from tests.control.worlds import cpu, learn, measured, outcome, request_of, tree_of
from tokenleap import SamplingParams
from tokenleap.control.cost_model import CostModel
from tokenleap.control.estimates import DraftSizes, Stopping
from tokenleap.core.tree import Draft
from tokenleap.request import Request

PASSES = {1: 1.0, 4: 1.08, 6: 1.2, 8: 1.55, 12: 1.8}
"""Seconds of a pass, by nodes: those of a kernel that reads a weight once for six nodes."""


def learnt(rate_above: dict[float, float], count: int = 400) -> Stopping:
    """After paths of these probabilities, tokens are accepted so often."""
    dice, stopping = random.Random(0), Stopping()
    for _ in range(count):
        probability = dice.choice(list(rate_above))
        right = dice.random() < rate_above[probability]
        made = outcome(request_of(), (1, 1), 2 if right else 1)
        draft = Draft(made.draft.tree, made.draft.q, path_probs=(probability, probability / 2))
        object.__setattr__(made, "draft", draft)
        stopping.learn(made)
    return stopping


def test_what_is_dear_needs_a_probable_path() -> None:
    thresholds = [Stopping().least_path_prob(price / 10) for price in range(11)]
    assert thresholds == sorted(thresholds)
    assert thresholds[0] == 0
    assert 0.3 < thresholds[6] < 0.6
    assert thresholds[10] == 1


def test_the_threshold_is_where_a_token_is_worth_its_price() -> None:
    """Whatever the drafter says: one is right half as often, the other one twice as often."""
    modest = learnt({0.1: 0.3, 0.3: 0.7, 0.4: 0.9})
    boastful = learnt({0.4: 0.1, 0.7: 0.3, 0.95: 0.5})
    assert 0.1 < modest.least_path_prob(0.6) < 0.4
    assert boastful.least_path_prob(0.6) > 0.9


@pytest.mark.parametrize(("rate", "threshold"), [(0.9, 0.0), (0.1, 1.0)])
def test_probabilities_that_tell_nothing(rate: float, threshold: float) -> None:
    flat = learnt({0.2: rate, 0.5: rate, 0.9: rate}, 3000)
    assert flat.least_path_prob(0.5) == pytest.approx(threshold, abs=0.2)


def test_nothing_is_learnt_of_appended_tokens() -> None:
    """Another drafter's tokens say nothing about the paths that this one is sure of."""
    thresholds = []
    for appended in ((), (nan, nan)):
        stopping, probs = Stopping(), (0.9, 0.8, *appended)
        for _ in range(200):
            made = outcome(request_of(), (1,) * len(probs), 2)
            draft = Draft(made.draft.tree, made.draft.q, path_probs=probs)
            stopping.learn(replace(made, draft=draft))
        thresholds.append(stopping.least_path_prob(0.6))
    assert thresholds[0] == thresholds[1] < Stopping().least_path_prob(0.6)


def test_what_was_learnt_is_forgotten_where_drafts_end_at_their_first_token() -> None:
    """Nothing is learnt there, so an earlier text would decide for ever."""
    stopping = learnt({0.2: 0.1, 0.5: 0.1, 0.9: 0.1})
    assert stopping.least_path_prob(0.6) > 0.9
    made = outcome(request_of(), (1,), 1)
    made = replace(made, draft=Draft(made.draft.tree, made.draft.q, path_probs=(0.9,)))
    for _ in range(1000):
        stopping.learn(made)
    assert stopping.least_path_prob(0.6) == pytest.approx(Stopping().least_path_prob(0.6), abs=0.1)


def text(dice: random.Random, sure: tuple[float, ...], bias: float = 1.0) -> Text:
    """A drafter with these probabilities for its tokens, which are right in that share of cases."""
    probs = [dice.choice(sure) for _ in range(128)]
    return [dice.random() < probability for probability in probs], [p**bias for p in probs]


TEXTS = {
    "easy": (0.99, 0.97),
    "hard": (0.3, 0.5),
    "mixed": (0.99, 0.98, 0.97, 0.4),
    "hopeless": (0.02,),
}


@pytest.mark.parametrize(("bias", "level"), [(1.0, 0.3), (0.3, 0.15), (3.0, 0.15)])
def test_it_is_as_fast_as_the_best_length(bias: float, level: float) -> None:
    """On texts of every kind, whether the drafter is sure of itself or not."""
    dice = random.Random(1)
    texts = {kind: [text(dice, sure, bias) for _ in range(5)] for kind, sure in TEXTS.items()}
    for kind, speeds in replay(texts, PASSES, level, 5).items():
        best = max(speeds[length] for length in LENGTHS)
        assert speeds["default"] > 0.97 * best, kind
        if kind == "mixed" and bias >= 1:
            assert speeds["default"] > 1.03 * best


def test_a_request_without_a_plan_for_more_than_one_token_has_no_threshold() -> None:
    model = CostModel(1, costs=measured(cpu), stops_early=True)
    (budget,) = model.budgets([request_of()], 1)
    assert (budget.depth, budget.min_path_prob) == (1, 0.0)


@pytest.mark.parametrize("good", [60, 0])
def test_a_request_tries_again_soon_for_one_percent_of_the_time(good: int) -> None:
    """Of a drafter that takes 0.4 plain passes for a token, after drafts that were right or none.

    A trial loses 0.445 plain passes if its token is wrong, so it may come once in 45 steps.
    """
    model = CostModel(5, costs=measured(cpu), stops_early=True)
    request, level = request_of(), 0.004
    for _ in range(good):
        learn(model, [outcome(request, (1,) * 5, 5)], 5 * level, cpu(6))
    lost, tried = 0.0, 0
    for step in range(2000):
        depth = model.budgets([request], 1)[0].depth
        made = outcome(request, (1,) * depth, 0)
        learn(model, [made], level * depth, cpu(1 + depth))
        if step >= 1000:  # the rates are those of the new text
            lost += (level * depth + cpu(1 + depth)) / cpu(1) - 1
            tried += depth > 0
    assert 5 < lost < 15
    assert 10 <= tried <= 30


def test_a_level_that_no_budget_had_is_no_larger_than_expected() -> None:
    sizes = DraftSizes([1] * 4)
    for _ in range(20):
        sizes.learn(tree_of((1,)), 2)
    first, second, third, fourth = sizes.of_levels
    assert first == pytest.approx(1)
    assert second < 0.15
    assert second == third == fourth


def test_sizes_of_trees_are_learnt_level_by_level() -> None:
    sizes = DraftSizes([1] * 28)
    for _ in range(100):
        sizes.learn(tree_of((4, 8, 8)), 3)
    assert sizes.of_levels[:3] == pytest.approx([4, 8, 8], rel=0.1)


def test_greedy_and_sampled_requests_have_thresholds_of_their_own() -> None:
    """The two do not mean the same by how probable a path is."""
    model = CostModel(5, costs=measured(cpu), stops_early=True)
    greedy = Request([1], SamplingParams(temperature=0), vocab_size=9, max_model_len=10**7)
    sampled = request_of()
    unlearnt = Stopping().least_path_prob(0.6)
    for _ in range(200):
        model.budgets([sampled], 1)
        made = outcome(sampled, (1, 1), 1)
        draft = Draft(made.draft.tree, made.draft.q, path_probs=(0.9, 0.8))
        learn(model, [replace(made, draft=draft)], 0.002, cpu(3))
    model._price = 0.6
    for request, alike in ((greedy, True), (sampled, False)):
        budget = model._budget(request, model._estimates.history(request), 5, 1.0)
        assert (budget.min_path_prob == unlearnt) == alike
