"""How Whisper's output begins: its language, its task, and whether it has timestamps.

The tokens are those of `WhisperForConditionalGeneration.generate` for one window of audio.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

from tokenleap.core.config import nearest
from tokenleap.core.rules import Timestamps
from tokenleap.errors import PromptError

__all__ = ["WhisperStart"]

TASKS = ("transcribe", "translate")


@dataclass(frozen=True)
class WhisperStart:
    """The fields of a generation config about the first tokens, under its own names.

    Args:
        start: the first token.
        language, task: of recordings that do not say theirs, or None.
        lang_to_id, task_to_id: their tokens; empty if the model has none.
        is_multilingual: whether a recording may say its language and task.
        forced: tokens after the first one, if neither language nor task is given; None is a
            language to detect.
        timestamps: the rule of outputs with timestamps; None if the model has none.
        return_timestamps: whether outputs have them unless a recording says so.
    """

    start: int
    language: str | None
    task: str | None
    lang_to_id: Mapping[str, int]
    task_to_id: Mapping[str, int]
    is_multilingual: bool
    forced: tuple[int | None, ...]
    timestamps: Timestamps | None
    return_timestamps: bool

    @staticmethod
    def of(start: int, config: Any, model_config: Any) -> WhisperStart:
        """The settings of a generation config and a model's config."""
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
        """The first tokens.

        Args:
            language: of the speech, as a name, a code or a token; None takes the model's.
            task: "transcribe" or "translate"; None takes the model's.
            detect: which of these tokens is the language of the recording.
            timestamps: whether the output has them.

        Raises:
            PromptError: the model has no such language or task, or no timestamps.
        """
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
