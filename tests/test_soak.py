"""Many requests with random ends: nothing of them stays behind."""

from __future__ import annotations

import gc
import random
from typing import Any
from weakref import WeakSet

import pytest
import torch

from tests.engine.serving import assert_empty
from tests.matrix import METHOD_FIELDS
from tests.tiny import VOCAB_SIZE, tiny_model
from tokenleap import LLM, SamplingParams
from tokenleap.drafters.base import Drafter
from tokenleap.engine.prefix_cache import BLOCK
from tokenleap.request import Request
from tokenleap.runtime.attention import KEY_BLOCK
from tokenleap.runtime.target import Target

METHODS = ("ngram", "ngram_table", "random", "early_exit", "switch", "draft_model")
BLOCKS, PREFIX_BLOCKS = 4, 12


def soaked(seed: int) -> LLM:
    model = tiny_model("lean", max_position_embeddings=2 * KEY_BLOCK)
    cell_bytes = Target(model).cell_bytes
    return LLM(
        model,
        speculative_config={"method": "ngram", "prompt_lookup_min": 1, "controller": "fixed"},
        max_num_seqs=6,
        max_num_batched_tokens=random.Random(seed).choice((40, 200)),
        kv_cache_memory=BLOCKS * KEY_BLOCK * cell_bytes,
        prefix_cache_memory=PREFIX_BLOCKS * BLOCK * cell_bytes,
    )


def configs() -> list[dict[str, Any] | None]:
    """Built once: a draft model is part of a configuration."""
    made: list[dict[str, Any] | None] = [None]
    for method in METHODS:
        made.append({"method": method, "controller": "fixed", **METHOD_FIELDS.get(method, {})})
    made[-1] = {
        **(made[-1] or {}),
        "model": tiny_model("lean", seed=1, max_position_embeddings=2 * KEY_BLOCK),
    }
    return made


def prompt_of(dice: random.Random) -> list[int]:
    shared = random.Random(dice.randrange(4)).choices(range(VOCAB_SIZE), k=2 * BLOCK)
    own = dice.choice((1, 3, 20, 20, 20, KEY_BLOCK - 8 - 2 * BLOCK))
    return [*(shared if own > 1 else ()), *dice.choices(range(VOCAB_SIZE), k=own)]


def params_of(dice: random.Random) -> SamplingParams:
    lengths = (1, 2, 8, 16)
    n = 2 if dice.random() < 0.1 else 1
    return SamplingParams(seed=dice.randrange(99), max_tokens=dice.choice(lengths), n=n)


def live_tensors() -> int:
    """How many the process holds."""
    gc.collect()
    return sum(issubclass(type(item), torch.Tensor) for item in gc.get_objects())


def states_of(owner: object, seen: set[int]) -> list[tuple[str, object]]:
    """States by request of drafters, and of the drafters and scorers inside them."""
    if id(owner) in seen or not type(owner).__module__.startswith("tokenleap.drafters"):
        return []
    seen.add(id(owner))
    found: list[tuple[str, object]] = []
    for name, value in vars(owner).items():
        if isinstance(value, dict) and value:
            found.append((f"{type(owner).__name__}.{name}", value))
        inner = value if isinstance(value, list) else [value]
        for item in inner:
            if isinstance(item, Target) and item._keys:
                found.append((f"{type(owner).__name__}.{name}", item._keys))
            elif hasattr(item, "__dict__"):
                found += states_of(item, seen)
    return found


@pytest.mark.parametrize(
    "requests", [80, pytest.param(2000, marks=pytest.mark.slow)], ids=["small", "whole"]
)
def test_nothing_stays_behind(requests: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts have one length and the dice a seed, so that every run has the same preemptions."""
    alive: WeakSet[Request] = WeakSet()
    original = Request.__init__

    def tracked(self: Request, *args: Any, **fields: Any) -> None:
        original(self, *args, **fields)
        alive.add(self)

    monkeypatch.setattr(Request, "__init__", tracked)
    dice = random.Random(requests)
    llm, choices = soaked(requests), configs()
    counts: list[int] = []
    open_ids: list[str] = []
    preemptions = cached = added = 0
    while added < requests or llm.engine.has_unfinished_requests():
        if added < requests and len(open_ids) < 20:
            open_ids.append(
                llm.engine.add_request(
                    prompt_of(dice), params_of(dice), choices[added % len(choices)]
                )
            )
            added += 1
            if added % (requests // 4) == 0:
                counts.append(live_tensors())
        if open_ids and dice.random() < 0.1:
            llm.engine.abort(open_ids.pop(dice.randrange(len(open_ids))))
        if dice.random() < 0.8:
            for chunk in llm.engine.step():
                if chunk.output is not None:
                    assert chunk.request_id is not None
                    ended = chunk.request_id not in llm.engine._added.jobs  # its last output
                    if ended and chunk.request_id in open_ids:
                        open_ids.remove(chunk.request_id)
                    assert chunk.output.error is None
                    preemptions += chunk.output.metrics.preemptions
                    cached += chunk.output.metrics.cached_prompt_tokens
                    assert chunk.output.metrics.drafter_failure is None
        slab = llm.engine.target._slab
        assert slab.cells <= BLOCKS * KEY_BLOCK
        assert len(slab.lengths) == len(llm.engine.target._keys) <= 6
        assert len(llm.engine._scheduler._prefixes or ()) <= PREFIX_BLOCKS
    assert preemptions > 0
    assert cached > 0
    assert_empty(llm)
    drafters: list[Drafter] = [
        llm.engine._speculation.default.drafter,
        *(each.drafter for each in llm.engine.strategies.kept()),
    ]
    assert len(drafters) == len(METHODS)  # the first is the default
    assert not [state for drafter in drafters for state in states_of(drafter, set())]
    gc.collect()
    assert not list(alive)
    assert live_tensors() <= min(counts)  # which were taken while up to 20 were open
