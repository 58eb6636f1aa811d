"""Batch invariance (invariant 7 for the engine): a request's output does not depend on the others.

Requests of every kind come and go at random, their prompts are computed in chunks beside the
others' steps or come from the prefix cache, a small budget takes rows away again and again, each
request drafts in its own way and some are given up. The bits of those that end are the bits of the
same request by itself, without speculation.
"""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.heads import parallel_config, random_head, tiny_config, tiny_head
from tests.matrix import METHOD_FIELDS, ON_CHAINS, WITH_TOKENIZER
from tests.tiny import VOCAB_SIZE, tiny_model
from tokenleap import LLM, CompletionOutput, SamplingParams
from tokenleap.drafters.registry import METHODS
from tokenleap.engine.prefix_cache import BLOCK
from tokenleap.runtime.attention import KEY_BLOCK

CONTEXT = 2 * KEY_BLOCK
CHOICES = ("none", *(method for method in ON_CHAINS if method not in WITH_TOKENIZER))
BUDGETS = (None, 2, 3, 3, 5)
CHUNKS = (5, 64, 100, 512)
SEEDS = range(9)


@cache
def model_of(dtype: torch.dtype) -> PreTrainedModel:
    return tiny_model("lean", dtype=dtype, max_position_embeddings=CONTEXT)


@cache
def config_of(method: str, dtype: torch.dtype) -> dict[str, Any] | None:
    if method == "none":
        return None
    config: dict[str, Any] = {"method": method, **METHOD_FIELDS.get(method, {})}
    if CHOICES.index(method) % 2:  # some draft whatever the clock says
        config["controller"] = "fixed"
    if METHODS[method].takes_model:
        config["model"] = tiny_model("lean", seed=1, dtype=dtype, max_position_embeddings=CONTEXT)
    if METHODS[method].takes_head:
        long = {"max_position_embeddings": CONTEXT}
        if method in ("eagle", "hybrid"):
            config["model"] = random_head(tiny_config(**long))
        elif method == "parallel":
            config["model"] = random_head(parallel_config(**long))
        else:
            config["model"] = tiny_head(method)
    return config


def prompt_of(dice: random.Random) -> tuple[int, ...]:
    """Some share long beginnings, some end just before a key block does."""
    shared = random.Random(dice.randrange(2)).choices(range(VOCAB_SIZE), k=5 * BLOCK)
    begins = dice.choice((0, BLOCK, 3 * BLOCK - 5, 5 * BLOCK, 5 * BLOCK))
    before_the_end = [KEY_BLOCK - left - begins for left in (22, 17, 12)]
    own = dice.choice((1, 30, *before_the_end, KEY_BLOCK + 3 - begins))
    return (*shared[:begins], *dice.choices(range(VOCAB_SIZE), k=own))


def params_of(dice: random.Random) -> SamplingParams:
    shape = dice.choice(({"temperature": 0}, {"temperature": 0.9, "top_p": 0.95, "min_p": 0.01}))
    length = dice.choice((1, 20, 30))
    return SamplingParams(seed=dice.randrange(9), max_tokens=length, logprobs=1, **shape)


NATIVE = ()
ONE_SHAPE = (("runtime", "module"), ("batch_invariant", True), ("max_num_seqs", 3))


@cache
def alone(
    dtype: torch.dtype, prompt: tuple[int, ...], params: str, kind: tuple[Any, ...] = NATIVE
) -> Any:
    """A plain LLM that has never seen another request."""
    plain = _plain(dtype, kind)
    (output,) = plain.generate([list(prompt)], SamplingParams.model_validate_json(params))
    assert not plain.engine.target._keys
    return output.token_ids, output.logprobs


@cache
def _plain(dtype: torch.dtype, kind: tuple[Any, ...] = NATIVE) -> LLM:
    return LLM(model_of(dtype), enable_prefix_caching=False, **dict(kind))


def random_llm(dice: random.Random, dtype: torch.dtype, kind: tuple[Any, ...]) -> LLM:
    budget, cell_bytes = dice.choice(BUDGETS), _plain(dtype).engine.target.cell_bytes
    memory = None if budget is None else budget * KEY_BLOCK * cell_bytes
    fields: dict[str, Any] = {
        "speculative_config": config_of(dice.choice(CHOICES), dtype),
        "max_num_seqs": dice.choice((2, 3, 8, 16)),
        "max_num_batched_tokens": dice.choice(CHUNKS),
        "kv_cache_memory": memory,
        "enable_prefix_caching": dice.random() < 0.8,
        "prefix_cache_memory": dice.choice((2, 9, 100)) * BLOCK * cell_bytes,
    }
    return LLM(model_of(dtype), **{**fields, **dict(kind)})


def serve(llm: LLM, dice: random.Random, dtype: torch.dtype) -> list[tuple[Any, CompletionOutput]]:
    """Ten requests that come at random moments, a few of which are given up."""
    asked: dict[str, Any] = {}
    ended: list[tuple[Any, CompletionOutput]] = []
    while len(asked) < 10 or llm.engine.has_unfinished_requests():
        while len(asked) < 10 and dice.random() < 0.7:
            prompt, params = prompt_of(dice), params_of(dice)
            if len(prompt) + 30 < llm.max_model_len:
                config = config_of(dice.choice(CHOICES), dtype)
                asked[llm.engine.add_request(prompt, params, config)] = prompt, params
        if asked and dice.random() < 0.03:
            llm.engine.abort(dice.choice(list(asked)))
        for chunk in llm.engine.step():
            assert chunk.request_id is not None
            assert not chunk.finished or chunk.output is not None
            if chunk.output is not None:
                ended.append((asked[chunk.request_id], chunk.output))
    return ended


def checked(
    dtype: torch.dtype, seed: int, kind: tuple[Any, ...] = NATIVE
) -> list[CompletionOutput]:
    """The outputs of a schedule, which are those of the same requests by themselves."""
    dice = random.Random(seed)
    llm = random_llm(dice, dtype, kind)
    ended = serve(llm, dice, dtype)
    assert llm.bit_exact
    assert ended
    for (prompt, params), output in ended:
        assert output.metrics.drafter_failure is None
        given = params.model_dump_json(exclude={"structured_outputs"})
        expected = alone(dtype, prompt, given, kind)
        assert (output.token_ids, output.logprobs) == expected
    assert not llm.engine.target._keys
    assert not llm.engine._scheduler.busy
    return [output for _, output in ended]


def test_any_batch_any_schedule() -> None:
    """In which preemptions, prefixes from the cache and drafts do occur."""
    outputs = [output for seed in SEEDS for output in checked(torch.float32, seed)]
    assert sum(output.metrics.preemptions for output in outputs) > 0
    assert sum(output.metrics.cached_prompt_tokens for output in outputs) > 4 * BLOCK
    assert sum(output.metrics.num_accepted_tokens for output in outputs) > 3


@pytest.mark.parametrize(
    "seed",
    [*SEEDS[:3], *(pytest.param(seed, marks=pytest.mark.slow) for seed in SEEDS[3:])],
)
def test_in_bfloat16(seed: int) -> None:
    checked(torch.bfloat16, seed)


@pytest.mark.parametrize("seed", SEEDS[:2])
def test_any_schedule_in_passes_of_one_shape(seed: int) -> None:
    """In memory for one bucket of three sequences, which draft models share."""
    cell_bytes = _plain(torch.float32).engine.target.cell_bytes
    memory = 3 * (CONTEXT + KEY_BLOCK) * cell_bytes
    checked(torch.float32, seed, (*ONE_SHAPE, ("kv_cache_memory", memory)))
