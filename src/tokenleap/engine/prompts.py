"""The forms in which a user may give prompts, and their conversion to token ids."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from tokenleap.core.config import Config
from tokenleap.core.params import SamplingParams
from tokenleap.errors import ConfigError, PromptError, in_one_line
from tokenleap.models.chat_template import rendered
from tokenleap.runtime.target import Target

__all__ = [
    "SALT",
    "Message",
    "Prompt",
    "as_list",
    "cache_salt",
    "check_prompt",
    "check_room",
    "checked_ids",
    "checked_text",
    "conversation_ids",
    "is_conversation",
    "needed",
    "one_per_prompt",
    "token_ids",
    "tokens_of",
]

Message: TypeAlias = Mapping[str, Any]
"""A chat message: {"role": ..., "content": ...}."""

Prompt: TypeAlias = str | Sequence[int] | Sequence[Message] | Mapping[str, Any]
"""Text, token ids, or a conversation. For an encoder-decoder it is the source; a mapping may say
more (see `sources`)."""

FORMS = "a prompt is text, a list of token ids, or a list of chat messages"
"""What decoder-only models take, for error messages."""


SALT = "cache_salt"
"""Key of a prompt: requests with different salts share nothing that is kept between requests."""


def cache_salt(prompt: Prompt) -> str | None:
    """The salt of a prompt; None if it has none.

    Raises:
        PromptError: it is no text, or empty.
    """
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

    Raises:
        PromptError: `prompts` is neither a prompt nor a list.
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
    """One value for each prompt.

    Args:
        name: the parameter, for error messages.
        prompts: the prompts.
        given: one value for all prompts, or a sequence with one value per prompt.

    Raises:
        ConfigError: `given` is neither, or has another length than `prompts`.
    """
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


def token_ids(prompt: Prompt, tokenizer: PreTrainedTokenizerBase | None) -> list[int]:
    """Token ids of a prompt, including special tokens; the chat template formats conversations.

    Raises:
        PromptError: there is no tokenizer or no chat template, or the prompt is malformed.
    """
    prompt = _text_of(prompt)
    if not isinstance(prompt, str) and not is_conversation(prompt):
        return checked_ids(prompt)
    if isinstance(prompt, str):
        return list(needed(tokenizer).encode(checked_text("prompt", prompt)))
    return conversation_ids(list(prompt), tokenizer)


def conversation_ids(
    messages: Sequence[Any],
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    add_generation_prompt: bool = True,
    check_text: Callable[[str], object] = lambda _: None,
    **template: Any,
) -> list[int]:
    """Token ids of a conversation, which the model's chat template formats.

    Args:
        messages: the messages.
        tokenizer: the model's tokenizer, or None if it has none.
        add_generation_prompt: whether an answer begins behind them.
        check_text: called with their text before it is split into tokens.
        **template: more arguments of `apply_chat_template`, such as tools.

    Raises:
        PromptError: there is no tokenizer or no chat template, or the template refuses them.
    """
    tokenizer = needed(tokenizer)
    if not tokenizer.chat_template:
        raise PromptError("this model has no chat template: pass text instead of messages.")
    listed = [_with_text(message) for message in messages]
    try:
        text = rendered(tokenizer, listed, add_generation_prompt=add_generation_prompt, **template)
    except TemplateError as error:  # a template may refuse roles or their order
        raise PromptError(f"the model's chat template refuses this: {error}") from error
    except (TypeError, ValueError, KeyError, AttributeError) as error:  # raised inside it
        raise PromptError(
            f"the model's chat template cannot format this: {in_one_line(error)}"
        ) from error
    check_text(text)
    return tokens_of(tokenizer, text, in_output=False)


def tokens_of(tokenizer: PreTrainedTokenizerBase, text: str, *, in_output: bool) -> list[int]:
    """The tokens of a text inside another one, without special tokens.

    Args:
        tokenizer: the model's.
        text: the text.
        in_output: whether it is a part of what an encoder-decoder writes. Some split that in
            another way than their sources.
    """
    texts = {"text_target": text} if in_output else {"text": text}
    # `verbose` would warn of texts longer than the model's context, which does not read them.
    made = tokenizer(**texts, add_special_tokens=False, verbose=False)
    ids: list[int] = made["input_ids"]
    return ids


def _text_of(prompt: Any) -> Any:
    """What vLLM's mappings of decoder-only models hold; anything else as it is.

    Raises:
        PromptError: a mapping has other keys.
    """
    if not isinstance(prompt, Mapping):
        return prompt
    for key in ("prompt", "prompt_token_ids"):
        if set(prompt) - {SALT} == {key}:
            return prompt[key]
    if "input_ids" in prompt:
        raise PromptError("prompts: pass text, or a tokenizer's ids as {'prompt_token_ids': ids}.")
    if "multi_modal_data" in prompt:
        raise PromptError("multi_modal_data: this model takes text only.")
    if {"prompt", "prompt_token_ids"} <= set(prompt):
        raise PromptError("give 'prompt' or 'prompt_token_ids', not both.")
    raise PromptError(
        f"this model has no encoder: {FORMS}, or a mapping with 'prompt' or 'prompt_token_ids'."
    )


def checked_text(name: str, text: str) -> str:
    """A text that has an encoding.

    Args:
        name: what it is, for error messages.
        text: the text.

    Raises:
        PromptError: it has half of a surrogate pair, which stands for no character.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(
            f"{name}: half of a character at position {error.start} (a lone surrogate, "
            f"U+{ord(text[error.start]):04X}): decode its bytes with errors='replace'."
        ) from None
    return text


def _with_text(message: Message) -> dict[str, Any]:
    """A message whose content is one text; content may be a list of parts, as in OpenAI's API.

    Raises:
        PromptError: a part is not text.
    """
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": checked_text("messages", content)}
    if not isinstance(content, Sequence):
        return dict(message)
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) else part
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise PromptError(f"messages: a part of content of type {kind!r} is not text.")
        texts.append(checked_text("messages", text))
    return {**message, "content": "".join(texts)}


def check_prompt(ids: Sequence[int], target: Target, state_bytes: int = 0) -> None:
    """Refuse a prompt that the target cannot continue.

    Args:
        ids: the prompt; of an encoder-decoder, the decoder's.
        target: the model.
        state_bytes: memory that the row needs besides its KV.

    Raises:
        PromptError: the prompt is empty, too long, or has ids outside the vocabulary.
    """
    if not ids:
        raise PromptError("the prompt is empty: give at least one token to continue.")
    if len(ids) >= target.max_model_len:
        raise PromptError(
            f"the prompt has {len(ids)} tokens, which leaves no room in the context of "
            f"{target.max_model_len}: shorten it."
        )
    most = target.most_tokens_beside(state_bytes)
    if len(ids) >= most:
        raise PromptError(
            f"the prompt has {len(ids)} tokens, and kv_cache_memory has room for {most}, output "
            "included: shorten it, or raise kv_cache_memory."
        )
    highest = target.vocab_size - 1
    for token in ids:
        if not 0 <= token <= highest:
            raise PromptError(f"token id {token} is outside the vocabulary (0 to {highest}).")


def check_room(ids: Sequence[int], params: SamplingParams, most: int, most_kept: int) -> None:
    """Refuse an output that `kv_cache_memory` would cut, as far as its length is known.

    A beam search is refused wherever it might be cut: which output is the best may depend on that.

    Args:
        ids: the prompt.
        params: its sampling parameters.
        most: most tokens of prompt and output together.
        most_kept: the same, as far as memory allows.

    Raises:
        PromptError: `max_tokens` do not fit.
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
    """The tokenizer of a model that has one.

    Raises:
        PromptError: the model has none.
    """
    if tokenizer is None:
        raise PromptError("this model has no tokenizer: pass token ids, or LLM(tokenizer=...).")
    return tokenizer


def checked_ids(prompt: Any) -> list[int]:
    """Token ids as the user gave them.

    Raises:
        PromptError: they are something else.
    """
    if (
        not isinstance(prompt, Sequence)
        or isinstance(prompt, bytes)
        or not all(isinstance(token, int) and not isinstance(token, bool) for token in prompt)
    ):
        raise PromptError(f"{FORMS}.")
    return list(prompt)
