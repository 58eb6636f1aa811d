"""Streams of several prompts and outputs: the outputs of `generate` in pieces, and nothing left."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from transformers import PreTrainedModel

from tests.engine.serving import assert_empty, bits
from tests.matrix import METHOD_FIELDS, PROMPTS
from tests.tiny import tiny_model, tiny_tokenizer
from tokenleap import LLM, ConfigError, RequestError, SamplingParams, StreamChunk
from tokenleap.core.acceptance import RULES

SEVERAL = SamplingParams(n=3, seed=1, max_tokens=9, logprobs=2)
GREEDY = SamplingParams(temperature=0, max_tokens=14, logprobs=1)


@cache
def model() -> PreTrainedModel:
    return tiny_model()


def llm_of(**fields: Any) -> LLM:
    config = {"method": "ngram", **METHOD_FIELDS["ngram"], "controller": "fixed"}
    return LLM(model(), tokenizer=tiny_tokenizer(), speculative_config=config, **fields)


def by_output(chunks: list[StreamChunk]) -> dict[tuple[int, int], list[StreamChunk]]:
    found: dict[tuple[int, int], list[StreamChunk]] = {}
    for chunk in chunks:
        found.setdefault((chunk.prompt_index, chunk.index), []).append(chunk)
    return found


def assert_whole(chunks: list[StreamChunk], results: list[Any]) -> None:
    """The pieces of each output make the output that `generate` returns."""
    found = by_output(chunks)
    assert set(found) == {(i, each.index) for i, r in enumerate(results) for each in r.outputs}
    for (prompt, index), pieces in found.items():
        whole = results[prompt].outputs[index]
        assert [piece.finished for piece in pieces] == [*[False] * (len(pieces) - 1), True]
        last = pieces[-1].output
        assert last is not None
        assert bits(last) == bits(whole)
        assert (last.text, last.finish_reason) == (whole.text, whole.finish_reason)
        assert last.index == index
        assert "".join(piece.text for piece in pieces) == whole.text
        assert tuple(t for piece in pieces for t in piece.tokens) == whole.tokens
        assert [each for piece in pieces for each in piece.logprobs or ()] == whole.logprobs
        assert {piece.request_id for piece in pieces} == {None}


@pytest.mark.parametrize("max_num_seqs", [2, 16])
def test_the_pieces_are_those_of_generate(max_num_seqs: int) -> None:
    llm = llm_of(max_num_seqs=max_num_seqs)
    each = [SEVERAL, GREEDY, SEVERAL, GREEDY.model_copy(update={"stop": ("e",)}), SEVERAL]
    results = llm.generate(PROMPTS, each)
    assert_whole(list(llm.stream(PROMPTS, each)), results)
    assert_empty(llm)


def test_the_forms_of_arguments_are_those_of_generate() -> None:
    llm = llm_of()
    for prompts in ("one", ["one"], [1, 2, 3], [[1, 2, 3], "two"], {"prompt": "one"}, []):
        given: Any = prompts
        assert_whole(list(llm.stream(given, GREEDY)), llm.generate(given, GREEDY))
    plain = list(llm.stream(["one", "two"], GREEDY, speculative_config=[{"method": "none"}, None]))
    drafts = [chunk.output.metrics.num_drafts for chunk in plain if chunk.output]
    assert min(drafts) == 0 < max(drafts)
    with pytest.raises(ConfigError, match="sampling_params: 2 given for 1 prompts"):
        llm.stream(["one"], [GREEDY, GREEDY])
    with pytest.raises(ConfigError, match=r"stream\(\) takes max_tokens"):
        llm.stream(["one"], max_tokens=3)  # type: ignore[call-arg]


def test_the_order_of_chunks() -> None:
    """After a step the prompts in order, and the outputs of each in order."""
    llm = llm_of()
    places = [
        (chunk.prompt_index, chunk.index)
        for chunk in llm.stream(
            ["one", "two", "three"],
            SEVERAL.model_copy(update={"max_tokens": 3}),
            speculative_config={"method": "none"},
        )
    ]
    one_step = [(prompt, index) for prompt in range(3) for index in range(3)]
    assert places == one_step * 3


def test_closing_it_frees_all_requests() -> None:
    llm = llm_of(max_num_seqs=2)  # some still wait
    stream = llm.stream(PROMPTS, SamplingParams(n=2, max_tokens=100))
    for _ in range(3):
        next(stream)
    stream.close()
    assert_empty(llm)


def test_several_streams_and_requests_at_once() -> None:
    llm = llm_of()
    results = llm.generate(PROMPTS, SEVERAL)
    first, second = llm.stream(PROMPTS, SEVERAL), llm.stream(PROMPTS[::-1], SEVERAL)
    ids = [llm.engine.add_request(prompt, SEVERAL) for prompt in PROMPTS]
    chunks: tuple[list[StreamChunk], list[StreamChunk]] = ([], [])
    for stream, read in zip((first, second), chunks, strict=True):
        read += [next(stream) for _ in range(5)]
    added = []
    while llm.engine.has_unfinished_requests():
        added += llm.engine.step()
    for stream, read in zip((first, second), chunks, strict=True):
        read += stream
    assert_whole(chunks[0], results)
    assert_whole(chunks[1], results[::-1])
    outputs = {(c.request_id, c.index): c.output for c in added if c.output is not None}
    for request_id, result in zip(ids, results, strict=True):
        for whole in result.outputs:
            output = outputs[request_id, whole.index]
            assert output is not None
            assert bits(output) == bits(whole)
    assert_empty(llm)


def test_an_aborted_request_brings_no_more_chunks() -> None:
    llm = llm_of()
    kept, given_up = (llm.engine.add_request(p, SEVERAL) for p in PROMPTS[:2])
    llm.engine.worker.call(llm.engine.worker.advance)  # its news is not taken yet
    llm.engine.abort(given_up)
    seen = set()
    while llm.engine.has_unfinished_requests():
        seen |= {chunk.request_id for chunk in llm.engine.step()}
    assert seen == {kept}
    assert_empty(llm)


def test_one_that_fails_does_not_end_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = llm_of()
    results = llm.generate(PROMPTS[:3], GREEDY)
    accept = RULES["coupled"].accept

    def failing(self: Any, draft: Any, p: Any, noise: Any) -> Any:
        if draft.tree.tokens[0] == results[1].token_ids[4]:
            raise OSError("no disk")
        return accept(self, draft, p, noise)

    assert results[1].token_ids[4] not in (*results[0].token_ids, *results[2].token_ids)
    monkeypatch.setattr(RULES["coupled"], "accept", failing)
    chunks: list[StreamChunk] = []
    stream = llm.stream(PROMPTS[:3], GREEDY, speculative_config={"method": "none"})
    with pytest.raises(RequestError, match="OSError: no disk") as told:
        chunks.extend(stream)
    ends = [r.finish_reason for r in told.value.outputs]
    assert ends == ["length", "error", "length"]
    found = by_output(chunks)
    for index in (0, 2):
        assert found[index, 0][-1].output is not None
        assert tuple(t.token_id for c in found[index, 0] for t in c.tokens) == (
            results[index].token_ids
        )
    assert_empty(llm)
