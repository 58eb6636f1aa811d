"""The prefix cache: what is found, what is dropped, and that outputs do not show it."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
from transformers import PreTrainedModel

from tests.counting import counted
from tests.tiny import VOCAB_SIZE, tiny_model
from tests.tiny_seq2seq import tiny_seq2seq
from tokenleap import LLM, PromptError, SamplingParams
from tokenleap.core.references import Source
from tokenleap.core.tree import chain
from tokenleap.engine.prefix_cache import BLOCK, PrefixCache
from tokenleap.runtime.attention import KEY_BLOCK
from tokenleap.runtime.target import Target

PARAMS = SamplingParams(temperature=0.9, seed=3, max_tokens=12, logprobs=2)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model(max_position_embeddings=2 * KEY_BLOCK)


def tokens_of(seed: int, length: int) -> list[int]:
    dice = random.Random(seed)
    return [dice.randrange(VOCAB_SIZE) for _ in range(length)]


def cache_of(target: Target, blocks: int) -> PrefixCache:
    return PrefixCache(target, blocks * BLOCK * target.cell_bytes)


def stored(target: Target, cache: PrefixCache, tokens: list[int]) -> None:
    target.add(1)
    target.prefill(1, tokens)
    cache.store(1, tokens)
    target.remove(1)


def found(target: Target, cache: PrefixCache, tokens: list[int]) -> int:
    """Tokens found; their KV must give the logits of the whole text."""
    target.add(2)
    count, hidden = cache.restore(2, tokens)
    assert not hidden
    assert target.cached(2) == count
    target.prefill(2, tokens[count:])
    (output,) = target.verify([2], [chain([7])])
    logits = output.scores.clone()
    target.rollback(2, 0)
    target.prefill(2, tokens)
    assert torch.equal(target.verify([2], [chain([7])])[0].scores, logits)
    target.remove(2)
    return count


def test_the_longest_chain_of_whole_blocks(model: PreTrainedModel) -> None:
    target = Target(model)
    cache = cache_of(target, 100)
    text = tokens_of(1, 5 * BLOCK + 9)
    stored(target, cache, text)
    assert len(cache) == 5
    assert found(target, cache, text) == 5 * BLOCK
    assert found(target, cache, text[: 3 * BLOCK - 1]) == 2 * BLOCK
    assert found(target, cache, [*text[: 2 * BLOCK], *tokens_of(2, 200)]) == 2 * BLOCK
    assert found(target, cache, text[BLOCK:]) == 0  # the same tokens at another place
    assert found(target, cache, tokens_of(3, 200)) == 0
    stored(target, cache, text)
    assert len(cache) == 5  # what is known is not kept twice


def test_the_least_recently_used_go_first_and_last_blocks_before_first_ones(
    model: PreTrainedModel,
) -> None:
    target = Target(model)
    cache = cache_of(target, 6)
    first, second, third = (tokens_of(seed, 3 * BLOCK) for seed in range(3))
    stored(target, cache, first)
    stored(target, cache, second)
    assert found(target, cache, first) == 3 * BLOCK
    stored(target, cache, third[: 2 * BLOCK])
    assert len(cache) == 6
    assert found(target, cache, second) == BLOCK
    assert found(target, cache, first) == 3 * BLOCK


def test_a_text_longer_than_the_cache_keeps_its_beginning(model: PreTrainedModel) -> None:
    target = Target(model)
    cache = cache_of(target, 3)
    stored(target, cache, tokens_of(9, BLOCK))
    text = tokens_of(1, 8 * BLOCK)
    stored(target, cache, text)
    assert len(cache) == 3
    assert found(target, cache, text) == 3 * BLOCK


def test_every_block_can_be_reached(model: PreTrainedModel) -> None:
    """Whatever was stored and dropped: no block without the one before it."""
    target = Target(model)
    cache = cache_of(target, 7)
    dice = random.Random(0)
    texts = [tokens_of(seed, 6 * BLOCK) for seed in range(3)]
    texts += [[*texts[0][: 2 * BLOCK], *tokens_of(7, 3 * BLOCK)]]
    for _ in range(30):
        text = dice.choice(texts)[: dice.randrange(7) * BLOCK]
        stored(target, cache, text) if dice.random() < 0.7 else found(target, cache, text)
        assert len(cache) <= 7
        numbers = {entry.number for entry in cache._entries.values()}
        assert all(parent in numbers or parent == ("", None) for parent, _ in cache._entries)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_the_bits_are_the_same(dtype: torch.dtype) -> None:
    model = tiny_model(dtype=dtype, max_position_embeddings=2 * KEY_BLOCK)
    system = tokens_of(1, 3 * BLOCK + 20)
    prompts = [[*system, *tokens_of(seed, 5 + 40 * seed)] for seed in range(5)]
    plain = LLM(model, enable_prefix_caching=False).generate(prompts, PARAMS)
    cached = LLM(model).generate(prompts, PARAMS)
    assert [(o.token_ids, o.logprobs) for o in cached] == [(o.token_ids, o.logprobs) for o in plain]
    assert [o.metrics.cached_prompt_tokens for o in plain] == [0] * 5
    assert [o.metrics.cached_prompt_tokens for o in cached] == [0, *[3 * BLOCK] * 4]


def test_a_shared_beginning_is_computed_once(model: PreTrainedModel) -> None:
    llm = LLM(model)
    positions = counted(llm.engine.target)
    system = tokens_of(1, 4 * BLOCK)
    llm.generate([[*system, i, i + 1] for i in range(6)], SamplingParams(max_tokens=1))
    prompts = positions[:-1]  # the last pass is the step
    assert sum(prompts) <= len(system) + 6 * 4  # and what is left of each, with padding
    assert all(a >= b for a, b in pairwise(prompts))


def test_a_prompt_that_is_known_whole_leaves_the_last_token(model: PreTrainedModel) -> None:
    llm, plain = LLM(model), LLM(model, enable_prefix_caching=False)
    text = tokens_of(5, 4 * BLOCK)
    llm.generate([text], PARAMS)
    for length, known in ((2 * BLOCK, 1), (2 * BLOCK + 1, 2), (BLOCK, 0)):
        (output,) = llm.generate([text[:length]], PARAMS)
        assert output.metrics.cached_prompt_tokens == known * BLOCK
        (expected,) = plain.generate([text[:length]], PARAMS)
        assert (output.token_ids, output.logprobs) == (expected.token_ids, expected.logprobs)


def test_outputs_are_not_kept(model: PreTrainedModel) -> None:
    """KV of committed branches has the right tokens, but not always the same last bit."""
    llm = LLM(model)
    (output,) = llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=2 * BLOCK))
    (again,) = llm.generate([[1, 2, 3, *output.token_ids]], PARAMS)
    assert again.metrics.cached_prompt_tokens == 0


def test_decoder_prompts_of_different_sources_share_nothing() -> None:
    """Their KV depends on the source through cross-attention."""
    model = tiny_seq2seq()
    plain, llm = LLM(model, enable_prefix_caching=False), LLM(model)
    decoder = tokens_of(1, BLOCK + 6)
    prompts = [
        {"encoder_prompt": tokens_of(seed, 9), "decoder_prompt": [*decoder, seed]}
        for seed in (5, 6, 5, 6)
    ]
    expected = [plain.generate(prompt, PARAMS)[0] for prompt in prompts]
    outputs = [llm.generate(prompt, PARAMS)[0] for prompt in prompts]
    assert [(o.token_ids, o.logprobs) for o in outputs] == [
        (o.token_ids, o.logprobs) for o in expected
    ]
    assert outputs[0].token_ids != outputs[1].token_ids
    assert [o.metrics.cached_prompt_tokens for o in outputs] == [0, 0, BLOCK, BLOCK]
    assert [o.metrics.cached_source_tokens for o in outputs] == [0, 0, 9, 9]


def test_sources_and_blocks_share_the_memory() -> None:
    target = Target(tiny_seq2seq())
    sources = [("", Source(tuple(tokens_of(seed, 9)))) for seed in range(5)]
    each = target.state_bytes(sources[0][1])
    cache = PrefixCache(target, 3 * each)
    states = {}
    for source in sources:
        target.add(1)
        target.encode(1, source[1])
        states[source] = target.row_state(1)
        target.prefill(1, tokens_of(0, BLOCK))
        cache.store(1, tokens_of(0, BLOCK), beginning=source)
        target.remove(1)
    assert len(cache) == min(5, 3 * each // (BLOCK * target.cell_bytes))
    for source in sources[:4]:
        cache.keep_state(source, states[source])  # blocks go first, then the oldest source
        assert cache.num_bytes <= 3 * each
        assert cache.state_of(sources[0]) is not None or source == sources[3]
    assert [cache.state_of(source) is not None for source in sources] == [1, 0, 1, 1, 0]
    cache.keep_state(sources[4], states[sources[4]])
    assert cache.state_of(sources[0]) is None
    cache.clear()
    assert (len(cache), cache.num_bytes) == (0, 0)
    small = PrefixCache(target, BLOCK * target.cell_bytes)
    assert each > BLOCK * target.cell_bytes
    small.keep_state(sources[0], states[sources[0]])
    assert len(small) == 0


def cached(llm: LLM, salt: str | None) -> tuple[int, int]:
    """Cached tokens of an output: of its prompt, and of its source."""
    prompt: dict[str, object] = {"prompt_token_ids": tokens_of(5, 2 * BLOCK + 1)}
    if llm.engine.target.reads_source:
        start = [llm.engine.read([1]).ids[0]]
        ids = [*start, *tokens_of(4, BLOCK)]
        prompt = {"encoder_prompt": {"prompt_token_ids": tokens_of(3, 9)}, "decoder_prompt": ids}
    (output,) = llm.generate([prompt if salt is None else {**prompt, "cache_salt": salt}], PARAMS)
    return output.metrics.cached_prompt_tokens, output.metrics.cached_source_tokens


def test_salts_keep_prompts_apart(model: PreTrainedModel) -> None:
    llm = LLM(model)
    salts = (None, "one", "two", "one", None, "two", "three")
    found = [cached(llm, salt)[0] for salt in salts]
    assert found == [0, 0, 0, *[2 * BLOCK] * 3, 0]


def test_salts_keep_sources_apart() -> None:
    llm = LLM(tiny_seq2seq())
    found = [cached(llm, salt) for salt in (None, "one", "two", "one", None)]
    assert found == [*[(0, 0)] * 3, *[(BLOCK, 9)] * 2]


def test_sources_of_running_requests_are_shared_within_a_salt() -> None:
    llm = LLM(tiny_seq2seq(), enable_prefix_caching=False)
    source = tokens_of(3, 9)
    prompts = [{"prompt_token_ids": source, "cache_salt": salt} for salt in ("a", "a", "b")]
    outputs = llm.generate(prompts, PARAMS)
    assert [o.metrics.cached_source_tokens for o in outputs] == [0, 9, 0]
    (alone,) = llm.generate([source], PARAMS)
    assert {o.token_ids for o in outputs} == {alone.token_ids}


@pytest.mark.parametrize("salt", ["", 3, None])
def test_a_salt_is_a_text(model: PreTrainedModel, salt: object) -> None:
    with pytest.raises(PromptError, match="cache_salt: expected a text that is not empty"):
        LLM(model).generate([{"prompt_token_ids": [1], "cache_salt": salt}])
