"""From the messages and tools of a request to its prompt's token ids. Call it off the loop."""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from tokenleap.engine.prompts import checked_text, conversation_ids, needed, tokens_of
from tokenleap.engine.text_limit import TextLimit
from tokenleap.serve.errors import invalid
from tokenleap.serve.messages import Message, Tool

__all__ = ["chat_ids", "refuse_special_tokens", "text_ids"]

_GENERIC = """You may call functions. These are all of them, as JSON schemas:
<tools>
{tools}
</tools>
To call one, answer with its name and arguments, and nothing else, in this form:
<tool_call>
{{"name": "...", "arguments": {{...}}}}
</tool_call>"""
"""The system message for models whose chat template has no tools."""


def text_ids(
    prompt: str,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    add_special_tokens: bool,
    limit: TextLimit,
) -> list[int]:
    """Token ids of a text.

    Args:
        prompt: the text.
        tokenizer: the model's, or None.
        add_special_tokens: whether the tokenizer adds those that begin or end a text.
        limit: refuses it early.

    Raises:
        PromptError: there is no tokenizer, or the text has no encoding or is too long.
    """
    tokenizer = needed(tokenizer)
    limit.check(prompt)
    if not add_special_tokens:
        return tokens_of(tokenizer, checked_text("prompt", prompt), in_output=False)
    return list(tokenizer.encode(checked_text("prompt", prompt)))


def chat_ids(
    messages: Sequence[Message],
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    limit: TextLimit,
    tools: Sequence[Tool] = (),
    add_generation_prompt: bool | None = None,
    continue_final_message: bool | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
) -> list[int]:
    """Token ids of a conversation.

    A chat template that has no tools gets them in a system message, and calls and their results as
    text. A text that is too long is refused before it is split into tokens.

    Raises:
        APIError: `chat_template_kwargs` are not the template's.
        PromptError: there is no chat template, it refuses the messages, or their text is too long.
    """
    tokenizer = needed(tokenizer)
    listed = [_message(message) for message in messages]
    template: dict[str, Any] = dict(chat_template_kwargs or {})
    _check_template_arguments(template, tokenizer)
    if any(_uses_tools(message) for message in messages) or tools:
        if _knows_tools(tokenizer):
            if tools:
                template["tools"] = [tool.model_dump(exclude_none=True) for tool in tools]
        else:
            listed = _without_tools(listed, tools)
    goes_on = bool(continue_final_message)
    generates = not goes_on if add_generation_prompt is None else add_generation_prompt
    if goes_on:
        if generates:
            raise invalid(
                "continue_final_message",
                "continue_final_message and add_generation_prompt contradict each other.",
            )
        template["continue_final_message"] = True
    try:
        return conversation_ids(
            listed,
            tokenizer,
            add_generation_prompt=generates,
            check_text=limit.check,
            **template,
        )
    except RecursionError:  # a template writes the JSON of calls and tools
        raise invalid("messages", "messages or tools are nested too deeply.") from None


def refuse_special_tokens(*, given: bool | None) -> None:
    """Refuse to add special tokens to a conversation.

    Args:
        given: the field `add_special_tokens`.

    Raises:
        APIError: it asks for them.
    """
    if given:
        raise invalid("add_special_tokens", "add_special_tokens: the chat template writes them.")


def _check_template_arguments(given: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> None:
    functions = (tokenizer.apply_chat_template, conversation_ids, render_jinja_template)
    own = {"self", *(name for each in functions for name in inspect.signature(each).parameters)}
    if taken := sorted(own & set(given)):
        raise invalid(
            "chat_template_kwargs", f"chat_template_kwargs: '{taken[0]}' is not a template's."
        )


def _message(message: Message) -> dict[str, Any]:
    """A message for chat templates: arguments of calls are objects, and developers are systems."""
    fields = message.model_dump(exclude_none=True)
    if message.role == "developer":
        fields["role"] = "system"
    if message.content is None:
        fields["content"] = ""
    for call in fields.get("tool_calls", ()):
        try:
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        except (ValueError, RecursionError):
            continue  # as the model wrote it
    return fields


def _uses_tools(message: Message) -> bool:
    return message.role == "tool" or bool(message.tool_calls)


def _knows_tools(tokenizer: PreTrainedTokenizerBase) -> bool:
    template = tokenizer.chat_template
    return "tools" in (str(sorted(template)) if isinstance(template, dict) else str(template))


def _without_tools(messages: list[dict[str, Any]], tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """The conversation for a template that has only text."""
    plain: list[dict[str, Any]] = []
    if tools:
        listed = "\n".join(json.dumps(tool.model_dump(exclude_none=True)) for tool in tools)
        plain.append({"role": "system", "content": _GENERIC.format(tools=listed)})
    for message in messages:
        role, content = message["role"], message["content"]
        if role == "tool":
            content = f"<tool_response>\n{_text(content)}\n</tool_response>"
            plain.append({"role": "user", "content": content})
        elif role == "system" and plain and plain[0]["role"] == "system" and len(plain) == 1:
            plain[0] = {"role": "system", "content": f"{_text(content)}\n\n{plain[0]['content']}"}
        else:
            calls = [
                f"<tool_call>\n{json.dumps(call['function'])}\n</tool_call>"
                for call in message.get("tool_calls", ())
            ]
            parts = [part for part in (_text(content), *calls) if part]
            plain.append({"role": role, "content": "\n".join(parts)})
    return plain


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)
