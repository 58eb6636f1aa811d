"""Heads of every kind in an engine: what they draft in any schedule, and what they forget."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.drafting import drafter_of
from tests.heads import (
    STATE_NETS,
    parallel_config,
    save_head,
    state_config,
    state_net,
    tiny_config,
    tiny_net,
)
from tests.tiny import VOCAB_SIZE, tiny_model
from tokenleap import LLM, CompletionOutput, SamplingParams
from tokenleap.core.tree import TokenTree
from tokenleap.runtime.target import Target

STATE = list(STATE_NETS)
METHODS = ["eagle", "parallel", *STATE]
PROMPTS = [[3, 5, 7, 3, 5], [11, 4], list(range(1, 40)), [8, 8, 8], [1], [2, 2]]
CELL_BYTES = {"eagle": 2 * 32 * 4, "parallel": 2 * 2 * 32 * 4}
"""Of a token in the head's own KV."""


def served(method: str, model: PreTrainedModel, folder: Path, **fields: Any) -> dict[str, Any]:
    """A configuration with a random head over a model."""
    if method in STATE:
        save_head(folder, state_net(method, state_config(method, **fields), model))
    else:
        kind = parallel_config if method == "parallel" else tiny_config
        save_head(folder, tiny_net(kind(**fields), model))
    return {"method": method, "model": str(folder), "controller": "fixed"}


def shaped(tree: Any) -> dict[str, Any]:
    return {} if tree is None else {"tree": tree}


def drafts(output: Any) -> list[tuple[int, ...]]:
    """Drafted tokens of each step that drafted any."""
    return [step.drafted for step in output.trace if step.drafted]


TREES = (None, [2, 2, 1], "dynamic")


def is_quick(method: str, runtime: str, tree: Any) -> bool:
    if runtime == "torch":  # only the native runtime promises the bits of trees
        return method == "eagle" and tree is None
    return method not in STATE or tree != [2, 2, 1]


@pytest.mark.parametrize(
    ("method", "runtime", "tree"),
    [
        pytest.param(*case, marks=() if is_quick(*case) else pytest.mark.slow)
        for case in product(METHODS, ("native", "torch"), TREES)
    ],
    ids=str,
)
def test_drafts_do_not_depend_on_the_schedule(
    method: str, runtime: str, tree: Any, tmp_path: Path
) -> None:
    """Alone, in a batch with little memory, and in chunks: the same drafts (invariant 4)."""
    model = tiny_model(head_dim=32, max_position_embeddings=1024)
    config = served(method, model, tmp_path, draft_vocab_size=VOCAB_SIZE) | shaped(tree)
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=10)
    fields: dict[str, Any] = {"speculative_config": config, "runtime": runtime}
    alone = LLM(model, max_num_seqs=1, **fields).generate(PROMPTS, params)
    memory = 3 * 512 * (Target(model).cell_bytes + CELL_BYTES.get(method, 0))
    tight = LLM(model, max_num_batched_tokens=7, kv_cache_memory=memory, **fields)
    together = tight.generate(PROMPTS, params)
    if runtime == "native" or tree is None:
        for one, other in zip(alone, together, strict=True):
            assert other.token_ids == one.token_ids
            assert other.metrics.drafter_failure is None
            if other.metrics.preemptions == 0:
                assert drafts(other) == drafts(one)
    assert sum(output.metrics.num_draft_tokens for output in together) > 80


@pytest.mark.parametrize("method", METHODS)
def test_a_preempted_request_goes_on_drafting(method: str, tmp_path: Path) -> None:
    """Its states were kept in steps, and are shown again outside of a step."""
    model = tiny_model(head_dim=32, max_position_embeddings=1024)
    engine = LLM(model, speculative_config=served(method, model, tmp_path)).engine
    for _ in range(2):
        engine.add_request([1], SamplingParams(temperature=0, max_tokens=60))
    for _ in range(15):
        engine.step()
    scheduler = engine._scheduler
    scheduler._preempt(scheduler._running[-1])
    outputs: list[CompletionOutput] = []
    while len(outputs) < 2:
        outputs += [chunk.output for chunk in engine.step() if chunk.output is not None]
    assert max(output.metrics.preemptions for output in outputs) == 1
    for output in outputs:
        assert output.metrics.drafter_failure is None
        assert all(step.drafted for step in output.trace.steps[1:-1])


@pytest.mark.parametrize("method", METHODS)
def test_a_text_of_one_token_has_no_state_to_draft_from(method: str, tmp_path: Path) -> None:
    model = tiny_model(head_dim=32)
    llm = LLM(model, speculative_config=served(method, model, tmp_path))
    (output,) = llm.generate([[1]], SamplingParams(temperature=0, max_tokens=6))
    assert next(iter(output.trace)).drafted == ()
    assert output.metrics.num_drafts > 0
    assert output.metrics.drafter_failure is None


@pytest.mark.parametrize("method", METHODS)
def test_penalties_and_masks_hold_for_the_tokens_of_the_draft_vocabulary(
    method: str, tmp_path: Path
) -> None:
    """Only even tokens can be drafted; of these only the allowed ones are."""
    model = tiny_model(head_dim=32)
    llm = LLM(model, speculative_config=served(method, model, tmp_path))
    for allowed, some in (([4, 6, 9], True), ([3, 5], False)):
        params = SamplingParams(allowed_token_ids=allowed, seed=1, max_tokens=30)
        (output,) = llm.generate([[1, 2, 3]], params)
        drafted = {token for step in output.trace for token in step.drafted}
        assert drafted <= set(allowed)
        assert bool(drafted) == some


@pytest.mark.parametrize("method", METHODS)
def test_a_nan_does_not_outlive_its_request(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(head_dim=32)
    llm = LLM(model, speculative_config=served(method, model, tmp_path), runtime="torch")
    head: Any = drafter_of(llm)
    keep = head.scorer.keep

    def poisoned(request: Any, start: int, hidden: dict[int, torch.Tensor]) -> None:
        keep(request, start, {layer: states * torch.nan for layer, states in hidden.items()})

    params = SamplingParams(temperature=0.8, seed=1, max_tokens=20)
    with monkeypatch.context() as patched:
        patched.setattr(head.scorer, "keep", poisoned)
        (output,) = llm.generate([PROMPTS[2]], params)
    assert output.metrics.drafter_failure is not None
    (next_one,) = llm.generate([PROMPTS[0]], params)
    assert next_one.metrics.drafter_failure is None
    assert next_one.metrics.num_drafts > 0


@pytest.mark.parametrize("method", METHODS[1:])
@pytest.mark.parametrize("tree", [None, [2, 1, 1, 1, 1], "dynamic"], ids=str)
def test_drafts_are_no_deeper_than_was_learnt(method: str, tree: Any, tmp_path: Path) -> None:
    model = tiny_model()
    learnt = {"depths" if method == "parallel" else "num_heads": 2}
    config = served(method, model, tmp_path, **learnt) | {"num_speculative_tokens": 9}
    llm = LLM(model, speculative_config=config | shaped(tree))
    for temperature in (0, 1):
        params = SamplingParams(temperature=temperature, seed=1, max_tokens=10)
        (output,) = llm.generate([[1, 2, 3]], params)
        depths = {
            TokenTree((0, *s.drafted), (-1, *(p + 1 for p in s.parents))).depths[-1]
            for s in output.trace
        }
        assert max(depths) == 2
        assert output.metrics.drafter_failure is None


@pytest.mark.parametrize("method", STATE)
@pytest.mark.parametrize("outer", ["cascade", "ensemble"])
def test_inside_another_drafter(outer: str, method: str, tmp_path: Path) -> None:
    """In a cascade its tokens are taken back again and again; those that stay have states."""
    model, middle = tiny_model(), tiny_model(seed=1)
    inner = served(method, middle if outer == "cascade" else model, tmp_path)
    del inner["controller"]
    fields: dict[str, dict[str, Any]] = {
        "cascade": {"model": middle, "drafter": inner},
        "ensemble": {"drafters": [inner, {"method": "ngram", "prompt_lookup_min": 1}]},
    }
    config = {"method": outer, "controller": "fixed", **fields[outer]}
    params = SamplingParams(temperature=0, max_tokens=24)
    (output,) = LLM(model, speculative_config=config).generate([PROMPTS[0]], params)
    (plain,) = LLM(model).generate([PROMPTS[0]], params)
    assert output.token_ids == plain.token_ids
    assert output.metrics.drafter_failure is None
    assert output.metrics.num_drafts == output.metrics.target_passes - 1


@pytest.mark.parametrize("method", STATE)
def test_a_cached_prefix_brings_its_states(method: str, tmp_path: Path) -> None:
    """The prompt's last tokens come from the prefix cache, and the first step drafts."""
    model = tiny_model()
    llm = LLM(model, speculative_config=served(method, model, tmp_path))
    prompt = [i % 7 for i in range(64)] + [9]
    params = SamplingParams(temperature=0, max_tokens=8)
    (first,), (again,) = (llm.generate([prompt], params) for _ in range(2))
    assert again.metrics.cached_prompt_tokens == 64
    assert [step.drafted for step in again.trace] == [step.drafted for step in first.trace]
    assert next(iter(again.trace)).drafted


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("method", STATE)
def test_a_quantized_target(method: str, quantization: str, tmp_path: Path) -> None:
    """The head itself is not quantized."""
    model = tiny_model(dtype=torch.bfloat16, head_dim=32)
    params = SamplingParams(seed=3, max_tokens=20)
    config = served(method, model, tmp_path)
    llm = LLM(model, quantization=quantization, speculative_config=config)
    (output,) = llm.generate([PROMPTS[0]], params)
    (plain,) = llm.generate([PROMPTS[0]], params, speculative_config={"method": "none"})
    assert output.token_ids == plain.token_ids
    assert output.metrics.drafter_failure is None
