"""From recorded samples to the features that Whisper's encoder reads."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from torch import Tensor
from transformers import GenerationConfig, WhisperFeatureExtractor
from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

from tokenleap.core.config import nearest
from tokenleap.core.rules import Timestamps
from tokenleap.errors import CompatibilityError, PromptError
from tokenleap.models.load import guarded

_Samples: TypeAlias = np.ndarray[Any, np.dtype[np.float32]]


class AudioReader:
    """Computes the features of one recording, as the folder says or else Whisper's own way."""

    def __init__(self, folder: Path | None, num_bins: int, num_frames: int) -> None:
        self._num_frames = num_frames
        kind: Any = WhisperFeatureExtractor
        self._extractor = kind(feature_size=num_bins)
        if folder is not None and (folder / "preprocessor_config.json").is_file():
            with guarded(f"cannot load the feature extractor in {folder}"):
                self._extractor = kind.from_pretrained(folder, local_files_only=True)

    def features(self, audio: Any) -> Tensor:
        """The features, float32 [bins, frames]."""
        rate = self._extractor.sampling_rate
        samples, given = audio if isinstance(audio, tuple) and len(audio) == 2 else (audio, rate)
        if given != rate:
            raise PromptError(
                f"audio: the model takes {rate} samples per second, got {given!r}: resample it."
            )
        numbers = _checked_samples(samples)
        most = self._num_frames * self._extractor.hop_length
        if len(numbers) > most:
            raise PromptError(
                f"the audio takes {len(numbers) / rate:.1f} s and the encoder reads "
                f"{most / rate:.1f} s: cut it."
            )
        features: Tensor = self._extractor(
            numbers,
            sampling_rate=rate,
            max_length=most,
            padding="max_length",
            truncation=False,
            return_tensors="pt",
        ).input_features[0]
        return features


def _checked_samples(samples: Any) -> _Samples:
    try:
        given = np.asarray(samples)
        numbers = given.astype(np.float32)
    except (TypeError, ValueError, RuntimeError):
        raise PromptError("audio: expected an array of samples, or a pair (array, rate).") from None
    if np.issubdtype(given.dtype, np.integer):
        raise PromptError(
            "audio: expected samples between -1 and 1, got integers: divide 16-bit ones by 32768."
        )
    if numbers.ndim != 1:
        raise PromptError(
            f"audio: expected samples in one dimension, got {numbers.ndim} dimensions: mix the "
            "channels into one."
        )
    if not len(numbers):
        raise PromptError("the audio is empty: give at least one sample.")
    if not math.isfinite(float(np.abs(numbers).max())):
        raise PromptError("audio: the samples have values that are not finite.")
    return numbers


# How Whisper's output begins: its language, its task, and whether it has timestamps.
#
# The tokens are those of `WhisperForConditionalGeneration.generate` for one window of audio.


TASKS = ("transcribe", "translate")


@dataclass(frozen=True)
class WhisperStart:
    """The fields of a generation config about the first tokens, under its own names."""

    start: int
    language: str | None
    task: str | None
    lang_to_id: Mapping[str, int]
    task_to_id: Mapping[str, int]
    is_multilingual: bool
    forced: tuple[int | None, ...]  # without language and task; None is a language to detect
    timestamps: Timestamps | None
    return_timestamps: bool

    @staticmethod
    def of(start: int, config: Any, model_config: Any) -> WhisperStart:
        none = getattr(config, "no_timestamps_token_id", None)
        most = getattr(config, "max_initial_timestamp_index", None)
        listed = getattr(config, "forced_decoder_ids", None) or getattr(
            model_config, "forced_decoder_ids", None
        )
        forced = [token for place, (at, token) in enumerate(listed or (), 1) if at == place]
        return WhisperStart(
            start,
            getattr(config, "language", None),
            getattr(config, "task", None),
            getattr(config, "lang_to_id", None) or {},
            getattr(config, "task_to_id", None) or {},
            getattr(config, "is_multilingual", True) is not False,
            tuple(forced),
            None if none is None else Timestamps(none, most),
            bool(getattr(config, "return_timestamps", False)),
        )

    def tokens(
        self, language: Any, task: Any, detect: Callable[[Sequence[int]], int], *, timestamps: bool
    ) -> tuple[int, ...]:
        if not self.is_multilingual and (language is not None or task is not None):
            raise PromptError("language and task: this model knows English only: leave them out.")
        if timestamps and self.timestamps is None:
            raise PromptError("timestamps: this model has none: leave it out.")
        language = self.language if language is None else language
        task = self.task if task is None else task
        tokens: list[int | None] = [self.start]
        if language is None and task is None:
            tokens += self.forced
        if language is not None:
            tokens[1:2] = [self._language_id(language)]
        elif self.lang_to_id and (len(tokens) == 1 or tokens[1] is None):
            tokens[1:2] = [detect(sorted(self.lang_to_id.values()))]
        if task is not None:
            tokens.append(self._task_id(task))
        elif language is not None and self.task_to_id and not self._names_task(tokens):
            tokens.append(self._task_id(TASKS[0]))
        none = None if self.timestamps is None else self.timestamps.none
        if none is not None and timestamps == (tokens[-1] == none):
            tokens = tokens[:-1] if timestamps else [*tokens, none]
        return tuple(token for token in tokens if token is not None)

    def _language_id(self, language: Any) -> int:
        if not self.lang_to_id:
            raise PromptError("language: this model's generation config has no languages.")
        name = str(language).lower()
        for token in (name, f"<|{TO_LANGUAGE_CODE.get(name, name)}|>"):
            if token in self.lang_to_id:
                return self.lang_to_id[token]
        known = [token.strip("<|>") for token in self.lang_to_id]
        advice = nearest(name, known)
        raise PromptError(f"language: {language!r} is unknown to this model: {advice}")

    def _names_task(self, tokens: Sequence[int | None]) -> bool:
        return bool(set(tokens) & set(self.task_to_id.values()))

    def _task_id(self, task: Any) -> int:
        if task not in TASKS or task not in self.task_to_id:
            known = [name for name in TASKS if name in self.task_to_id]
            raise PromptError(f"task: must be one of {', '.join(known) or 'none'}, got {task!r}.")
        return self.task_to_id[task]


def decoder_start(model: Any, config: GenerationConfig | None = None) -> int:
    """The first token of the decoder's text, chosen as `generate()` does."""
    settings: tuple[Any, ...] = (config or model.generation_config, model.config)
    for name in ("decoder_start_token_id", "bos_token_id"):
        for each in settings:
            token = getattr(each, name, None)
            if isinstance(token, int):
                return token
    raise CompatibilityError(
        f"{type(model).__name__} has no decoder_start_token_id: set it in generation_config.json, "
        "or in the model's generation_config."
    )
