"""Greedy output is plain decoding's and Transformers' own, for every drafter, rule and tree."""

from __future__ import annotations

from functools import cache

import pytest
from transformers import PreTrainedModel

from tests.drafting import RandomTrees, Scripted, scheduler_of
from tests.matrix import (
    BRANCHING,
    FROM_TEXT,
    LOSSLESS,
    PROMPTS,
    SPECULATIVE,
    fits,
    takes_any_tree,
    tiny_llm,
)
from tests.tiny import ARCHITECTURES, CONTEXT, VOCAB_SIZE, reference_greedy, tiny_model
from tokenleap import LLM, SamplingParams
from tokenleap.request import Request
from tokenleap.runtime.target import Target

TOKENS = 15
GREEDY = SamplingParams(temperature=0, max_tokens=TOKENS)
# They run parts of the target, read its hidden states, or make trees of other tokens. For chains,
# `test_bits.py` has `ngram`.
ON_ALL_ARCHITECTURES = ("draft_model", "early_exit", "layer_skip", "eagle", "lookahead")
# Lossy rules that are lossless at temperature 0 belong here too.
GREEDY_RULES = [*LOSSLESS, "typical"]


@pytest.fixture(scope="module", params=list(ARCHITECTURES))
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return tiny_model(request.param)


@pytest.fixture(scope="module")
def expected(model: PreTrainedModel) -> list[tuple[int, ...]]:
    return expected_of(model)


def expected_of(model: PreTrainedModel) -> list[tuple[int, ...]]:
    """Transformers' outputs."""
    return [tuple(reference_greedy(model, prompt, TOKENS)) for prompt in PROMPTS]


@cache
def llama() -> tuple[PreTrainedModel, list[tuple[int, ...]]]:
    model = tiny_model()
    return model, expected_of(model)


def token_ids(llm: LLM) -> list[tuple[int, ...]]:
    return [output.token_ids for output in llm.generate(PROMPTS, GREEDY)]


def test_plain_decoding(model: PreTrainedModel, expected: list[tuple[int, ...]]) -> None:
    assert token_ids(tiny_llm(model)) == expected


def is_quick(architecture: str, method: str) -> bool:
    """All drafters on one architecture of the Transformers module, a few of them on all others.

    `test_every_rule` has all of them on Llama.
    """
    if architecture == "gpt2":
        return method not in FROM_TEXT
    if architecture == "lean" and method in BRANCHING:  # `test_bits.py` has the others
        return True
    return architecture != "llama" and method in ON_ALL_ARCHITECTURES


@pytest.mark.parametrize(
    ("model", "method"),
    [
        pytest.param(name, method, marks=() if is_quick(name, method) else pytest.mark.slow)
        for name in ARCHITECTURES
        for method in SPECULATIVE
    ],
    indirect=["model"],
)
def test_every_drafter(
    model: PreTrainedModel, expected: list[tuple[int, ...]], method: str
) -> None:
    assert token_ids(tiny_llm(model, method)) == expected


@pytest.mark.parametrize(
    ("method", "rule"), [(m, r) for m in SPECULATIVE for r in GREEDY_RULES if fits(m, r)]
)
def test_every_rule(method: str, rule: str) -> None:
    """Rules see neither model nor logits: one architecture will do."""
    model, expected = llama()
    assert token_ids(tiny_llm(model, method, rule)) == expected


def test_the_matrix_accepts_something(model: PreTrainedModel) -> None:
    """Otherwise the tests above would say little."""
    llm = tiny_llm(model, "ngram")
    assert sum(o.metrics.num_accepted_tokens for o in llm.generate(PROMPTS, GREEDY)) > 0


def run(
    target: Target, drafter: Scripted, rule: str, gamma: int, prompts: list[list[int]]
) -> list[Request]:
    """Generate with a test drafter, which no method name stands for."""
    scheduler = scheduler_of(target, drafter, rule, gamma)
    requests = [
        Request(prompt, GREEDY, vocab_size=VOCAB_SIZE, max_model_len=CONTEXT) for prompt in prompts
    ]
    for request in requests:
        scheduler.add(request)
    while scheduler.busy:
        scheduler.step()
    return requests


@pytest.mark.parametrize("rule", [name for name in GREEDY_RULES if takes_any_tree(name)])
@pytest.mark.parametrize("nodes", [2, 7, 24])
def test_random_trees(
    model: PreTrainedModel, expected: list[tuple[int, ...]], rule: str, nodes: int
) -> None:
    of_prompt = {tuple(prompt): out for prompt, out in zip(PROMPTS, expected, strict=True)}
    drafter = RandomTrees(lambda r: of_prompt[r.prompt_ids], VOCAB_SIZE, wrong=5)
    requests = run(Target(model), drafter, rule, nodes, PROMPTS)
    assert [tuple(r.output_ids) for r in requests] == expected
    assert sum(r.metrics.num_accepted_tokens for r in requests) > len(PROMPTS) * 3


@pytest.mark.parametrize("wrong", [0, 1, 3])
def test_known_continuations(
    model: PreTrainedModel, expected: list[tuple[int, ...]], wrong: int
) -> None:
    """Everything accepted, nothing accepted, and a mixture."""
    of_prompt = {tuple(prompt): out for prompt, out in zip(PROMPTS, expected, strict=True)}
    drafter = Scripted(lambda r: of_prompt[r.prompt_ids], VOCAB_SIZE, wrong=wrong)
    requests = run(Target(model), drafter, "rejection", 4, PROMPTS)
    assert [tuple(r.output_ids) for r in requests] == expected
    accepted = sum(r.metrics.num_accepted_tokens for r in requests)
    passes = sum(r.metrics.target_passes for r in requests)
    assert accepted + passes == len(PROMPTS) * TOKENS
    if wrong == 0:
        assert passes == len(PROMPTS) * TOKENS / 5
    if wrong == 1:
        assert accepted == 0
