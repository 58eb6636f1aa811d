"""The smoothed distribution of `corpus_ngram`, and its drafts; files: `test_text_files.py`."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from tests.drafters.text.test_ngrams import ngrams_of
from tests.drafting import request_of
from tokenleap import ConfigError, SamplingParams
from tokenleap.control import Budget
from tokenleap.core.tree import Draft
from tokenleap.drafters.options import CorpusNgramOptions
from tokenleap.drafters.text.ngrams import CorpusNgramDrafter, SmoothedNgrams, count_ngrams

V = 7
DICE = random.Random(1)
TEXTS = [[DICE.choice([0, 0, 1, 2, 3, 4]) for _ in range(30)] for _ in range(3)] + [[6]]


@pytest.fixture(scope="module")
def ngrams() -> SmoothedNgrams:
    return SmoothedNgrams(count_ngrams(TEXTS, V))


def expected(context: list[int], order: int = 3) -> dict[int, float]:
    """The formulas of the module's docstring, from counts taken afresh."""
    ones, twos, threes = (ngrams_of(TEXTS, order) for order in (1, 2, 3))
    *_, a, b = [-1, *context]
    support = [c for c in range(V) if twos[b, c]] if order > 1 else []
    if not support:
        total = sum(ones.values())
        return {c: ones[(c,)] / total for c in range(V) if ones[(c,)]}
    total = sum(ones[(c,)] for c in support)
    distribution = {c: ones[(c,)] / total for c in support}
    counted = [{c: twos[b, c] for c in support}, {c: threes[a, b, c] for c in support}]
    for counts in counted[: order - 1]:
        number = sum(counts.values())
        types = sum(count > 0 for count in counts.values())
        if number:
            distribution = {
                c: (counts[c] + types * distribution[c]) / (number + types) for c in support
            }
    return distribution


CONTEXTS = [[b] for b in range(9)] + [[a, b] for a in range(9) for b in range(9)]


@pytest.mark.parametrize("order", [1, 2, 3])
def test_the_distribution_is_the_formula(order: int) -> None:
    ngrams = SmoothedNgrams(count_ngrams(TEXTS, V), order)
    for context in CONTEXTS:
        distribution = expected(context, order)
        tokens, probs = ngrams.probabilities(context)
        assert tokens.tolist() == list(distribution)
        assert probs.tolist() == pytest.approx(list(distribution.values()))
        assert probs.sum() == pytest.approx(1)


@pytest.mark.parametrize("order", [1, 3])
@pytest.mark.parametrize("temperature", [0.0, 0.01, 0.5, 1.0, 2.0])
def test_temperature(temperature: float, order: int) -> None:
    ngrams = SmoothedNgrams(count_ngrams(TEXTS, V), order)
    for context in CONTEXTS:
        tokens, probs = ngrams.probabilities(context)
        distribution = ngrams.distribution(context, temperature)
        if temperature == 0:
            assert distribution.certain == tokens[probs.argmax()]
            continue
        weights = np.exp((np.log(probs) - np.log(probs.max())) / temperature)
        dense = distribution.dense(V).numpy()
        assert dense[tokens] == pytest.approx(weights / weights.sum(), abs=1e-12)
        assert float(distribution.probs.sum()) == pytest.approx(1)


def propose(
    ngrams: SmoothedNgrams, params: SamplingParams, budget: Budget, **options: Any
) -> Draft:
    drafter = CorpusNgramDrafter(
        ngrams, CorpusNgramOptions(corpus="given", **options), coupled=False
    )
    (draft,) = drafter.propose([request_of([1, 0, 2], params, V)], [budget])
    return draft


def test_a_draft_chains_on_its_own_predictions(ngrams: SmoothedNgrams) -> None:
    draft = propose(ngrams, SamplingParams(seed=3), Budget(6, 6))
    context = [0, 2]
    for node in range(1, 7):
        token, distribution = draft.tree.tokens[node], draft.q_of(node)
        assert distribution.prob(token) == pytest.approx(expected(context)[token])
        context = [context[-1], token]


def test_greedy_requests_get_the_mode(ngrams: SmoothedNgrams) -> None:
    greedy = propose(ngrams, SamplingParams(temperature=0), Budget(4, 4))
    assert all(distribution.certain is not None for distribution in greedy.q)
    pinned = propose(ngrams, SamplingParams(seed=1), Budget(4, 4), draft_temperature=0)
    assert pinned.tree == greedy.tree
    sampled = propose(
        ngrams, SamplingParams(temperature=0, seed=1), Budget(4, 4), draft_temperature=1
    )
    assert sampled.q_of(1).certain is None


def test_a_budget_with_thresholds(ngrams: SmoothedNgrams) -> None:
    assert propose(ngrams, SamplingParams(seed=1), Budget(5, 5, 0.999)).tree.num_drafted == 1
    assert propose(ngrams, SamplingParams(seed=1), Budget(0, 0)).tree.num_drafted == 0


def test_order_1_drafts_the_most_frequent_token() -> None:
    ngrams = SmoothedNgrams(count_ngrams([[4, 5, 4, 5, 4, 6]], V), 1)
    greedy = propose(ngrams, SamplingParams(temperature=0), Budget(3, 3))
    assert greedy.tree.tokens == (2, 4, 4, 4)
    sampled = propose(ngrams, SamplingParams(seed=2), Budget(3, 3))
    for node in (1, 2, 3):
        assert sampled.q_of(node).probs.tolist() == pytest.approx([3 / 6, 2 / 6, 1 / 6])
    with pytest.raises(ConfigError, match="order: input should be less than or equal to 3"):
        CorpusNgramOptions(corpus="given", order=4)
