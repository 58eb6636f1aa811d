"""The default model: identical to Transformers in float32, to our own `none` in bfloat16.

Three prompts, of three kinds of Spec-Bench; `benchmarks/identity.py` does the same on all of it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tests.heads import random_head, random_pass_tokens, random_state_head, state_config
from tests.matrix import METHOD_FIELDS, ON_CHAINS, SPECULATIVE
from tests.tiny import reference_greedy
from tokenleap import LLM, SamplingParams
from tokenleap.drafters.heads.eagle_net import EagleConfig, ParallelConfig
from tokenleap.drafters.registry import METHODS

pytestmark = pytest.mark.model

TOKENS = 16
COSTLY = ("draft_model", "cascade", "early_exit", "layer_skip")
"""Methods that run a large model to draft: they get fewer prompts."""
PASSAGE = (
    "The lighthouse at Cape Orlan was built in 1871 after three ships were lost on the reef in one "
    "winter. Its keepers lived in two rooms below the lamp and wrote down the weather every hour. "
    "In 1934 the lamp was made electric, and in 1987 the last keeper left. Today the lighthouse is "
    "a museum, and the weather books are read by people who study the climate."
)
QUESTIONS = {
    "translation": "Translate into French: The book is on the table near the window.",
    "summarisation": f"Summarise the following passage.\n\n{PASSAGE}",
    "maths": "Tom has 12 apples, gives away 5 and buys twice as many as he has left. How many now?",
}
HEAD = EagleConfig(
    hidden_size=576,
    intermediate_size=64,
    num_attention_heads=9,
    num_key_value_heads=3,
    head_dim=64,
    vocab_size=49152,
    draft_vocab_size=512,
    aux_layers=(2, 15, 27),
    max_position_embeddings=8192,
)
SIZES: dict[str, Any] = {"hidden_size": 576, "vocab_size": 49152, "draft_vocab_size": 512}
"""Of heads without attention."""
GREEDY = SamplingParams(temperature=0, max_tokens=TOKENS, logprobs=0)
SEEDED = SamplingParams(temperature=0.8, top_p=0.95, seed=7, max_tokens=TOKENS, logprobs=0)


@pytest.fixture(scope="module")
def prompts(smollm2_tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    conversations = [[{"role": "user", "content": text}] for text in QUESTIONS.values()]
    return [
        smollm2_tokenizer.apply_chat_template(  # type: ignore[misc]
            conversation, add_generation_prompt=True, return_dict=False
        )
        for conversation in conversations
    ]


def config_of(method: str, llm: LLM, gamma: int = 5) -> dict[str, Any]:
    if method == "none":
        return {"method": "none"}
    config: dict[str, Any] = {"method": method, "num_speculative_tokens": gamma}
    config |= METHOD_FIELDS.get(method, {})
    if METHODS[method].takes_model:
        config["model"] = llm  # a perfect draft model: everything accepted
    if METHODS[method].takes_head:
        config["model"] = _head(method)
    return config


def _head(method: str) -> str:
    """The folder of a head with random weights."""
    if method == "pass":
        return random_pass_tokens(SIZES["vocab_size"], size=SIZES["hidden_size"])
    attending = {"parallel": ParallelConfig(**vars(HEAD)), "eagle": HEAD, "hybrid": HEAD}
    if method in attending:
        return random_head(attending[method])
    state = {**SIZES, "inner_size": 576} if method == "mlp_speculator" else SIZES
    return random_state_head(method, state_config(method, **state))


def loaded(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> LLM:
    """One for all methods; every prompt is computed."""
    config = {"method": "none"}
    return LLM(model, tokenizer=tokenizer, speculative_config=config, enable_prefix_caching=False)


@pytest.fixture(scope="module")
def in_float32(smollm2_float32: PreTrainedModel, smollm2_tokenizer: PreTrainedTokenizerBase) -> LLM:
    return loaded(smollm2_float32, smollm2_tokenizer)


@pytest.fixture(scope="module")
def llm(smollm2_auto: PreTrainedModel, smollm2_tokenizer: PreTrainedTokenizerBase) -> LLM:
    return loaded(smollm2_auto, smollm2_tokenizer)


@pytest.fixture(scope="module")
def reference(smollm2_float32: PreTrainedModel, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    return [tuple(reference_greedy(smollm2_float32, prompt, TOKENS)) for prompt in prompts]


QUICK = ("ngram", "draft_model")
"""One of each kind: `test_greedy.py` has all of them on tiny models."""
QUICK_IN_FLOAT32 = ("suffix",)
"""Passes in float32 take twice as long; the processor's own dtype is tested with every kind."""


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(method, marks=[] if method in QUICK_IN_FLOAT32 else pytest.mark.slow)
        for method in ("none", *SPECULATIVE)
    ],
)
def test_float32_equals_transformers(
    in_float32: LLM, prompts: list[list[int]], reference: list[tuple[int, ...]], method: str
) -> None:
    some = slice(0, 2 if method in COSTLY else None)
    config = config_of(method, in_float32)
    outputs = in_float32.generate(prompts[some], GREEDY, speculative_config=config)
    assert [output.token_ids for output in outputs] == reference[some]


@pytest.fixture(scope="module")
def plain(llm: LLM, prompts: list[list[int]]) -> dict[str, list[Any]]:
    assert llm.bit_exact
    return {
        name: [(o.token_ids, o.logprobs) for o in llm.generate(prompts, params)]
        for name, params in (("greedy", GREEDY), ("seeded", SEEDED))
    }


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(method, marks=[] if method in QUICK else pytest.mark.slow)
        for method in ON_CHAINS
    ],
)
def test_the_bits_of_none(
    llm: LLM, prompts: list[list[int]], plain: dict[str, list[Any]], method: str
) -> None:
    config = config_of(method, llm)
    for name, params in (("greedy", GREEDY), ("seeded", SEEDED)):
        some = slice(0, 2 if method in COSTLY else None)
        outputs = llm.generate(prompts[some], params, speculative_config=config)
        assert [(o.token_ids, o.logprobs) for o in outputs] == plain[name][some]


def test_one_at_a_time_has_the_bits_of_the_batch(
    llm: LLM, prompts: list[list[int]], plain: dict[str, list[Any]]
) -> None:
    config = config_of("ngram", llm, gamma=9)
    for prompt, expected in zip(prompts, plain["greedy"], strict=True):
        (output,) = llm.generate([prompt], GREEDY, speculative_config=config)
        assert (output.token_ids, output.logprobs) == expected


def test_by_alias(smollm2_tokenizer: PreTrainedTokenizerBase) -> None:
    """The first example of the README."""
    config = {"method": "ngram", "num_speculative_tokens": 5}
    llm = LLM("smollm2-135m", speculative_config=config)
    question = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
    (output,) = llm.chat(question, SamplingParams(temperature=0, max_tokens=32))
    assert "Paris" in output.text
    assert output.finish_reason == "stop"
    assert output.text == smollm2_tokenizer.decode(list(output.token_ids), skip_special_tokens=True)
    assert llm.model_path is not None
    assert (llm.model_path / "config.json").is_file()
    assert llm.dtype in (torch.bfloat16, torch.float32)


def test_stop_strings_and_stream_on_real_text(llm: LLM) -> None:
    ngram = {"method": "ngram"}
    prompt = [{"role": "user", "content": "Count from one to five in words."}]
    params = SamplingParams(temperature=0, max_tokens=24)
    whole = llm.generate(prompt, params, speculative_config=ngram)[0].text
    pieces = [chunk.text for chunk in llm.stream(prompt, params, speculative_config=ngram)]
    assert "".join(pieces) == whole
    stop = whole[5:9]
    cut = SamplingParams(temperature=0, max_tokens=24, stop=[stop])
    (output,) = llm.generate(prompt, cut, speculative_config=ngram)
    assert output.text == whole[: whole.index(stop)]
