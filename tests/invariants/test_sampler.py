"""Invariant 6: p at every node is what the request's parameters make of the logits on that path."""

from __future__ import annotations

import math
from functools import cache, partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tests.matrix import PROMPTS, SPECULATIVE, tiny_llm
from tests.tiny import tiny_model
from tokenleap import LLM, SamplingParams
from tokenleap.core.sampler import Sampler, TreeDistributions
from tokenleap.core.tree import TokenTree

V = 24


def logits_of(seed: int, rows: int = 1) -> Tensor:
    return 2 * torch.randn(rows, V, generator=torch.Generator().manual_seed(seed))


def dense(params: SamplingParams, logits: Tensor, output: list[int], prompt: list[int]) -> Tensor:
    return Sampler(params, V, prompt, [0]).distribution(logits, output).dense(V)


parameters = st.fixed_dictionaries(
    {
        "temperature": st.floats(0.1, 2.0),
        "top_k": st.integers(0, V + 3),
        "top_p": st.floats(0.05, 1.0),
        "repetition_penalty": st.floats(0.5, 2.0),
    }
)


@settings(max_examples=150, deadline=None)
@given(fields=parameters, seed=st.integers(0, 10**6), output=st.lists(st.integers(0, V - 1)))
def test_against_transformers(fields: dict[str, Any], seed: int, output: list[int]) -> None:
    """The same distribution as Transformers' processors, in the order they have in common."""
    logits, prompt = logits_of(seed)[0], [3, 3, 7]
    processors = LogitsProcessorList(
        [
            RepetitionPenaltyLogitsProcessor(fields["repetition_penalty"]),
            TemperatureLogitsWarper(fields["temperature"]),
        ]
    )
    if fields["top_k"] > 0:
        processors.append(TopKLogitsWarper(fields["top_k"]))
    if fields["top_p"] < 1:
        processors.append(TopPLogitsWarper(fields["top_p"]))
    scores = torch.FloatTensor(logits[None].clone())
    expected = processors(torch.LongTensor([[*prompt, *output]]), scores).softmax(-1)[0]
    ours = dense(SamplingParams(**fields), logits, output, prompt)
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-4)


@settings(max_examples=60, deadline=None)
@given(min_p=st.floats(0.01, 1.0), temperature=st.floats(0.2, 2), seed=st.integers(0, 10**6))
def test_min_p_against_transformers(min_p: float, temperature: float, seed: int) -> None:
    logits = logits_of(seed)[0] / temperature
    expected = MinPLogitsWarper(min_p)(
        torch.LongTensor([[1]]), torch.FloatTensor(logits[None])
    ).softmax(-1)[0]
    params = SamplingParams(min_p=min_p, temperature=temperature)
    ours = dense(params, logits_of(seed)[0], [], [1])
    torch.testing.assert_close(ours, expected, atol=1e-6, rtol=1e-4)


def test_presence_and_frequency_count_the_output_only() -> None:
    """logit - presence * (count > 0) - frequency * count."""
    logits, output = logits_of(1)[0], [5, 5, 5, 9]
    params = SamplingParams(presence_penalty=0.7, frequency_penalty=0.2)
    expected = logits.clone()
    expected[5] -= 0.7 + 3 * 0.2
    expected[9] -= 0.7 + 0.2
    torch.testing.assert_close(dense(params, logits, output, [7, 7]), expected.softmax(-1))


def test_bias_and_allowed_tokens() -> None:
    logits = logits_of(2)[0]
    params = SamplingParams(logit_bias={4: 3.0, 6: -100.0}, allowed_token_ids=[4, 5, 6])
    distribution = dense(params, logits, [], [1])
    assert set(distribution.nonzero().flatten().tolist()) <= {4, 5, 6}
    ratio = math.log(float(distribution[4] / distribution[5]))
    assert ratio == pytest.approx(float(logits[4] - logits[5]) + 3, abs=1e-4)
    assert float(distribution[6]) < 1e-30


def test_no_end_before_min_tokens() -> None:
    logits = torch.zeros(V)
    for ignores in (False, True):
        params = SamplingParams(min_tokens=2, stop_token_ids=[7], ignore_eos=ignores)
        for length in range(4):
            distribution = dense(params, logits, [1] * length, [1])
            assert (float(distribution[0]) == 0 and float(distribution[7]) == 0) == (length < 2)


def test_temperature_0_is_one_hot_after_penalties() -> None:
    logits = torch.zeros(V)
    logits[3], logits[4] = 2.0, 1.5
    params = SamplingParams(temperature=0, presence_penalty=1.0)
    assert Sampler(params, V, [1]).distribution(logits, []).certain == 3
    assert Sampler(params, V, [1]).distribution(logits, [3]).certain == 4


def test_penalties_see_the_path_above_the_node() -> None:
    """Two branches of one tree get different distributions from the same logits."""
    tree = TokenTree((1, 5, 9, 5), (-1, 0, 0, 1))  # 1-5-5 and 1-9
    logits = logits_of(3).expand(4, V)
    sampler = Sampler(SamplingParams(frequency_penalty=1.0), V, [2, 1])
    distributions = TreeDistributions(logits, tree, sampler, output_ids=[1])
    paths = {0: [1], 1: [1, 5], 2: [1, 9], 3: [1, 5, 5]}
    for node, output in paths.items():
        expected = sampler.distribution(logits[node], output).dense(V)
        assert torch.equal(distributions[node].dense(V), expected)
    assert not torch.equal(distributions[1].dense(V), distributions[2].dense(V))


@settings(max_examples=50, deadline=None)
@given(fields=parameters, seed=st.integers(0, 10**6))
def test_a_distribution_sums_to_1_and_is_sorted(fields: dict[str, Any], seed: int) -> None:
    distribution = Sampler(SamplingParams(**fields), V, [1]).distribution(
        logits_of(seed)[0], [1, 2]
    )
    assert float(distribution.probs.sum()) == pytest.approx(1, abs=1e-5)
    assert (distribution.probs > 0).all()
    assert (distribution.tokens.diff() > 0).all()


@cache
def llm_of(method: str) -> LLM:
    return tiny_llm(tiny_model(), method, gamma=6)


FIELDS: list[dict[str, Any]] = [
    {"frequency_penalty": 1.5},
    {"presence_penalty": 2.0},
    {"repetition_penalty": 1.8},
    {"logit_bias": {5: 4.0}, "repetition_penalty": 1.2},
    {"allowed_token_ids": [3, 5, 7, 9], "frequency_penalty": 0.3},
    {"min_tokens": 9, "stop_token_ids": [3, 5, 7]},
]


def outputs_with_fields(
    method: str, temperature: float, shift: int
) -> list[tuple[tuple[int, ...], str | None]]:
    """Tokens and reasons of a request with each of `FIELDS`, all in one batch."""
    params = [
        SamplingParams(temperature=temperature, max_tokens=15, seed=3, **fields)
        for fields in FIELDS
    ]
    prompts = [PROMPTS[(number + shift) % len(PROMPTS)] for number in range(len(FIELDS))]
    outputs = llm_of(method).generate(prompts, params)
    return [(output.token_ids, output.finish_reason) for output in outputs]


plain_outputs = cache(partial(outputs_with_fields, "none"))


@pytest.mark.parametrize("method", SPECULATIVE)
@pytest.mark.parametrize("temperature", [0, 0.9])
@pytest.mark.parametrize(
    "shift", [0, *(pytest.param(shift, marks=pytest.mark.slow) for shift in (1, 2, 3, 4))]
)
def test_parameters_at_depth(method: str, temperature: float, shift: int) -> None:
    """Drafted positions obey them exactly: the output is plain decoding's."""
    assert outputs_with_fields(method, temperature, shift) == plain_outputs(temperature, shift)
