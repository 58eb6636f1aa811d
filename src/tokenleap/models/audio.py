"""From recorded samples to the features that Whisper's encoder reads."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from torch import Tensor
from transformers import WhisperFeatureExtractor

from tokenleap.errors import PromptError
from tokenleap.models.guard import guarded

__all__ = ["AudioReader"]

_Samples: TypeAlias = np.ndarray[Any, np.dtype[np.float32]]


class AudioReader:
    """Computes the features of one recording.

    Args:
        folder: the model's, which may say how; None, or one that does not, takes Whisper's own way.
        num_bins: height of the features.
        num_frames: their length. Shorter audio is followed by silence.

    Raises:
        ModelError: the folder's file is damaged.
    """

    def __init__(self, folder: Path | None, num_bins: int, num_frames: int) -> None:
        self._num_frames = num_frames
        kind: Any = WhisperFeatureExtractor
        self._extractor = kind(feature_size=num_bins)
        if folder is not None and (folder / "preprocessor_config.json").is_file():
            with guarded(f"cannot load the feature extractor in {folder}"):
                self._extractor = kind.from_pretrained(folder, local_files_only=True)

    def features(self, audio: Any) -> Tensor:
        """The features, float32 [bins, frames].

        Args:
            audio: samples [n] between -1 and 1, or a pair of them and the samples per second.

        Raises:
            PromptError: the audio is malformed, too long, or has another rate than the model's.
        """
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
    """The samples as an array.

    Raises:
        PromptError: they are not finite numbers in one dimension, or integers, or there are none.
    """
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
