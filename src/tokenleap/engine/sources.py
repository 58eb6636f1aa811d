"""The prompts of encoder-decoders: what the encoder reads, and how the decoder's text begins.

A plain prompt is the source. A mapping may have vLLM's `encoder_prompt` and `decoder_prompt`, the
languages of a translation, or audio.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from tokenleap.core.config import nearest
from tokenleap.core.references import Source
from tokenleap.core.rules import Timestamps
from tokenleap.core.tree import chain
from tokenleap.engine.prompts import (
    SALT,
    Prompt,
    checked_ids,
    checked_text,
    is_conversation,
    needed,
    token_ids,
)
from tokenleap.errors import PromptError
from tokenleap.models.audio import AudioReader, WhisperStart
from tokenleap.runtime.passes import INTERNAL_KEY
from tokenleap.runtime.target import Target

__all__ = ["SourcePrompt", "SourceReader", "languages"]

TEXTS = ("prompt", "prompt_token_ids")
SOURCES = ("encoder_prompt", *TEXTS, "audio")
"""Keys of a prompt that say what the encoder reads; a prompt has one of them."""

OF_SPEECH = ("language", "task", "timestamps")
"""Further keys for audio; see `WhisperStart`."""

KEYS = (*SOURCES, "decoder_prompt", "source_language", "target_language", *OF_SPEECH)

LANGUAGE = re.compile(r"[a-z]{2,3}_[A-Za-z]{2,4}")
"""A language in the vocabularies of mBART and NLLB, such as de_DE or deu_Latn."""

_TOKENIZING = Lock()
"""Held while a tokenizer has the source language of one prompt."""


@dataclass(frozen=True)
class SourcePrompt:
    """A prompt of an encoder-decoder, taken apart.

    Args:
        decoder: the decoder's prompt as text or token ids, or None.
    """

    source: Any
    audio: Any = None
    decoder: Any = None
    source_language: Any = None
    target_language: Any = None
    language: Any = None
    task: Any = None
    timestamps: Any = None

    @staticmethod
    def of(prompt: Prompt) -> SourcePrompt:
        """Take a prompt apart."""
        if not isinstance(prompt, Mapping):
            return SourcePrompt(prompt)
        _check_keys(prompt, (*KEYS, SALT))
        name = _only_key(prompt, SOURCES)
        given = prompt[name]
        if name == "encoder_prompt" and isinstance(given, Mapping):
            _check_keys(given, SOURCES[1:])
            name = _only_key(given, SOURCES[1:])
            given = given[name]
        rest = {key: prompt.get(key) for key in KEYS[len(SOURCES) + 1 :]}
        decoder = _decoder_prompt(prompt.get("decoder_prompt"))
        if name == "audio":
            return SourcePrompt(None, given, decoder, **rest)
        return SourcePrompt(_of_kind(name, given), None, decoder, **rest)

    @property
    def text(self) -> str | None:
        """The source, if it was given as text."""
        return self.source if isinstance(self.source, str) else None

    @property
    def decoder_text(self) -> str | None:
        """The decoder's prompt, if it was given as text."""
        return self.decoder if isinstance(self.decoder, str) else None


@dataclass(frozen=True)
class SourceReader:
    """Reads prompts for one encoder-decoder."""

    target: Target
    tokenizer: PreTrainedTokenizerBase | None
    start: int
    audio: AudioReader | None = None
    speech: WhisperStart | None = None
    take_turn: Callable[[Callable[[], object]], None] | None = None

    def read(self, prompt: Prompt) -> tuple[Source, tuple[int, ...]]:
        """The source and the decoder's first tokens."""
        parts = SourcePrompt.of(prompt)
        source = self._source(parts)
        check_source(source, self.target)
        if self.speech is None:
            return source, self._decoder_ids(parts)
        return source, self._speech_ids(parts, source, self.speech)

    def timestamps(self, prompt: Prompt) -> Timestamps | None:
        """The rule of timestamps, if the output of a prompt has them."""
        if self.speech is None or not self._wants_timestamps(SourcePrompt.of(prompt), self.speech):
            return None
        return self.speech.timestamps

    # The encoder's part

    def _source(self, parts: SourcePrompt) -> Source:
        if self.audio is None and parts.audio is not None:
            raise PromptError("this model reads text, not audio.")
        if self.audio is None:
            for key in OF_SPEECH:
                if getattr(parts, key) is not None:
                    raise PromptError(f"{key}: it is for audio, and this model reads text.")
        if self.audio is not None:
            if parts.audio is None:
                raise PromptError('this model reads audio: pass {"audio": samples}.')
            if parts.source_language is not None:
                raise PromptError("source_language: audio has none: leave it out.")
            return Source.of_audio(self.audio.features(parts.audio))
        return Source(tuple(self._source_ids(parts)))

    def _source_ids(self, parts: SourcePrompt) -> Sequence[int]:
        if parts.text is not None:
            return self._text_ids(parts.text, parts.source_language)
        if parts.source_language is not None:
            raise PromptError("source_language: it marks text, and this source is no text.")
        if is_conversation(parts.source):
            return token_ids(parts.source, self.tokenizer)
        return checked_ids(parts.source)

    def _text_ids(self, text: str, language: Any) -> Sequence[int]:
        if not text.strip():
            raise PromptError("the source is empty: give at least one word to read.")
        with self._reading(language):
            ids: list[int] = needed(self.tokenizer)(checked_text("source", text))["input_ids"]
        return ids

    @contextmanager
    def _reading(self, language: Any) -> Iterator[None]:
        """Let the tokenizer mark sources of this language; None keeps its own."""
        if language is not None:
            self._language_id("source_language", language)
        tokenizer: Any = self.tokenizer
        with _TOKENIZING:
            before = getattr(tokenizer, "src_lang", None)
            try:
                if language is not None:
                    tokenizer.src_lang = language
                yield
            finally:
                if language is not None:
                    tokenizer.src_lang = before

    # The decoder's part

    def _wants_timestamps(self, parts: SourcePrompt, speech: WhisperStart) -> bool:
        wanted = parts.timestamps
        if not isinstance(wanted, bool | None):
            raise PromptError(f"timestamps: must be true or false, got {wanted!r}.")
        if wanted is None:
            return speech.return_timestamps and parts.decoder is None
        return wanted

    def _speech_ids(
        self, parts: SourcePrompt, source: Source, speech: WhisperStart
    ) -> tuple[int, ...]:
        """The first tokens of what a recording says, unless they are given.

        An earlier text stands before them, as `generate()` has it.
        """
        wanted = self._wants_timestamps(parts, speech)
        if parts.target_language is not None:
            raise PromptError("target_language: audio has 'language', of the speech, and 'task'.")
        if given := self._given_ids(parts):
            for key in ("language", "task"):
                if getattr(parts, key) is not None:
                    raise PromptError(f"{key}: decoder_prompt says it already: leave one out.")
            return given
        detect = partial(self._detected, source)
        return speech.tokens(parts.language, parts.task, detect, timestamps=wanted)

    def _detected(self, source: Source, tokens: Sequence[int]) -> int:
        """The most probable of these tokens after the first one, by a pass over own rows."""
        found = list[int]()

        def detect() -> None:
            target = self.target.with_own_rows()
            with torch.inference_mode():
                target.add(INTERNAL_KEY)
                target.encode(INTERNAL_KEY, source)
                (output,) = target.verify([INTERNAL_KEY], [chain([self.start])])
            ids = torch.tensor(tokens, device=output.scores.device)
            found.append(tokens[int(output.scores[0][ids].argmax())])

        assert self.take_turn is not None, "the engine gives it to readers of audio"
        self.take_turn(detect)
        return found[0]

    def _decoder_ids(self, parts: SourcePrompt) -> tuple[int, ...]:
        """The decoder's prompt after its start token, which `generate()` puts there, too."""
        ids = self._given_ids(parts)
        start = self._start(parts.target_language)
        if ids[: len(start)] == start:
            return ids
        return start + (ids[1:] if ids[:1] == (self.start,) else ids)

    def _given_ids(self, parts: SourcePrompt) -> tuple[int, ...]:
        if parts.decoder is None:
            return ()
        if parts.decoder_text is None:
            return tuple(checked_ids(parts.decoder))
        tokenizer = needed(self.tokenizer)
        return tuple(tokenizer(parts.decoder_text, add_special_tokens=False)["input_ids"])

    def _start(self, language: Any) -> tuple[int, ...]:
        if language is None:
            return (self.start,)
        token = self._language_id("target_language", language)
        if self.start in languages(self.tokenizer).values():
            return (token,)  # the first mBART: its decoder starts with the language
        return (self.start, token)

    def _language_id(self, field: str, language: Any) -> int:
        """The token of a language."""
        known = languages(needed(self.tokenizer))
        if not known:
            raise PromptError(
                f"{field}: this tokenizer has no tokens of languages: leave it out, and say the "
                "language in the text if the model was trained so."
            )
        if not isinstance(language, str) or language not in known:
            raise PromptError(
                f"{field}: the language {language!r} is unknown to this tokenizer: "
                f"{nearest(str(language), list(known))}"
            )
        return known[language]


def check_source(source: Source, target: Target) -> None:
    """Refuse a source that the target's encoder cannot read."""
    network = target.source_network
    assert network is not None, "the model is an encoder-decoder"
    if not len(source):
        raise PromptError("the source is empty: give at least one token to read.")
    if network.source_limit is not None and len(source) > network.source_limit:
        raise PromptError(
            f"the source has {len(source)} tokens and the encoder takes {network.source_limit}: "
            "shorten it."
        )
    highest = network.source_vocab_size - 1
    for token in source.tokens:
        if not 0 <= token <= highest:
            raise PromptError(
                f"token id {token} of the source is outside the vocabulary (0 to {highest})."
            )
    if target.most_tokens_beside(target.state_bytes(source)) < 2:
        raise PromptError(
            f"kv_cache_memory has no room for a source of {len(source)} tokens: shorten it, or "
            "raise kv_cache_memory."
        )


def languages(tokenizer: PreTrainedTokenizerBase | None) -> Mapping[str, int]:
    """Language -> token id, of a tokenizer that marks sources; empty for any other."""
    if tokenizer is None or not hasattr(tokenizer, "src_lang"):
        return {}
    named: Mapping[str, int] | None = getattr(tokenizer, "lang_code_to_id", None)
    if named is not None:
        return named
    added = tokenizer.get_added_vocab()
    return {token: number for token, number in added.items() if LANGUAGE.fullmatch(token)}


def _decoder_prompt(given: Any) -> Any:
    if not isinstance(given, Mapping):
        return given
    _check_keys(given, TEXTS)
    name = _only_key(given, TEXTS)
    return _of_kind(name, given[name])


def _of_kind(name: str, given: Any) -> Any:
    """Check that the value of a key is what the key says."""
    if name == "prompt_token_ids":
        return checked_ids(given)
    if name == "prompt" and not isinstance(given, str):
        raise PromptError("prompt: expected text; token ids are 'prompt_token_ids'.")
    return given


def _only_key(fields: Mapping[str, Any], known: Sequence[str]) -> str:
    found = [key for key in known if key in fields]
    if len(found) != 1:
        number = "none" if not found else " and ".join(found)
        raise PromptError(f"a prompt has one of {', '.join(known)}; this one has {number}.")
    return found[0]


def _check_keys(fields: Mapping[str, Any], known: Sequence[str]) -> None:
    for key in fields:
        if key not in known:
            raise PromptError(f"a prompt has no {key!r}: {nearest(str(key), list(known))}")
