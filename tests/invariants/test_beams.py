"""Beam search finds what `generate(num_beams=...)` finds, whatever drafts, and in any batch."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.tiny import tiny_model
from tokenleap import LLM, BeamSearchParams, SamplingParams
from tokenleap.drafters.suffix import SuffixDrafter
from tokenleap.errors import CompatibilityError, ConfigError
from tokenleap.outputs import CompletionOutput
from tokenleap.runtime.attention import KEY_BLOCK

EOS = 3
PROMPTS = ([5, 9, 11, 7], [40, 41, 42, 40, 41, 42, 40, 41], [30, 8])

DRAFTERS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "prompt_lookup_min": 1},
    "suffix": {"method": "suffix"},
    "copy": {"method": "copy", "copy_min_match": 1},
    "draft_model": {"method": "draft_model"},
    "tree": {"method": "draft_model", "tree": "dynamic"},
    "cascade": {"method": "cascade", "drafter": {"method": "ngram", "prompt_lookup_min": 1}},
    "random": {"method": "random"},
}


@cache
def model_of(architecture: str) -> PreTrainedModel:
    return tiny_model(architecture, eos_token_id=EOS)


@cache
def llm_of(architecture: str = "lean") -> LLM:
    return LLM(model_of(architecture))


def found_by_generate(
    model: PreTrainedModel, prompt: list[int], width: int, max_tokens: int, **options: Any
) -> list[tuple[tuple[int, ...], float]]:
    """Outputs and scores of `generate(num_beams=width)`, best first."""
    ids = torch.tensor([prompt])
    found = model.generate(  # type: ignore[operator]
        ids,
        attention_mask=torch.ones_like(ids),
        num_beams=width,
        num_return_sequences=width,
        max_new_tokens=max_tokens,
        do_sample=False,
        eos_token_id=EOS,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    outputs = [tokens[len(prompt) :] for tokens in found.sequences.tolist()]
    ends = [tokens.index(EOS) + 1 if EOS in tokens else len(tokens) for tokens in outputs]
    cut = [tuple(tokens[:end]) for tokens, end in zip(outputs, ends, strict=True)]
    return list(zip(cut, found.sequences_scores.tolist(), strict=True))


def searched(width: int = 3, max_tokens: int = 12, **fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0, beam_width=width, max_tokens=max_tokens, **fields)


def assert_found(output: CompletionOutput, expected: list[tuple[tuple[int, ...], float]]) -> None:
    assert [beam.token_ids for beam in output.beams] == [tokens for tokens, _ in expected]
    scores = [score for _, score in expected]
    assert [beam.score for beam in output.beams] == pytest.approx(scores, abs=1e-4)
    assert output.token_ids == expected[0][0]
    assert output.finish_reason == ("stop" if output.token_ids[-1] == EOS else "length")


def assert_same(output: CompletionOutput, expected: CompletionOutput) -> None:
    """The same outputs. In trees, only the native runtime has the same bits, so scores are close.

    `test_drafts_keep_the_bits_of_the_native_runtime` compares the bits.
    """
    assert_found(output, [(beam.token_ids, beam.score) for beam in expected.beams])


@pytest.mark.parametrize("architecture", ["lean", "gpt2", "gemma", "qwen3"])
def test_all_outputs_are_those_of_generate(architecture: str) -> None:
    for prompt, width in zip(PROMPTS, (2, 4, 5), strict=True):
        (result,) = llm_of(architecture).generate([prompt], searched(width))
        expected = found_by_generate(model_of(architecture), prompt, width, 12)
        assert_found(result.outputs[0], expected)


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("length_penalty", [-0.5, 0.0, 2.0])
def test_with_every_way_to_stop(early_stopping: bool | str, length_penalty: float) -> None:
    options: dict[str, Any] = {"early_stopping": early_stopping, "length_penalty": length_penalty}
    for prompt in PROMPTS[:2]:
        (result,) = llm_of().generate([prompt], searched(4, 10, **options))
        assert_found(
            result.outputs[0], found_by_generate(model_of("lean"), prompt, 4, 10, **options)
        )


def test_masks_and_the_repetition_penalty_act_as_in_generate() -> None:
    prompt = PROMPTS[0]
    params = searched(4, min_tokens=8, repetition_penalty=1.3, logit_bias={50: 4.0})
    (result,) = llm_of().generate([prompt], params)
    options = {
        "min_new_tokens": 8,
        "repetition_penalty": 1.3,
        "sequence_bias": [[[50], 4.0]],
        "renormalize_logits": False,
    }
    expected = found_by_generate(model_of("lean"), prompt, 4, 12, **options)
    assert_found(result.outputs[0], expected)


def test_log_probabilities_are_normalised_as_in_generate() -> None:
    """After masks and penalties, if the generation config says so, or the parameters."""
    model = tiny_model("lean", eos_token_id=EOS)
    own: dict[str, Any] = {"repetition_penalty": 1.7, "min_new_tokens": 6}
    expected = [
        found_by_generate(model, PROMPTS[1], 3, 12, renormalize_logits=value, **own)
        for value in (True, False)
    ]
    assert expected[0] != expected[1]
    fields: dict[str, Any] = {"repetition_penalty": 1.7, "min_tokens": 6}
    for value, found in zip((True, False), expected, strict=True):
        params = searched(3, 12, **fields, renormalize_logits=value)
        (result,) = llm_of().generate([PROMPTS[1]], params)
        assert_found(result.outputs[0], found)
    model.generation_config.renormalize_logits = True
    (result,) = LLM(model).generate([PROMPTS[1]], searched(3, 12, **fields))
    assert_found(result.outputs[0], expected[0])


def test_a_beam_of_one_is_greedy_decoding() -> None:
    params = BeamSearchParams(beam_width=1, max_tokens=9, length_penalty=0.0)
    (found,) = llm_of().beam_search(PROMPTS[0], params)
    (result,) = llm_of().generate(
        PROMPTS[0], SamplingParams(temperature=0, max_tokens=9, logprobs=0)
    )
    (only,) = found.sequences
    assert only.tokens == (*PROMPTS[0], *result.token_ids)
    assert only.score == only.cum_logprob == result.outputs[0].cumulative_logprob


@pytest.mark.parametrize("name", ["trace", "references", "prediction", "max_tokens"])
def test_what_vllms_method_does_not_take(name: str) -> None:
    unknown: dict[str, Any] = {name: 1}
    with pytest.raises(
        ConfigError, match=rf"beam_search\(\) takes (no argument '{name}'|{name} in)"
    ):
        llm_of().beam_search(PROMPTS[0], {"beam_width": 2, "max_tokens": 3}, **unknown)


def test_vllms_method() -> None:
    """The sequences begin with the prompt."""
    width = 3
    params = BeamSearchParams(beam_width=width, max_tokens=9, length_penalty=0.5)
    ngram = {"method": "ngram", "prompt_lookup_min": 1}
    for config in (None, ngram):
        found = llm_of().beam_search(list(PROMPTS), params, speculative_config=config)
        for prompt, output in zip(PROMPTS, found, strict=True):
            expected = found_by_generate(model_of("lean"), prompt, width, 9, length_penalty=0.5)
            tokens = [each.tokens for each in output.sequences]
            assert tokens == [(*prompt, *text) for text, _ in expected]
            for each, (text, score) in zip(output.sequences, expected, strict=True):
                assert each.score == pytest.approx(score, abs=1e-4)
                assert each.cum_logprob == pytest.approx(score * len(text) ** 0.5, abs=1e-4)
                assert each.finish_reason == ("stop" if text[-1] == EOS else "length")


def test_wrong_parameters_of_vllms_method() -> None:
    with pytest.raises(ConfigError, match="temperature"):
        BeamSearchParams(beam_width=2, max_tokens=4, temperature=1.0)
    with pytest.raises(ConfigError, match="beam_width"):
        BeamSearchParams(max_tokens=4)  # type: ignore[call-arg]


def test_the_models_own_options_are_the_defaults() -> None:
    model = tiny_model("lean", eos_token_id=EOS)
    model.generation_config.length_penalty = 2.0
    model.generation_config.early_stopping = True
    llm = LLM(model)
    own = {"length_penalty": 2.0, "early_stopping": True}
    params = [searched(), searched(length_penalty=0.0)]
    for result, options in zip(
        llm.generate([PROMPTS[1]] * 2, params), (own, {**own, "length_penalty": 0.0}), strict=True
    ):
        expected = found_by_generate(model_of("lean"), PROMPTS[1], 3, 12, **options)
        assert_found(result.outputs[0], expected)


@pytest.mark.parametrize("name", DRAFTERS)
def test_drafts_change_only_the_number_of_passes(name: str) -> None:
    config = {**DRAFTERS[name], "num_speculative_tokens": 3}
    if "model" in name or name in ("tree", "cascade"):
        config["model"] = tiny_model("lean", eos_token_id=EOS, num_hidden_layers=1)
    drafting = LLM(model_of("lean"), speculative_config=config)
    plain = llm_of().generate(PROMPTS, searched())
    drafted = drafting.generate(PROMPTS, searched())
    for expected, result in zip(plain, drafted, strict=True):
        assert_same(result.outputs[0], expected.outputs[0])
        assert result.metrics.drafter_failure is None
        saved = expected.metrics.target_passes - result.metrics.target_passes
        assert result.metrics.num_accepted_tokens == saved
    assert sum(result.metrics.num_draft_tokens for result in drafted) > 0


def test_a_draft_model_that_is_the_target_saves_passes() -> None:
    config = {
        "method": "draft_model",
        "model": tiny_model("lean", eos_token_id=EOS),
        "num_speculative_tokens": 3,
    }
    plain, drafted = (
        llm_of().generate([PROMPTS[0]], searched(max_tokens=16), speculative_config=given)[0]
        for given in (None, config)
    )
    assert_same(drafted.outputs[0], plain.outputs[0])
    assert drafted.metrics.target_passes <= -(-plain.metrics.target_passes // 4)


def test_drafts_that_save_nothing_become_rare() -> None:
    params = searched(3, 70, ignore_eos=True)
    config = {"method": "random", "num_speculative_tokens": 2}
    (result,) = llm_of().generate([PROMPTS[0]], params, speculative_config=config)
    assert result.metrics.num_accepted_tokens == 0, "the seed of the test is unlucky"
    # At the steps 0, 1, 3, 7, 15, 31 and 63.
    assert (result.metrics.target_passes, result.metrics.num_drafts) == (70, 7)


def test_abandoned_beams_are_no_earlier_outputs() -> None:
    llm = LLM(tiny_model(), speculative_config={"method": "suffix", "num_speculative_tokens": 3})
    params = SamplingParams(temperature=0, beam_width=8, max_tokens=40, ignore_eos=True)
    llm.generate([[40, 41, 42, 40, 41, 42, 40, 41]], params)
    drafter = llm.engine._speculation.default.drafter
    assert isinstance(drafter, SuffixDrafter)
    assert not drafter._earlier.num_tokens


def test_drafts_keep_the_bits_of_the_native_runtime() -> None:
    model = tiny_model("llama", eos_token_id=EOS)
    llm = LLM(model)
    if llm.runtime != "native":
        pytest.skip("no native runtime here")
    config = {"method": "draft_model", "model": model, "num_speculative_tokens": 3}
    plain, drafted = (
        llm.generate(PROMPTS, searched(4, 20), speculative_config=given) for given in (None, config)
    )
    assert [r.outputs[0].beams for r in drafted] == [r.outputs[0].beams for r in plain]
    assert sum(result.metrics.num_accepted_tokens for result in drafted) > 0


def test_a_batch_of_searches_and_samples() -> None:
    greedy = SamplingParams(temperature=0, max_tokens=14)
    sampled = SamplingParams(seed=1, max_tokens=9)
    params = [searched(2), greedy, searched(4, 20), sampled, searched(3, 5)]
    prompts = [*PROMPTS, [8, 8, 8], [12] * 30]
    together = llm_of().generate(prompts, params)
    for prompt, own, result in zip(prompts, params, together, strict=True):
        (alone,) = llm_of().generate([prompt], own)
        assert result.token_ids == alone.token_ids
        assert result.outputs[0].beams == alone.outputs[0].beams


def test_preempted_searches_find_the_same() -> None:
    model = tiny_model(eos_token_id=EOS, max_position_embeddings=2 * KEY_BLOCK)
    free = LLM(model)
    prompts = [[(7 * i + row) % 90 + 4 for i in range(KEY_BLOCK - 12)] for row in range(3)]
    cells = 3 * KEY_BLOCK
    tight = LLM(model, kv_cache_memory=cells * free.engine.target.cell_bytes)
    params = searched(3, 24)
    expected, found = free.generate(prompts, params), tight.generate(prompts, params)
    assert sum(result.metrics.preemptions for result in found) > 0
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.outputs[0].beams == theirs.outputs[0].beams


def test_a_stream_has_the_tokens_of_the_best_output() -> None:
    chunks = list(llm_of().stream(PROMPTS[0], searched()))
    tokens = tuple(token.token_id for chunk in chunks for token in chunk.tokens)
    assert chunks[-1].output is not None
    assert tokens == chunks[-1].output.token_ids == chunks[-1].output.beams[0].token_ids


def test_what_cannot_be_searched_is_refused() -> None:
    llm = llm_of()
    with pytest.raises(ConfigError, match="beam_width: at most 48"):
        llm.generate([PROMPTS[0]], searched(49))
    with pytest.raises(ConfigError, match="trace: a beam search has none"):
        llm.generate([PROMPTS[0]], searched(), trace=True)
    for method in ("early_exit", "recycle", "lookahead"):
        with pytest.raises(CompatibilityError, match=r"beam_width: .* draft with a text method"):
            llm.generate([PROMPTS[0]], searched(), speculative_config={"method": method})
