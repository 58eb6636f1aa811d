"""Helpers of the tests of all heads: runs of an engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedModel

from tokenleap import LLM, SamplingParams
from tokenleap.outputs import CompletionOutput
from tokenleap.runtime.target import Target

PROMPTS = [[3, 5, 7, 3, 5], [11, 4], list(range(1, 40)), [8, 8, 8], [1], [2, 2]]


def drafts(output: Any) -> list[tuple[int, ...]]:
    """Drafted tokens of each step that drafted any."""
    return [step.drafted for step in output.trace if step.drafted]


def check_schedules(
    model: PreTrainedModel, config: Mapping[str, Any], runtime: str, *, cell_bytes: int, trees: bool
) -> None:
    """Alone, in a batch, in chunks, and after preemption: the same drafts (invariant 4).

    Args:
        model: the target; its context is longer than the prompts and outputs.
        config: the `speculative_config`.
        runtime: of the engine.
        cell_bytes: of a token in the KV of the head.
        trees: whether trees are drafted, whose bits do not stay the same on every runtime.
    """
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=24)
    fields: dict[str, Any] = {"speculative_config": config, "runtime": runtime}
    alone = LLM(model, max_num_seqs=1, **fields).generate(PROMPTS, params)
    memory = 3 * 512 * (Target(model).cell_bytes + cell_bytes)
    tight = LLM(model, max_num_batched_tokens=7, kv_cache_memory=memory, **fields)
    together = tight.generate(PROMPTS, params)
    if runtime == "native" or not trees:
        for one, other in zip(alone, together, strict=True):
            assert other.token_ids == one.token_ids
            assert other.metrics.drafter_failure is None
            if other.metrics.preemptions == 0:
                assert drafts(other) == drafts(one)
    assert sum(o.metrics.num_draft_tokens for o in together) > 100


def preempted(llm: LLM) -> list[CompletionOutput]:
    """Two requests of one token; one of them loses its row in the middle and gets it again."""
    engine, params = llm.engine, SamplingParams(temperature=0, max_tokens=150)
    for _ in range(2):
        engine.add_request([1], params)
    for _ in range(40):
        engine.step()
    scheduler = engine._scheduler
    scheduler._preempt(scheduler._running[-1])
    outputs: list[CompletionOutput] = []
    while len(outputs) < 2:
        outputs += [chunk.output for chunk in engine.step() if chunk.output is not None]
    assert max(output.metrics.preemptions for output in outputs) == 1
    for output in outputs:
        assert output.metrics.drafter_failure is None
    return outputs
