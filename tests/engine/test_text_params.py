"""Parameters that say what becomes of prompt and text."""

from __future__ import annotations

import pytest

from tests.tiny import CONTEXT, tiny_model, tiny_tokenizer
from tests.tiny_seq2seq import tiny_seq2seq
from tokenleap import LLM, ConfigError, SamplingParams


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(tiny_model(), tokenizer=tiny_tokenizer())


def test_without_text(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=9, prompt_logprobs=0)
    (whole,) = llm.generate("hello", params)
    (result,) = llm.generate("hello", params.model_copy(update={"detokenize": False}))
    assert whole.text
    assert result.text == ""
    assert {token.text for token in result.outputs[0].tokens} == {""}
    assert result.token_ids == whole.token_ids
    assert not result.trace.pieces
    assert result.prompt_logprobs
    last = result.prompt_logprobs[-1]
    assert last is not None
    assert [each.decoded_token for each in last.values()] == [None]
    with pytest.raises(ConfigError, match="stop strings are found in text"):
        SamplingParams(detokenize=False, stop=["a"])


def test_a_prompt_is_cut_at_its_beginning(llm: LLM) -> None:
    prompt = "a long text, and its end"
    for kept, text in ((3, "end"), (100, prompt), (-1, prompt)):
        params = SamplingParams(temperature=0, max_tokens=5, truncate_prompt_tokens=kept)
        (result,) = llm.generate(prompt, params)
        assert result.prompt_token_ids == tuple(llm.encode(text))
        (plain,) = llm.generate(text, SamplingParams(temperature=0, max_tokens=5))
        assert result.token_ids == plain.token_ids
    long = [1, 2, 3] * CONTEXT
    for max_tokens, left in ((10, 10), (0, 1), (None, 1), (2 * CONTEXT, CONTEXT - 1)):
        params = SamplingParams(max_tokens=max_tokens, truncate_prompt_tokens=-1)
        (result,) = llm.generate([long], params)
        assert len(result.prompt_token_ids) == CONTEXT - left
        assert len(result.token_ids) == min(left, left if max_tokens is None else max_tokens)
    with pytest.raises(ConfigError, match="truncate_prompt_tokens: at least one token must be"):
        SamplingParams(truncate_prompt_tokens=0)
    with pytest.raises(ConfigError, match="truncate_prompt_tokens: an encoder-decoder's prompt"):
        LLM(tiny_seq2seq("bart")).generate([[5, 6]], SamplingParams(truncate_prompt_tokens=3))


def test_the_sum_of_log_probabilities(llm: LLM) -> None:
    (with_them,) = llm.generate("hello", SamplingParams(seed=1, max_tokens=5, logprobs=0))
    (without,) = llm.generate("hello", SamplingParams(seed=1, max_tokens=5))
    assert with_them.logprobs is not None
    pairs = zip(with_them.logprobs, with_them.token_ids, strict=True)
    total = sum(each[token].logprob for each, token in pairs)
    assert with_them.outputs[0].cumulative_logprob == total
    assert without.outputs[0].cumulative_logprob is None
