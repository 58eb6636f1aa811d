"""Engines in tests: run to the end, compare with requests that run alone, find nothing left."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from transformers import PreTrainedModel

from tokenleap import LLM, CompletionOutput, LLMEngine, RequestOutput, SamplingParams

__all__ = ["GREEDY", "alone", "assert_empty", "bits", "run", "run_all"]

GREEDY = SamplingParams(temperature=0, max_tokens=12, logprobs=1)


def alone(model: PreTrainedModel, prompt: Sequence[int], params: SamplingParams = GREEDY) -> Any:
    """Tokens and logprobs of a request that has no neighbours and no drafts."""
    (output,) = _plain(model).generate([prompt], params)
    return output.token_ids, output.logprobs


@lru_cache(maxsize=4)
def _plain(model: PreTrainedModel) -> LLM:
    return LLM(model, enable_prefix_caching=False)


def bits(output: RequestOutput | CompletionOutput) -> Any:
    """Values that must not depend on neighbours: compare with `alone`."""
    return output.token_ids, output.logprobs


def run_all(engine: LLMEngine) -> dict[tuple[str, int], CompletionOutput]:
    """Outputs by id and index; the last chunk of each comes once, and no token is lost."""
    finished: dict[tuple[str, int], CompletionOutput] = {}
    tokens: dict[tuple[str, int], list[int]] = {}
    while engine.has_unfinished_requests():
        for chunk in engine.step():
            assert chunk.request_id is not None
            place = chunk.request_id, chunk.index
            assert place not in finished
            tokens.setdefault(place, []).extend(token.token_id for token in chunk.tokens)
            if chunk.output is not None:
                finished[place] = chunk.output
    for place, output in finished.items():
        assert output.finish_reason is not None
        count = len(tokens[place])  # some may have been reported before
        assert list(output.token_ids[len(output.token_ids) - count :]) == tokens[place]
    return finished


def run(engine: LLMEngine) -> dict[str, CompletionOutput]:
    """The same for requests of one output each, by id."""
    finished = run_all(engine)
    assert all(index == 0 for _, index in finished)
    return {request_id: output for (request_id, _), output in finished.items()}


def assert_empty(llm: LLM) -> None:
    """No row, no request, no drafter's or controller's state of a request."""
    engine = llm.engine
    assert not engine.target._keys
    assert not engine.target._slab.lengths
    assert not engine._scheduler.busy
    assert not engine._scheduler._prompts._hidden
    assert not engine._speculation._assigned
    assert not engine._speculation._guard.failed
    assert not engine.has_unfinished_requests()
    for strategy in (engine._speculation.default, *engine.strategies.kept()):
        owner = strategy.drafter
        for name, value in vars(owner).items():
            assert not (isinstance(value, dict) and value), (owner, name)
