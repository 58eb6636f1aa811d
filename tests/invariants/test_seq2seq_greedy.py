"""Encoder-decoders: greedy output is `generate()`'s, under every rule of a generation config."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from tests.matrix import speculative_config
from tests.tiny_seq2seq import (
    BINS,
    FRAMES,
    SEQ2SEQ,
    TEXT,
    VOCAB_SIZE,
    reference_outputs,
    tiny_seq2seq,
    tiny_source,
)
from tokenleap import LLM, SamplingParams
from tokenleap.core.references import Source
from tokenleap.core.rules import DecodingRules
from tokenleap.models.audio import AudioReader

TOKENS = 10
GREEDY = SamplingParams(temperature=0, max_tokens=TOKENS)
METHODS = ("none", "lookahead")  # no drafts, and trees
SOURCES = [tiny_source(length=length, seed=length) for length in (9, 30)]

RULES: dict[str, dict[str, Any]] = {
    "forced": {"forced_bos_token_id": 40, "forced_eos_token_id": 7},
    "bad words": {"bad_words_ids": [[4], [2, 2], [49, 16], [91, 49, 23]]},
    "min_length": {"min_length": 8, "suppress_tokens": [51]},
    "n-grams": {"no_repeat_ngram_size": 2, "encoder_no_repeat_ngram_size": 1},
    "penalty": {"repetition_penalty": 1.3, "begin_suppress_tokens": [4, 91]},
}
ALL = {name: value for rule in RULES.values() for name, value in rule.items()}


@cache
def model_of(name: str) -> PreTrainedModel:
    """A model whose outputs end, but not all at once."""
    return tiny_seq2seq(name, eos_bias=3.0)


@cache
def llm_of(name: str) -> LLM:
    return LLM(model_of(name))


@cache
def plain(name: str) -> list[list[int]]:
    return [reference_outputs(model_of(name), source, TOKENS) for source in SOURCES]


def check(name: str, fields: Mapping[str, Any]) -> None:
    """That both decode alike if the generation config has these fields, too."""
    model, llm = model_of(name), llm_of(name)
    config = model.generation_config
    assert config is not None
    own: Any = type(config)(**{**config.to_dict(), **fields})
    llm.engine._maker._rules = DecodingRules.of(own, [own.eos_token_id], VOCAB_SIZE)
    expected = plain(name)
    if fields:
        expected = [reference_outputs(model, source, TOKENS, **fields) for source in SOURCES]
        assert expected != plain(name)
    prompts = [list(source.tokens) for source in SOURCES]
    for method in METHODS:
        strategy = speculative_config(method, num_speculative_tokens=8)
        outputs = llm.generate(prompts, GREEDY, speculative_config=strategy)
        assert [list(output.token_ids) for output in outputs] == expected


@pytest.mark.parametrize("name", TEXT)
def test_every_architecture(name: str) -> None:
    """As it is: those that force the last token do so."""
    check(name, {})


@pytest.mark.parametrize("name", TEXT)
def test_every_architecture_under_all_rules(name: str) -> None:
    check(name, ALL)


@pytest.mark.parametrize("rule", RULES)
def test_every_rule(rule: str) -> None:
    check("mbart", RULES[rule])


def test_a_decoders_prompt() -> None:
    """Its tokens count for lengths and n-grams, and none is forced after more than one."""
    model, prompt = tiny_seq2seq("mbart", eos_bias=3.0), [2, 40, 41, 40]
    for name, value in ALL.items():
        setattr(model.generation_config, name, value)
    source = SOURCES[1]
    expected = reference_outputs(model, source, TOKENS, decoder_input_ids=torch.tensor([prompt]))
    given = {"encoder_prompt": list(source.tokens), "decoder_prompt": prompt[1:]}
    (output,) = LLM(model).generate(given, GREEDY)
    assert output.prompt_token_ids == tuple(prompt)
    assert [*prompt[1:], *output.token_ids] == expected


def test_a_models_own_generation_config_is_read() -> None:
    model = tiny_seq2seq("mbart")
    assert model.generation_config is not None
    model.generation_config.forced_bos_token_id = 40
    model.generation_config.no_repeat_ngram_size = 2
    (output,) = LLM(model).generate([list(SOURCES[0].tokens)], GREEDY)
    assert list(output.token_ids) == reference_outputs(model, SOURCES[0], TOKENS)
    assert output.token_ids[0] == 40


def test_audio() -> None:
    assert set(SEQ2SEQ) - set(TEXT) == {"whisper"}
    model = tiny_seq2seq("whisper")
    samples = np.random.default_rng(0).normal(size=4000).astype(np.float32)
    features = AudioReader(None, BINS, FRAMES).features(samples)
    expected = reference_outputs(model, Source.of_audio(features), TOKENS)
    for method in METHODS:
        config = speculative_config(method, num_speculative_tokens=8)
        (output,) = LLM(model, speculative_config=config).generate({"audio": samples}, GREEDY)
        assert list(output.token_ids) == expected


def test_something_is_accepted() -> None:
    """Otherwise the drafts above would say little."""
    config = speculative_config("lookahead", num_speculative_tokens=8)
    prompts = [list(source.tokens) for source in SOURCES]
    given = llm_of("marian").generate(prompts, GREEDY, speculative_config=config)
    assert sum(output.metrics.num_accepted_tokens for output in given) > 0


@pytest.mark.parametrize("name", TEXT)
def test_beams_are_those_of_generate(name: str) -> None:
    """With the rules of the model's generation config, with drafts from the source and without."""
    model = tiny_seq2seq(name, eos_bias=3.0)
    searched = SamplingParams(temperature=0, max_tokens=TOKENS, beam_width=3)
    llms = LLM(model), LLM(model, speculative_config=speculative_config("copy"))
    for source in SOURCES:
        assert source.tokens is not None
        found = model.generate(  # type: ignore[operator]
            torch.tensor([source.tokens]), num_beams=3, max_new_tokens=TOKENS, do_sample=False
        )
        expected = found[0, 1:].tolist()
        for llm in llms:
            (output,) = llm.generate([list(source.tokens)], searched)
            length = len(output.token_ids)
            assert list(output.token_ids) == expected[:length]
            assert length == len(expected)
