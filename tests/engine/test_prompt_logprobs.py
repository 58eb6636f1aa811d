"""Log-probabilities of prompts: those of the model, with the bits that generated tokens have."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.engine.serving import assert_empty, run_all
from tests.matrix import PROMPTS, tiny_llm
from tests.tiny import ARCHITECTURES, VOCAB_SIZE, tiny_model, tiny_tokenizer
from tests.tiny_seq2seq import tiny_seq2seq
from tokenleap import LLM, ConfigError, RequestError, RequestOutput, SamplingParams
from tokenleap.engine.prefix_cache import BLOCK

SCORED = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=2)
LONG = [(7 * place) % 90 for place in range(3 * BLOCK + 9)]


@cache
def model() -> PreTrainedModel:
    """One that the native runtime takes."""
    return tiny_model(num_attention_heads=2, num_key_value_heads=2, head_dim=32)


def assert_scores(result: RequestOutput, log_probs: Tensor, num_top: int) -> None:
    """`log_probs` [n, V] of Transformers, after each token of the prompt."""
    assert result.prompt_logprobs is not None
    first, *others = result.prompt_logprobs
    assert first is None
    assert len(others) == len(result.prompt_token_ids) - 1
    for row, token, found in zip(log_probs, result.prompt_token_ids[1:], others, strict=False):
        assert found is not None
        assert next(iter(found)) == token
        assert found[token].logprob == pytest.approx(float(row[token]), abs=1e-4)
        best = row.argsort(descending=True)[:num_top].tolist()
        assert list(found) == [token, *(each for each in best if each != token)]
        for rank, each in enumerate(best, 1):
            assert found[each].rank == rank
            assert found[each].logprob == pytest.approx(float(row[each]), abs=1e-4)
        assert found[token].rank == 1 + int((row > row[token]).sum())


@pytest.mark.parametrize("architecture", ["native", *ARCHITECTURES])
def test_they_are_those_of_transformers(architecture: str) -> None:
    own = model() if architecture == "native" else tiny_model(architecture)
    prompts = [PROMPTS[3], LONG, [5, 6]]
    for prompt, result in zip(prompts, LLM(own).generate(prompts, SCORED), strict=True):
        with torch.inference_mode():
            logits = own(torch.tensor([prompt])).logits[0]
        assert_scores(result, logits.log_softmax(-1), 2)


def test_of_an_encoder_decoder_they_are_those_of_the_decoders_prompt() -> None:
    own = tiny_seq2seq("bart")
    source, decoder = [5, 6, 7, 8], [9, 10, 11, 12, 13]
    prompt = {"encoder_prompt": {"prompt_token_ids": source}, "decoder_prompt": decoder}
    (result,) = LLM(own).generate([prompt], SCORED)
    ids = result.prompt_token_ids
    assert ids[-5:] == tuple(decoder)
    with torch.inference_mode():
        logits = own(
            input_ids=torch.tensor([source]), decoder_input_ids=torch.tensor([ids])
        ).logits[0]
    assert_scores(result, logits.log_softmax(-1), 2)


def bits(result: RequestOutput) -> Any:
    return result.prompt_logprobs, result.token_ids


def test_they_have_the_bits_of_generated_tokens() -> None:
    llm = tiny_llm(model(), "ngram", controller="fixed")
    assert llm.bit_exact
    params = SamplingParams(temperature=0, max_tokens=60, logprobs=2)
    (written,) = llm.generate([PROMPTS[0]], params)
    assert written.logprobs is not None
    (read,) = llm.generate([[*PROMPTS[0], *written.token_ids]], SCORED)
    assert read.prompt_logprobs is not None
    assert read.prompt_logprobs[len(PROMPTS[0]) :] == written.logprobs


@pytest.mark.parametrize("chunk", [5, 64, 512])
def test_they_depend_on_no_chunk_neighbour_or_cache(chunk: int) -> None:
    (alone,) = LLM(model(), enable_prefix_caching=False).generate([LONG], SCORED)
    llm = LLM(model(), max_num_batched_tokens=chunk)
    plain = SamplingParams(temperature=0, max_tokens=3)
    prompts = [LONG, LONG, LONG[:-1], LONG]
    for _ in range(2):  # the second time the cache has the prompt
        results = llm.generate(prompts, [SCORED, plain, SCORED, SCORED])
        assert bits(results[0]) == bits(results[3]) == bits(alone)
        assert results[1].prompt_logprobs is None
        assert results[1].token_ids == alone.token_ids
        assert results[2].prompt_logprobs == (alone.prompt_logprobs or ())[:-1]
    cached = [result.metrics.cached_prompt_tokens for result in results]
    assert cached == [0, 3 * BLOCK, 0, 0]
    assert_empty(llm)


def test_a_preempted_prompt_keeps_what_is_known() -> None:
    (alone,) = LLM(model()).generate([LONG], SCORED)
    for steps in (1, 3, 12, 30):
        llm = LLM(model(), max_num_batched_tokens=20)
        request_id = llm.engine.add_request(LONG, SCORED)
        (request,) = llm.engine._added.jobs[request_id].requests
        known = []
        for _ in range(steps):
            if not request.finished:
                llm.engine.worker.call(llm.engine.worker.advance)
        known = list(request.prompt_scores or ())
        if not request.finished:
            llm.engine._scheduler._preempt(request)
        (output,) = run_all(llm.engine).values()
        assert output.token_ids == alone.token_ids
        assert request.prompt_logprobs == alone.prompt_logprobs
        assert (request.prompt_scores or [])[: len(known)] == known
        assert_empty(llm)


def test_the_outputs_of_a_prompt_share_them() -> None:
    llm = LLM(model())
    params = SamplingParams(n=3, seed=1, max_tokens=3, prompt_logprobs=2, logprobs=0)
    (result,) = llm.generate([LONG], params)
    (alone,) = llm.generate([LONG], SCORED)
    assert result.prompt_logprobs == alone.prompt_logprobs
    (plain,) = llm.generate([LONG], params.model_copy(update={"prompt_logprobs": None}))
    assert [o.token_ids for o in result.outputs] == [o.token_ids for o in plain.outputs]
    chunks = list(llm.stream([LONG, [3]], params))
    told = [(c.prompt_index, c.index, c.prompt_logprobs) for c in chunks if c.prompt_logprobs]
    assert told == [(0, 0, alone.prompt_logprobs), (1, 0, [None])]


def test_text_and_the_whole_vocabulary() -> None:
    llm = LLM(model(), tokenizer=tiny_tokenizer())
    (result,) = llm.generate("hello", SamplingParams(max_tokens=1, prompt_logprobs=-1, logprobs=-1))
    assert result.prompt_logprobs
    _, *scores = result.prompt_logprobs
    for letter, score in zip("ello", scores, strict=True):
        assert score is not None
        assert len(score) == VOCAB_SIZE
        assert next(iter(score.values())).decoded_token == letter
        assert sorted(each.rank for each in score.values()) == list(range(1, VOCAB_SIZE + 1))
    assert result.logprobs is not None
    assert len(result.logprobs[0]) == VOCAB_SIZE
    total = sum(torch.tensor([each.logprob for each in result.logprobs[0].values()]).exp())
    assert float(total) == pytest.approx(1)


@pytest.mark.parametrize("method", ["none", "ngram", "draft_model", "eagle"])
def test_no_output_at_all(method: str) -> None:
    """`max_tokens` 0 reads the prompt, for its log-probabilities or for the prefix cache."""
    llm = tiny_llm(model(), method, controller="fixed")
    only = SCORED.model_copy(update={"max_tokens": 0})
    prompts = [LONG, [4], PROMPTS[0]]
    results, whole = llm.generate(prompts, only), llm.generate(prompts, SCORED)
    for result, expected in zip(results, whole, strict=True):
        assert result.prompt_logprobs == expected.prompt_logprobs
        assert (result.token_ids, result.text, result.finish_reason) == ((), "", "length")
        assert result.metrics.target_passes == 0
    (chunk,) = llm.stream([LONG], only)
    assert chunk.finished
    assert chunk.tokens == ()
    assert chunk.prompt_logprobs == whole[0].prompt_logprobs
    assert_empty(llm)


def test_a_prompt_is_read_ahead() -> None:
    llm = LLM(model())
    llm.generate([LONG], SamplingParams(max_tokens=0))
    for skip, cached in ((None, 3 * BLOCK), (False, 3 * BLOCK), (True, 0)):
        params = SamplingParams(max_tokens=1, skip_reading_prefix_cache=skip)
        (result,) = llm.generate([LONG], params)
        assert result.metrics.cached_prompt_tokens == cached


def test_errors() -> None:
    with pytest.raises(ConfigError, match="skip_reading_prefix_cache: prompt_logprobs need"):
        SamplingParams(prompt_logprobs=0, skip_reading_prefix_cache=False)
    with pytest.raises(ConfigError, match="max_tokens: a beam search finds at least one token"):
        SamplingParams(temperature=0, beam_width=2, max_tokens=0)
    broken = tiny_model(seed=3)
    with torch.no_grad():
        embedding: Any = broken.get_input_embeddings()
        embedding.weight[7] = torch.nan
    llm = LLM(broken)
    with pytest.raises(RequestError, match="the largest logit is nan") as told:
        llm.generate([[1, 7, 2], [1, 2, 3]], SCORED.model_copy(update={"max_tokens": 0}))
    failed, fine = told.value.outputs
    assert failed.prompt_logprobs is None
    assert len(fine.prompt_logprobs) == 3
    assert_empty(llm)
