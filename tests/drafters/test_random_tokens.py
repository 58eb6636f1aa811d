"""`random` is uniform, at every temperature, in both streams."""

from __future__ import annotations

import pytest
import torch

from tests.drafting import draft_of, request_of
from tests.matrix import tiny_llm
from tests.tiny import tiny_model
from tokenleap import SamplingParams
from tokenleap.control import Budget
from tokenleap.core.tree import Draft
from tokenleap.drafters.lookups import RandomDrafter

V = 50


def propose(params: SamplingParams, length: int, *, coupled: bool) -> Draft:
    return draft_of(RandomDrafter(coupled=coupled), request_of([1, 2, 3], params, V), length)


@pytest.mark.parametrize("coupled", [True, False])
@pytest.mark.parametrize("temperature", [0, 1.0])
def test_q_is_uniform(temperature: float, coupled: bool) -> None:
    draft = propose(SamplingParams(temperature=temperature, seed=4), 6, coupled=coupled)
    assert draft.tree.num_drafted == 6
    for distribution in draft.q:
        assert torch.equal(distribution.dense(V), torch.full((V,), 1 / V))


def test_the_coupled_draft_is_the_argmax_of_the_targets_noise() -> None:
    """It is what the target takes wherever its own distribution is flat."""
    params = SamplingParams(seed=4)
    target = request_of([1, 2, 3], params, V).noise.at(3)
    draft = propose(params, 4, coupled=True)
    assert draft.tree.tokens[1:] == tuple(target.draw(draft.q_of(i + 1), i) for i in range(4))
    assert propose(params, 4, coupled=False).tree.tokens != draft.tree.tokens


def test_some_random_tokens_are_accepted() -> None:
    """About half, where six tokens are nearly equally probable: none of 200 once in 10^60."""
    llm = tiny_llm(tiny_model(vocab_size=6), "random", "rejection", gamma=1)
    params = [SamplingParams(seed=seed, max_tokens=100) for seed in range(3)]
    outputs = llm.generate([[1, 2, 3]] * 3, params)
    accepted = sum(o.metrics.num_accepted_tokens for o in outputs)
    assert 0 < accepted < sum(o.metrics.num_draft_tokens for o in outputs)


def test_a_budget_with_a_threshold_ends_the_draft_below_the_first_token() -> None:
    request = request_of([1, 2, 3], vocab_size=V)
    for budget, length in ((Budget(5, 5, 0.3), 1), (Budget(5, 5, 0.0, V**-2.5), 3)):
        (draft,) = RandomDrafter(coupled=False).propose([request], [budget])
        assert draft.tree.num_drafted == length
