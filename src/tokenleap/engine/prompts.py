"""The forms in which a user may give prompts, and their conversion to token ids."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any, NamedTuple, NotRequired, TypeAlias, TypedDict

import torch
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from tokenleap.core.config import Config, nearest
from tokenleap.core.params import SamplingParams
from tokenleap.core.references import NO_REFERENCES, References, Source
from tokenleap.core.rules import Timestamps
from tokenleap.core.tree import chain
from tokenleap.drafters.base import Drafter
from tokenleap.errors import (
    CompatibilityError,
    ConfigError,
    PromptError,
    in_one_line,
    is_failure,
)
from tokenleap.models.audio import AudioReader, WhisperStart, decoder_start
from tokenleap.models.chat_template import knows_tools, rendered, without_tools
from tokenleap.models.loaded import LoadedModel
from tokenleap.runtime.passes import INTERNAL_KEY
from tokenleap.runtime.target import Target

Message: TypeAlias = Mapping[str, Any]
"""A chat message: {"role": ..., "content": ...}."""


class TextPrompt(TypedDict):
    """A prompt as text, under vLLM's names."""

    prompt: str
    cache_salt: NotRequired[str]
    """Requests with different salts share nothing that is kept between requests."""


class TokensPrompt(TypedDict):
    """A prompt as token ids, under vLLM's names."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]
    """Their text, for the result; it is not read."""
    cache_salt: NotRequired[str]


class ChatPrompt(TypedDict):
    """A conversation and how it is formatted, as `LLM.chat` takes it (see `conversation_text`)."""

    messages: Sequence[Message]
    tools: NotRequired[Sequence[Mapping[str, Any]] | None]
    chat_template: NotRequired[str | None]
    chat_template_kwargs: NotRequired[Mapping[str, Any] | None]
    add_generation_prompt: NotRequired[bool | None]
    continue_final_message: NotRequired[bool | None]
    cache_salt: NotRequired[str]


Prompt: TypeAlias = str | Sequence[int] | Sequence[Message] | Mapping[str, Any]
"""Text, token ids, or a conversation. For an encoder-decoder it is the source; a mapping may say
more (see `SourceReader`)."""

FORMS = "a prompt is text, a list of token ids, or a list of chat messages"
"""The prompts of decoder-only models, for error messages."""


NO_CONVERSATION = 'messages: a conversation is a list of {"role": ..., "content": ...}.'

SALT = "cache_salt"
"""Key of a prompt: requests with different salts share nothing that is kept between requests."""


def cache_salt(prompt: Prompt) -> str | None:
    """The salt of a prompt; None if it has none."""
    if not isinstance(prompt, Mapping) or SALT not in prompt:
        return None
    salt = prompt[SALT]
    if not isinstance(salt, str) or not salt:
        raise PromptError(f"{SALT}: expected a text that is not empty.")
    return salt


def is_conversation(prompt: Any) -> bool:
    """Whether a prompt is a list of chat messages."""
    listed = isinstance(prompt, Sequence) and not isinstance(prompt, str) and len(prompt) > 0
    return listed and all(isinstance(m, Mapping) and "role" in m for m in prompt)


def as_list(prompts: Any) -> list[Any]:
    """The prompts as a list.

    A string, a mapping, a conversation and a list of token ids each count as one prompt.
    """
    if isinstance(prompts, str | Mapping) or is_conversation(prompts):
        return [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes | bytearray):
        how = ": decode it first" if isinstance(prompts, bytes | bytearray) else ""
        if hasattr(prompts, "tolist"):  # a tensor or an array
            how = ": call its tolist()"
        kind = type(prompts).__name__
        raise PromptError(f"prompts: expected text or a list, got {kind}{how}.")
    if len(prompts) > 0 and all(isinstance(item, int) for item in prompts):
        return [prompts]
    return list(prompts)


def one_per_prompt(name: str, prompts: Sequence[Prompt], given: Any) -> list[Any]:
    """One value for each prompt."""
    if given is None or isinstance(given, Config | Mapping):
        return [given] * len(prompts)
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise ConfigError(
            f"{name}: expected one for all prompts, or a list with one per prompt, got {given!r}."
        )
    if len(given) != len(prompts):
        raise ConfigError(
            f"{name}: {len(given)} given for {len(prompts)} prompts: give one for all, or one per "
            "prompt."
        )
    return list(given)


class Opening(NamedTuple):
    """A prompt as a request begins with it.

    Args:
        ids: its tokens; of an encoder-decoder, the decoder's first ones.
        text: their text, if the prompt is text or a conversation, else None.
        source: what the encoder reads; None for a decoder-only model.
        source_text: its text, if it was given as text.
    """

    ids: Sequence[int]
    text: str | None = None
    source: Source | None = None
    source_text: str | None = None


def read_prompt(prompt: Prompt, tokenizer: PreTrainedTokenizerBase | None) -> Opening:
    """Read a prompt of a decoder-only model; the chat template formats conversations."""
    if isinstance(prompt, Mapping):
        return _opening_of(prompt, tokenizer)
    if isinstance(prompt, str):
        text = checked_text("prompt", prompt)
        return Opening(tokens_of(needed(tokenizer), text, add_special_tokens=True), prompt)
    if not is_conversation(prompt):
        return Opening(checked_ids(prompt))
    return _of_conversation(prompt, tokenizer)


def _of_conversation(
    messages: Any, tokenizer: PreTrainedTokenizerBase | None, **template: Any
) -> Opening:
    text = conversation_text(messages, tokenizer, **template)
    return Opening(tokens_of(needed(tokenizer), text), text)


def conversation_text(
    messages: Sequence[Message],
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    chat_template: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool | None = None,
) -> str:
    """The text of a conversation, which the model's chat template formats.

    A template that has no tools gets them in a system message, and calls and results as text.

    Args:
        tools: functions that the model may call, as in OpenAI's API.
        chat_template: another template (Jinja) than the tokenizer's.
        chat_template_kwargs: variables of the template.
        add_generation_prompt: end with the beginning of the assistant's turn; None does so unless
            the final message is continued.
        continue_final_message: leave the final message open, so that the output continues it.
    """
    tokenizer = needed(tokenizer)
    template = chat_template or tokenizer.chat_template
    if not template:
        raise PromptError("this model has no chat template: pass text instead of messages.")
    if add_generation_prompt and continue_final_message:
        raise ConfigError("continue_final_message: it and add_generation_prompt contradict.")
    generates = (
        not continue_final_message if add_generation_prompt is None else add_generation_prompt
    )
    arguments = dict(chat_template_kwargs or {})
    if arguments:
        _check_template_arguments(arguments, tokenizer)
    listed = [_as_templates_read(message) for message in messages]
    if not all(isinstance(tool, Mapping) for tool in tools or ()):
        raise PromptError('tools: expected a list of {"type": "function", "function": {...}}.')
    if continue_final_message:
        arguments["continue_final_message"] = True
    if chat_template:
        arguments["chat_template"] = chat_template
    try:
        if not knows_tools(template):
            listed = without_tools(listed, tools or ())
        elif tools:
            arguments["tools"] = list(tools)
        text = rendered(tokenizer, listed, add_generation_prompt=generates, **arguments)
    except TemplateError as error:  # a template may refuse roles or their order
        raise PromptError(f"the model's chat template refuses this: {error}") from error
    except RecursionError:
        raise PromptError("messages or tools are nested too deeply.") from None
    except (TypeError, ValueError, KeyError, AttributeError) as error:  # raised inside it
        raise PromptError(
            f"the model's chat template cannot format this: {in_one_line(error)}"
        ) from error
    return checked_text("messages", text)


def _check_template_arguments(given: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> None:
    functions = (tokenizer.apply_chat_template, render_jinja_template, rendered)
    own = {"self", *(name for each in functions for name in inspect.signature(each).parameters)}
    if taken := sorted(own & set(given)):
        raise ConfigError(f"chat_template_kwargs: '{taken[0]}' is not a template's.")


def tokens_of(
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    *,
    in_output: bool = False,
    add_special_tokens: bool = False,
) -> list[int]:
    """The tokens of a text; without special tokens, as it stands inside another one.

    Args:
        in_output: whether it is a part of what an encoder-decoder writes. Some split that in
            another way than their sources.
    """
    texts = {"text_target": text} if in_output else {"text": text}
    try:
        # `verbose` would warn of texts longer than the model's context, which does not read them.
        made = tokenizer(**texts, add_special_tokens=add_special_tokens, verbose=False)
    except BaseException as error:
        if not is_failure(error):
            raise
        raise PromptError(f"the tokenizer cannot read this: {in_one_line(error)}") from error
    ids: list[int] = made["input_ids"]
    return ids


def _opening_of(prompt: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase | None) -> Opening:
    """Read a mapping: `TextPrompt`, `TokensPrompt` or `ChatPrompt`."""
    given = {key: value for key, value in prompt.items() if key != SALT}
    if "input_ids" in given:
        raise PromptError("prompts: pass text, or a tokenizer's ids as {'prompt_token_ids': ids}.")
    if "multi_modal_data" in given:
        raise PromptError("multi_modal_data: this model takes text only.")
    if "messages" in given:
        _check_keys(prompt, (*ChatPrompt.__annotations__, SALT))
        messages = given.pop("messages")
        if not is_conversation(messages):
            raise PromptError(NO_CONVERSATION)
        return _of_conversation(messages, tokenizer, **given)
    text, ids = given.pop("prompt", None), given.pop("prompt_token_ids", None)
    if given or (text is None and ids is None):
        raise PromptError(
            f"this model has no encoder: {FORMS}, or a mapping with 'prompt', 'prompt_token_ids' "
            "or 'messages'."
        )
    if not isinstance(text, str | None):
        raise PromptError("prompt: expected text; token ids are 'prompt_token_ids'.")
    if ids is not None:
        return Opening(checked_ids(ids), text)
    return read_prompt(text or "", tokenizer)


def checked_text(name: str, text: str) -> str:
    """A text that has an encoding."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(
            f"{name}: half of a character at position {error.start} (a lone surrogate, "
            f"U+{ord(text[error.start]):04X}): decode its bytes with errors='replace'."
        ) from None
    return text


def _as_templates_read(message: Message) -> dict[str, Any]:
    """A message with one text; developers are systems, and arguments of calls are objects."""
    message = _with_text(message)
    if message["role"] == "developer":
        message["role"] = "system"
    if calls := message.get("tool_calls"):
        message["tool_calls"] = [_with_arguments(call) for call in calls]
    return message


def _with_arguments(call: Any) -> dict[str, Any]:
    """A call whose arguments are an object, unless the model wrote what is no JSON."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise PromptError("messages: a tool call has a 'function' with a name and arguments.")
    arguments: Any = function.get("arguments")
    with suppress(ValueError, TypeError, RecursionError):
        arguments = json.loads(arguments)
    return {**call, "function": {**function, "arguments": arguments}}


def _with_text(message: Message) -> dict[str, Any]:
    """A message whose content is one text; content may be a list of parts, as in OpenAI's API."""
    content = message.get("content")
    if content is None:
        if message["role"] in ("system", "user"):
            raise PromptError(f"messages: a message of role '{message['role']}' has no content.")
        return {**message, "content": ""}
    if isinstance(content, str):
        return {**message, "content": content}
    if not isinstance(content, Sequence):
        return dict(message)
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) else part
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise PromptError(f"messages: a part of content of type {kind!r} is not text.")
        texts.append(text)
    return {**message, "content": "".join(texts)}


def check_prompt(ids: Sequence[int], target: Target, most: int) -> None:
    """Refuse a prompt that the target cannot continue, with `most` tokens in memory."""
    if not ids:
        raise PromptError("the prompt is empty: give at least one token to continue.")
    if len(ids) >= target.max_model_len:
        raise PromptError(
            f"the prompt has {len(ids)} tokens, which leaves no room in the context of "
            f"{target.max_model_len}: shorten it."
        )
    if len(ids) >= most:
        raise PromptError(
            f"the prompt has {len(ids)} tokens, and kv_cache_memory has room for {most}, output "
            "included: shorten it, or raise kv_cache_memory."
        )
    _check_known(ids, target.vocab_size)


def _check_known(ids: Sequence[int], vocab_size: int, name: str = "", of: str = "") -> None:
    for token in ids:
        if not 0 <= token < vocab_size:
            raise PromptError(
                f"{name}token id {token}{of} is outside the vocabulary (0 to {vocab_size - 1})."
            )


def check_room(ids: Sequence[int], params: SamplingParams, most: int, most_kept: int) -> None:
    """Refuse an output that `kv_cache_memory` would cut, as far as its length is known.

    A beam search is refused wherever it might be cut: which output is the best may depend on that.
    """
    if params.max_tokens is None and params.beam_width == 1:
        return
    wanted = most - len(ids)
    if params.max_tokens is not None:
        wanted = min(wanted, params.max_tokens)
    if len(ids) + wanted > most_kept:
        raise PromptError(
            f"the prompt has {len(ids)} tokens and the output up to {wanted}, and kv_cache_memory "
            f"has room for {most_kept} together: shorten the prompt, lower max_tokens, or raise "
            "kv_cache_memory."
        )


def needed(tokenizer: PreTrainedTokenizerBase | None) -> PreTrainedTokenizerBase:
    """The tokenizer of a model that has one."""
    if tokenizer is None:
        raise PromptError("this model has no tokenizer: pass token ids, or LLM(tokenizer=...).")
    return tokenizer


def checked_ids(prompt: Any) -> list[int]:
    """Token ids as the user gave them."""
    if not _is_ids(prompt):
        raise PromptError(f"{FORMS}.")
    return list(prompt)


# Texts beside a prompt (references and predictions), and their conversion to token ids.


GivenReferences: TypeAlias = Sequence[str | Sequence[int]] | None
"""Texts that one prompt's drafts may quote, or their token ids."""

GivenPrediction: TypeAlias = str | Sequence[int] | None
"""A text that the output of one prompt is expected to repeat, or its token ids."""

QUOTING = ("copy", "ngram", "suffix")
"""The methods that draft from references, besides those that combine others."""


@dataclass(frozen=True)
class ReferenceReader:
    """Reads references for one model.

    A text is split into tokens as if it began a text of its own. Where it continues a line in the
    output, the tokens of its first word may differ from these; all others are the same.
    """

    target: Target
    tokenizer: PreTrainedTokenizerBase | None

    def read(self, given: GivenReferences | References) -> References:
        """The references of one prompt; those that were read already are returned as they are."""
        if given is None:
            return NO_REFERENCES
        if isinstance(given, References):
            return given
        if isinstance(given, str) or not isinstance(given, Sequence):
            raise PromptError("references: expected a list of texts, or of lists of token ids.")
        return References(tuple(self._tokens("references", each) for each in given))

    def read_all(self, given: Sequence[GivenReferences | References]) -> list[References]:
        """The references of each prompt; those that several prompts share are read once."""
        return _once(self.read, given)

    def prediction(self, given: GivenPrediction | References) -> References:
        """The prediction of one prompt, as references of one text; none of an empty text."""
        if isinstance(given, References):
            return given
        tokens = () if given is None else self._tokens("prediction", given)
        return References((tokens,)) if tokens else NO_REFERENCES

    def predictions(self, given: Sequence[GivenPrediction | References]) -> list[References]:
        """The prediction of each prompt; one that several prompts share is read once."""
        return _once(self.prediction, given)

    def _tokens(self, name: str, given: Any) -> tuple[int, ...]:
        if isinstance(given, str):  # as an output would have it
            text, tokenizer = checked_text(name, given), needed(self.tokenizer)
            return tuple(tokens_of(tokenizer, text, in_output=self.target.reads_source))
        if not _is_ids(given):
            each = "each is" if name == "references" else "it is"
            raise PromptError(f"{name}: {each} a text or a list of token ids.")
        _check_known(given, self.target.vocab_size, f"{name}: ")
        return tuple(given)


def per_prompt(count: int, given: Any) -> list[GivenReferences]:
    """The references of each of several prompts, as the user gave them.

    Args:
        given: None, a list of references that all prompts share, or a list with such a list or
            None for each prompt.
    """
    listed = isinstance(given, Sequence) and not isinstance(given, str)
    shared = not listed or not given
    if shared or any(isinstance(item, str) or (item and _is_ids(item)) for item in given):
        return [given] * count
    if len(given) != count:
        raise PromptError(
            f"references: {len(given)} lists for {count} prompts: give one list of texts for all "
            "prompts, or one list per prompt."
        )
    return list(given)


def predictions_per_prompt(count: int, given: Any) -> list[GivenPrediction]:
    """The prediction of each of several prompts, as the user gave it."""
    if given is None or isinstance(given, str) or (given and _is_ids(given)):
        return [given] * count
    if not isinstance(given, Sequence) or len(given) != count:
        raise PromptError(
            f"prediction: expected a text for all prompts, or a list with one for each of the "
            f"{count} prompts."
        )
    return list(given)


def check_quotes(method: str, drafter: Drafter) -> None:
    """Refuse references that no draft could come from."""
    if not drafter.traits.quotes_references:
        names = " or ".join(", ".join(f"'{name}'" for name in QUOTING).rsplit(", ", 1))
        raise CompatibilityError(
            f"references: method '{method}' does not quote them: draft with {names}, or with a "
            "method that combines one of them with others, such as 'ensemble'."
        )


def _once(read: Callable[[Any], References], given: Sequence[Any]) -> list[References]:
    """Apply `read` to each value; equal values give the same object."""
    found = {key: read(each) for key, each in {id(each): each for each in given}.items()}
    return [found[id(each)] for each in given]


def _is_ids(value: Any) -> bool:
    return (
        isinstance(value, Sequence)
        and not isinstance(value, str | bytes | bytearray)
        and all(isinstance(token, int) and not isinstance(token, bool) for token in value)
    )


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
    between_steps: Callable[[Callable[[], int]], int] | None = None

    @staticmethod
    def of(
        target: Target, loaded: LoadedModel, between_steps: Callable[[Callable[[], int]], int]
    ) -> SourceReader | None:
        """The reader of a model; None for a decoder-only one."""
        network = target.source_network
        if network is None:
            return None
        start = decoder_start(loaded.model, loaded.settings)
        if network.num_bins is None:
            return SourceReader(target, loaded.tokenizer, start)
        assert network.source_limit is not None, "audio has a fixed length"
        audio = AudioReader(loaded.path, network.num_bins, network.source_limit)
        speech = WhisperStart.of(start, loaded.settings, loaded.model.config)
        return SourceReader(target, loaded.tokenizer, start, audio, speech, between_steps)

    def read(self, prompt: Prompt) -> Opening:
        """The source, and the decoder's first tokens."""
        parts = SourcePrompt.of(prompt)
        source = self._source(parts)
        check_source(source, self.target)
        if self.speech is None:
            ids = self._decoder_ids(parts)
        else:
            ids = self._speech_ids(parts, source, self.speech)
        return Opening(ids, parts.decoder_text, source, parts.text)

    def timestamps(self, prompt: Prompt) -> Timestamps | None:
        """The rule of timestamps, if the output of a prompt has them."""
        if self.speech is None or not self._wants_timestamps(SourcePrompt.of(prompt), self.speech):
            return None
        return self.speech.timestamps

    # The encoder's part

    def _source(self, parts: SourcePrompt) -> Source:
        if self.audio is not None:
            if parts.audio is None:
                raise PromptError('this model reads audio: pass {"audio": samples}.')
            if parts.source_language is not None:
                raise PromptError("source_language: audio has none: leave it out.")
            return Source.of_audio(self.audio.features(parts.audio))
        if parts.audio is not None:
            raise PromptError("this model reads text, not audio.")
        for key in OF_SPEECH:
            if getattr(parts, key) is not None:
                raise PromptError(f"{key}: it is for audio, and this model reads text.")
        return Source(tuple(self._source_ids(parts)))

    def _source_ids(self, parts: SourcePrompt) -> Sequence[int]:
        if parts.text is not None:
            return self._text_ids(parts.text, parts.source_language)
        if parts.source_language is not None:
            raise PromptError("source_language: it marks text, and this source is no text.")
        if is_conversation(parts.source):
            return read_prompt(parts.source, self.tokenizer).ids
        return checked_ids(parts.source)

    def _text_ids(self, text: str, language: Any) -> Sequence[int]:
        if not text.strip():
            raise PromptError("the source is empty: give at least one word to read.")
        with self._reading(language):
            text = checked_text("source", text)
            return tokens_of(needed(self.tokenizer), text, add_special_tokens=True)

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

        def detect() -> int:
            target = self.target.with_own_rows()
            with torch.inference_mode():
                target.add(INTERNAL_KEY)
                target.encode(INTERNAL_KEY, source)
                (output,) = target.verify([INTERNAL_KEY], [chain([self.start])])
            ids = torch.tensor(tokens, device=output.scores.device)
            return tokens[int(output.scores[0][ids].argmax())]

        assert self.between_steps is not None, "the engine gives it to readers of audio"
        return self.between_steps(detect)

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
    _check_known(source.tokens, network.source_vocab_size, of=" of the source")
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
