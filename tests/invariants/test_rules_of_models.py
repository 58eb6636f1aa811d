"""Decoder-only models: the rules of a generation config are part of p, as in `generate()`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel

from tests.matrix import PROMPTS, speculative_config, tiny_llm
from tests.tiny import reference_greedy, tiny_model
from tokenleap import LLM, CompatibilityError, ConfigError, SamplingParams

TOKENS = 16
GREEDY = SamplingParams(temperature=0, max_tokens=TOKENS)
SEEDED = SamplingParams(temperature=0.9, seed=5, max_tokens=TOKENS, logprobs=1)
METHODS = ("none", "ngram", "draft_model", "lookahead", "eagle", "recycle")
"""No drafts, chains and trees, of lookups, models and heads."""

RULES: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.4},
    "n-grams": {"no_repeat_ngram_size": 2},
    "n-grams of the prompt": {"encoder_no_repeat_ngram_size": 2},
    "suppressed": {"suppress_tokens": list(range(0, 96, 2))},
    "first suppressed": {"begin_suppress_tokens": list(range(0, 96, 2))},
    "bad words": {"bad_words_ids": [[n] for n in range(0, 96, 3)] + [[a, 1] for a in range(96)]},
    "biases": {"sequence_bias": [[[7], 2.0], [[11, 13], 90.0], [[13], 8.0], [[5], -9.0]]},
    "forced end": {"forced_eos_token_id": 4},
    "min_length": {"min_length": 16, "eos_token_id": list(range(0, 96, 3))},
    "min_new_tokens": {"min_new_tokens": 9, "eos_token_id": list(range(0, 96, 3))},
    "decay": {"exponential_decay_length_penalty": (3, 1.9), "eos_token_id": [3, 40]},
    "prompt repetition": {"encoder_repetition_penalty": 1.6},
}
ALL = {name: value for rule in RULES.values() for name, value in rule.items()}
ALL["min_length"], ALL["suppress_tokens"] = 0, [1, 2]


def model_of(**fields: Any) -> PreTrainedModel:
    model = tiny_model()
    assert model.generation_config is not None
    for name, value in fields.items():
        setattr(model.generation_config, name, value)
    return model


def outputs(llm: LLM, params: SamplingParams = GREEDY, **config: Any) -> list[Any]:
    return llm.generate(PROMPTS, params, **config)


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    return [list(each.token_ids) for each in outputs(LLM(model_of()))]


@pytest.mark.parametrize("rule", [*RULES, "all"])
def test_greedy_outputs_are_those_of_generate(rule: str, plain: list[list[int]]) -> None:
    model = model_of(**RULES.get(rule, ALL))
    expected = [reference_greedy(model, prompt, TOKENS) for prompt in PROMPTS]
    assert expected != plain  # the rule does something
    for method in METHODS[:4]:
        found = outputs(tiny_llm(model, method))
        assert [list(each.token_ids) for each in found] == expected


@pytest.mark.parametrize("method", METHODS[1:])
def test_speculation_changes_no_bit(method: str) -> None:
    model = model_of(**ALL)
    llm, plain = tiny_llm(model, method), tiny_llm(model)
    for params in (GREEDY, SEEDED):
        expected, found = outputs(plain, params), outputs(llm, params)
        assert [each.token_ids for each in found] == [each.token_ids for each in expected]
        assert [each.outputs[0].logprobs for each in found] == [
            each.outputs[0].logprobs for each in expected
        ]


def test_a_forced_first_token() -> None:
    """`generate()` forces it after a prompt of one token."""
    model = model_of(forced_bos_token_id=9, begin_suppress_tokens=[1, 2, 3])
    expected = reference_greedy(model, [4], TOKENS)
    assert expected[0] == 9
    for method in METHODS[:4]:
        (output,) = tiny_llm(model, method).generate([[4]], GREEDY)
        assert list(output.token_ids) == expected


@pytest.mark.parametrize("rule", ["repetition", "n-grams", "biases", "decay", "min_new_tokens"])
def test_beams_are_those_of_generate(rule: str) -> None:
    model = model_of(**{**RULES[rule], "eos_token_id": [3, 40]})
    params = SamplingParams(temperature=0, max_tokens=TOKENS, beam_width=3)
    prompt = PROMPTS[1]
    found = model.generate(  # type: ignore[operator]
        torch.tensor([prompt]), num_beams=3, max_new_tokens=TOKENS, do_sample=False, pad_token_id=0
    )
    expected = found[0, len(prompt) :].tolist()
    for method in ("none", "ngram"):
        config = speculative_config(method)
        (output,) = LLM(model).generate([prompt], params, speculative_config=config)
        assert list(output.token_ids) == expected[: len(output.token_ids)]
        assert len(output.token_ids) == len(expected)


# Which generation config


def test_rules_can_be_ignored(plain: list[list[int]], tmp_path: Path) -> None:
    """Special tokens are still read."""
    model = model_of(no_repeat_ngram_size=1, temperature=0.5, eos_token_id=[7])
    for choice in ("none", "vllm"):
        llm = LLM(model, generation_config=choice)
        assert llm.get_default_sampling_params() == SamplingParams()
        assert llm.eos_token_ids == (7,)
        found = [list(each.token_ids) for each in outputs(llm)]
        assert found != [reference_greedy(model, prompt, TOKENS) for prompt in PROMPTS]
        for tokens, all_of_them in zip(found, plain, strict=True):
            assert tokens == all_of_them[: len(tokens)]
    own: Any = GenerationConfig
    own(no_repeat_ngram_size=1, top_k=3, do_sample=True).save_pretrained(tmp_path)
    llm = LLM(model_of(temperature=0.5), generation_config=tmp_path)
    assert llm.get_default_sampling_params() == SamplingParams(top_k=3)
    model = model_of(no_repeat_ngram_size=1)
    expected = [reference_greedy(model, prompt, TOKENS) for prompt in PROMPTS]
    assert [list(each.token_ids) for each in outputs(llm)] == expected


def test_what_cannot_be_applied_is_refused() -> None:
    with pytest.raises(CompatibilityError, match=r"guidance_scale.*generation_config='none'"):
        LLM(model_of(guidance_scale=2.0))
    LLM(model_of(guidance_scale=2.0), generation_config="none")
    with pytest.raises(CompatibilityError, match=r"generation config: temperature"):
        LLM(model_of(temperature=-1.0))
    with pytest.raises(ConfigError, match="generation_config: must be 'auto', 'none'"):
        LLM(model_of(), generation_config="nowhere")


# Defaults


def test_the_models_sampling_defaults() -> None:
    """They hold for what is not given; parameters are taken as they are, as in vLLM."""
    own: dict[str, Any] = {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.01}
    own["repetition_penalty"] = 1.1
    llm = LLM(model_of(**own, max_new_tokens=5))
    own["max_tokens"] = 5
    assert llm.get_default_sampling_params() == SamplingParams(**own)

    def same(given: Any, expected: SamplingParams) -> None:
        (one,), (other,) = (llm.generate([PROMPTS[0]], each) for each in (given, expected))
        assert one.token_ids == other.token_ids

    llm.generate([PROMPTS[0]])  # None, whose seed is drawn
    assert len(llm.generate([PROMPTS[0]])[0].token_ids) == 5
    same({"seed": 3}, SamplingParams(**own, seed=3))
    same({"seed": 3, "top_k": 0}, SamplingParams(**{**own, "top_k": 0}, seed=3))
    (output,) = llm.generate([PROMPTS[0]], SamplingParams(seed=3))
    assert len(output.token_ids) == 16
    beams: dict[str, Any] = {"beam_width": 2, "temperature": 0}
    same(beams, SamplingParams(**beams, max_tokens=5))
