"""Invariants 2 to 4 of the drafters: q is exact, state catches up, an empty draft is plain."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from scipy.stats import binom

from tests.drafting import drafter_of
from tests.matrix import LEAST_NODES, PROMPTS, SPECULATIVE, tiny_llm
from tests.tiny import CONTEXT, VOCAB_SIZE, tiny_model
from tokenleap import LLM, SamplingParams
from tokenleap.control import Budget, Fixed
from tokenleap.core.tree import Draft
from tokenleap.request import Request


def request_of(tokens: list[int], params: SamplingParams | None = None) -> Request:
    params = params or SamplingParams(temperature=0, max_tokens=100)
    return Request(tokens, params, vocab_size=VOCAB_SIZE, max_model_len=CONTEXT)


def propose(llm: LLM, batch: list[Request], budgets: list[Budget]) -> list[Draft]:
    """Prepare as the loop does, and draft: the target holds all tokens but the last."""
    target, drafter = llm.engine.target, drafter_of(llm)
    for request in batch:
        if request.key not in target:
            target.add(request.key)
        held = target.cached(request.key)
        tokens = request.token_ids[held:-1]
        hidden = target.prefill(request.key, tokens, drafter.traits.hidden_layers)
        if hidden:
            drafter.observe_prefill(request, held, hidden)
    return drafter.propose(batch, budgets)


def num_tokens(llm: LLM) -> int:
    """Those of the vocabulary, and those that the drafter has added after it."""
    return max(VOCAB_SIZE, drafter_of(llm).traits.token_limit)


def release(llm: LLM, request: Request) -> None:
    drafter_of(llm).release(request)
    llm.engine.target.remove(request.key)


@pytest.mark.parametrize("method", ["none", *SPECULATIVE])
@pytest.mark.parametrize("temperature", [0, 1.0])
def test_drafts_fit_their_budget_and_start_at_the_root(method: str, temperature: float) -> None:
    llm = tiny_llm(tiny_model(), method)
    params = SamplingParams(temperature=temperature, seed=1, max_tokens=50)
    batch = [request_of(prompt, params) for prompt in PROMPTS]
    for size in (0, 1, 3, 9):
        budgets = [Budget(size, max(0, size - i)) for i in range(len(batch))]
        for request, budget, draft in zip(
            batch, budgets, propose(llm, batch, budgets), strict=True
        ):
            assert draft.tree.tokens[0] == request.root
            assert draft.tree.num_drafted <= budget.nodes
            assert max(draft.tree.depths) <= budget.depth
            assert all(0 <= token < num_tokens(llm) for token in draft.tree.tokens)
            assert all(
                float(distribution.probs.sum()) == pytest.approx(1, abs=1e-5)
                for distribution in draft.q
            )


@pytest.mark.parametrize("method", SPECULATIVE)
def test_q_is_the_distribution_tokens_are_drawn_from(method: str) -> None:
    """Frequencies of the first drafted token over 600 seeds, by the binomial distribution.

    A token fails by accident with probability 2e-9 or less. For drafters that do not sample, 50
    seeds are enough.
    """
    llm = tiny_llm(tiny_model(), method, "rejection")
    prompt, samples = [1, 2, 1, 3, 1, 2, 4, 1], 50
    llm.generate([prompt], SamplingParams(seed=1, max_tokens=4))  # some guess what they saw before
    counts: Counter[int] = Counter()
    while (seed := counts.total()) < samples:
        every = [SamplingParams(seed=seed + i, max_tokens=9) for i in range(50)]
        batch = [request_of(prompt, params) for params in every]
        drafts = propose(llm, batch, [Budget(LEAST_NODES.get(method, 1), 1)] * len(batch))
        for request, draft in zip(batch, drafts, strict=True):
            release(llm, request)
            counts[draft.tree.tokens[1]] += 1
        if draft.q_of(1).certain is None:
            samples = 600
    distribution = draft.q_of(1).dense(num_tokens(llm))
    probabilities = (distribution.double() / distribution.double().sum()).clamp(0, 1).numpy()
    seen = np.array([counts[token] for token in range(num_tokens(llm))])
    assert binom.cdf(seen, samples, probabilities).min() > 1e-9
    assert binom.sf(seen - 1, samples, probabilities).min() > 1e-9


@pytest.mark.parametrize("method", SPECULATIVE)
def test_a_drafter_catches_up_from_the_committed_tokens(method: str) -> None:
    """Whatever was drafted and rejected before, the next draft is that of a fresh drafter."""
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=100)
    model = tiny_model()
    used = tiny_llm(model, method)
    request = request_of(PROMPTS[0], params)
    generator = torch.Generator().manual_seed(0)
    for step in range(8):
        (draft,) = propose(used, [request], [Budget(4, 4)])
        (expected,) = propose(tiny_llm(model, method), [request], [Budget(4, 4)])
        assert draft.tree == expected.tree
        for ours, theirs in zip(draft.q, expected.q, strict=True):
            assert torch.equal(ours.dense(num_tokens(used)), theirs.dense(num_tokens(used)))
        kept = step % (draft.tree.num_drafted + 1)  # none, some and all accepted
        bonus = int(torch.randint(0, VOCAB_SIZE, (1,), generator=generator))
        request.token_ids += [*draft.tree.tokens[1 : 1 + kept], bonus]


@pytest.mark.parametrize("method", SPECULATIVE)
def test_state_is_released(method: str) -> None:
    llm = tiny_llm(tiny_model(), method)
    llm.generate(PROMPTS, SamplingParams(max_tokens=8))
    drafter = drafter_of(llm)
    for name, value in vars(drafter).items():
        if isinstance(value, dict):
            assert not value, name
    assert not llm.engine.target._keys


@pytest.mark.parametrize("method", ["ngram", "ngram_table"])
def test_nothing_to_say_is_a_plain_step(method: str) -> None:
    drafter = drafter_of(tiny_llm(tiny_model(), method))
    (draft,) = drafter.propose([request_of([1, 2, 3, 4, 5])], [Budget(4, 4)])
    assert draft.tree.num_drafted == 0


def test_the_budget_is_cut_at_the_end() -> None:
    request = request_of([1, 2], SamplingParams(max_tokens=3))
    assert Fixed(5).budgets([request], 1) == [Budget(5, 2)]
    near_limit = request_of([1] * (CONTEXT - 1), SamplingParams(max_tokens=50))
    assert Fixed(5).budgets([near_limit], 1) == [Budget(5, 0)]


@pytest.mark.parametrize("method", ["none", *SPECULATIVE])
@pytest.mark.parametrize("length", [CONTEXT - 20, CONTEXT - 3, CONTEXT - 1])
def test_the_context_limit(method: str, length: int) -> None:
    """The output fills the context to the last token and not beyond."""
    prompt = [i % 7 for i in range(length)]
    llm = tiny_llm(tiny_model(), method, gamma=6)
    (output,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=None))
    assert len(output.token_ids) == CONTEXT - length
    assert output.finish_reason == "length"


def test_a_draft_model_with_a_shorter_context() -> None:
    """It stops drafting where its own context ends; the target goes on."""
    model = tiny_model()
    draft = tiny_model(seed=1, max_position_embeddings=32)
    config = {"method": "draft_model", "model": draft, "controller": "fixed"}
    params = SamplingParams(temperature=0, max_tokens=60)
    (output,) = LLM(model, speculative_config=config).generate([PROMPTS[0]], params)
    (plain,) = LLM(model).generate([PROMPTS[0]], params)
    assert output.token_ids == plain.token_ids
    assert 0 < output.metrics.num_drafts < output.metrics.target_passes


def test_a_perfect_draft_model_is_always_accepted() -> None:
    model = tiny_model()
    for params in (
        SamplingParams(temperature=0, max_tokens=25),
        SamplingParams(temperature=1.0, seed=2, top_p=0.9, max_tokens=25),
    ):
        for rule in ("coupled", "rejection", "block"):
            llm = tiny_llm(model, "draft_model", rule, gamma=4, model=model)
            (output,) = llm.generate([PROMPTS[0]], params)
            assert output.metrics.acceptance_rate == 1.0
            assert output.metrics.target_passes == 5
            assert output.metrics.mean_acceptance_length == 5.0
