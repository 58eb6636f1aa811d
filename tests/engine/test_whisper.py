"""Whisper's first tokens and its timestamps are those of its own `generate()`."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedModel

from tests.matrix import speculative_config
from tests.tiny_seq2seq import BINS, FRAMES, reference_outputs, tiny_seq2seq, tiny_source
from tokenleap import LLM, PromptError, SamplingParams
from tokenleap.core.references import Source
from tokenleap.models.audio import AudioReader

TOKENS = 14
GREEDY = SamplingParams(temperature=0, max_tokens=TOKENS)
NONE = 60
SETTINGS: dict[str, Any] = {
    "is_multilingual": True,
    "lang_to_id": {"<|en|>": 10, "<|de|>": 11, "<|fr|>": 12, "<|es|>": 13},
    "task_to_id": {"transcribe": 20, "translate": 21},
    "no_timestamps_token_id": NONE,
    "max_initial_timestamp_index": 9,
    "begin_suppress_tokens": [5, 91],
    "suppress_tokens": [7, 10, 11, 12, 13, 20, 21],
}
METHODS = ("none", "lookahead")


@cache
def model_of(*more: tuple[str, Any]) -> PreTrainedModel:
    model = tiny_seq2seq("whisper", seed=2)
    for name, value in {**SETTINGS, **dict(more)}.items():
        setattr(model.generation_config, name, value)
    return model


@cache
def llms(*more: tuple[str, Any]) -> list[LLM]:
    config = [speculative_config(method, num_speculative_tokens=8) for method in METHODS]
    return [LLM(model_of(*more), speculative_config=each) for each in config]


def sound(seed: int) -> Any:
    return np.random.default_rng(seed).normal(size=4000).astype(np.float32)


def check(more: tuple[tuple[str, Any], ...] = (), **given: Any) -> list[tuple[int, ...]]:
    """The first tokens, if all outputs are those of `generate()`."""
    theirs = {name: value for name, value in given.items() if name != "timestamps"}
    theirs["return_timestamps"] = given.get("timestamps")
    found = []
    for seed in range(2):
        source = Source.of_audio(AudioReader(None, BINS, FRAMES).features(sound(seed)))
        model = model_of(*more)
        expected = reference_outputs(
            model, source, TOKENS, force_unique_generate_call=True, **theirs
        )
        for llm in llms(*more):
            (output,) = llm.generate({"audio": sound(seed), **given}, GREEDY)
            assert [*output.prompt_token_ids, *output.token_ids] == expected
        found.append(output.prompt_token_ids)
    return found


@pytest.mark.parametrize(
    ("given", "first"),
    [
        ({"language": "german", "task": "translate"}, (3, 11, 21, NONE)),
        ({"language": "fr"}, (3, 12, 20, NONE)),
        ({"language": "<|es|>", "timestamps": True}, (3, 13, 20)),
        ({"language": "en", "task": "transcribe", "timestamps": False}, (3, 10, 20, NONE)),
    ],
)
def test_languages_and_tasks(given: dict[str, Any], first: tuple[int, ...]) -> None:
    assert check(**given) == [first] * 2


@pytest.mark.parametrize("given", [{}, {"task": "translate"}, {"timestamps": True}])
def test_languages_are_detected(given: dict[str, Any]) -> None:
    rest = (21,) if "task" in given else ()
    for first in check(**given):
        assert first[0] == 3
        assert first[1] in SETTINGS["lang_to_id"].values()
        assert first[2:] == (rest if given.get("timestamps") else (*rest, NONE))


@pytest.mark.parametrize(
    "more",
    [
        (("language", "de"), ("return_timestamps", True)),
        (("task", "translate"),),
        (("forced_decoder_ids", ((1, 13), (2, 21))),),
        (("forced_decoder_ids", ((1, None), (2, 20))),),
        (("lang_to_id", None), ("task_to_id", None), ("is_multilingual", False)),
    ],
)
def test_what_a_generation_config_says(more: tuple[tuple[str, Any], ...]) -> None:
    if ("lang_to_id", None) in more:  # Transformers looks whether they are there
        for name in ("lang_to_id", "task_to_id"):
            vars(model_of(*more).generation_config).pop(name, None)
    check(more)


def test_what_is_refused() -> None:
    (llm, _) = llms()
    english = llms(("is_multilingual", False))[0]
    for one, given, message in (
        (llm, {"language": "klingon"}, "language: 'klingon' is unknown to this model"),
        (llm, {"task": "sing"}, "task: must be one of transcribe, translate, got 'sing'"),
        (llm, {"timestamps": 1}, "timestamps: must be true or false"),
        (llm, {"target_language": "de"}, "audio has 'language'"),
        (llm, {"decoder_prompt": [3], "task": "translate"}, "decoder_prompt says it already"),
        (english, {"language": "en"}, "knows English only"),
    ):
        with pytest.raises(PromptError, match=message):
            one.generate({"audio": sound(0), **given}, GREEDY)
    long = np.zeros(FRAMES * 160 + 1, np.float32)
    with pytest.raises(PromptError, match=r"the encoder reads .* cut it"):
        llm.generate({"audio": long}, GREEDY)
    text = LLM(tiny_seq2seq("bart"))
    with pytest.raises(PromptError, match="language: it is for audio"):
        text.generate({"encoder_prompt": list(tiny_source().tokens), "language": "de"}, GREEDY)
