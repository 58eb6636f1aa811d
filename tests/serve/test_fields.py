"""Bodies by themselves: which fields are read, and what an error says. No model runs."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from tokenleap.errors import PromptError, RequestError
from tokenleap.serve.body import APIError, Body, of_engine, of_output, parsed
from tokenleap.serve.fields import ChatBody, CompletionBody, ResponseBody

MANY = 2000
HELLO = {"role": "user", "content": "hello"}


def message(**fields: Any) -> dict[str, Any]:
    return {"messages": [{**HELLO, **fields}]}


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (CompletionBody, {"prompt": [1.5] * MANY}),
        (CompletionBody, {"prompt": ["a", *[1] * MANY]}),
        (CompletionBody, {"prompt": [["a"] * MANY]}),
        (CompletionBody, {"prompt": [["a"]] * MANY}),
        (CompletionBody, {"prompt": "a", "stop": [1] * 64}),
        (CompletionBody, {"prompt": "a", "allowed_token_ids": ["a"] * MANY}),
        (CompletionBody, {"prompt": "a", "logit_bias": {str(i): "a" for i in range(MANY)}}),
        (CompletionBody, {"prompt": "a", **{f"field{i}": 1 for i in range(MANY)}}),
        (ChatBody, {"messages": [{}] * MANY}),
        (ChatBody, {"messages": ["a"] * MANY}),
        (ChatBody, message(content=[1] * MANY)),
        (ChatBody, message(tool_calls=[{}] * MANY)),
        (ResponseBody, {"input": [{}] * MANY}),
    ],
)
def test_few_errors_are_collected(kind: type[Body], fields: dict[str, Any]) -> None:
    """Each of them would take memory and time."""
    with pytest.raises(ValidationError) as caught:
        kind.model_validate({"model": "m", **fields})
    assert caught.value.error_count() <= 4


@pytest.mark.parametrize(
    ("kind", "fields", "param", "told"),
    [
        (
            ChatBody,
            message(content=[{"type": "image_url", "image_url": {"url": "data:"}}]),
            "messages.0.content.0.image_url",
            "not supported",
        ),
        (ChatBody, message(content=5), "messages.0.content", "a string or a list of text parts"),
        (ChatBody, message(colour=1), "messages.0.colour", "unknown field"),
        (
            ChatBody,
            {"messages": [HELLO], "tool_choice": "any"},
            "tool_choice",
            "'none', 'auto' or 'required'",
        ),
        (
            ChatBody,
            {"messages": [HELLO], "tool_choice": {"type": "function", "function": {}}},
            "tool_choice.function.name",
            "field required",
        ),
        (ChatBody, {"messages": [HELLO], "temprature": 1}, "temprature", "'temperature'"),
        (CompletionBody, {"prompt": [["a"]]}, "prompt.0.0", "integer"),
        (CompletionBody, {"prompt": {"a": 1}}, "prompt", "a string, token ids, or a list"),
        (CompletionBody, {"prompt": "a", "stop": 5}, "stop", "a string or a list of strings"),
        (ResponseBody, {"input": [{"role": "user", "content": [1]}]}, "input.0.content.0", "valid"),
    ],
)
def test_an_error_is_about_what_was_meant(
    kind: type[Body], fields: dict[str, Any], param: str, told: str
) -> None:
    with pytest.raises(APIError) as caught:
        parsed(kind, {"model": "m", **fields})
    assert caught.value.param == param
    assert told in caught.value.message


def test_the_output_of_a_response_is_input_of_the_next_one() -> None:
    text = {"type": "output_text", "text": "a", "annotations": [], "logprobs": []}
    for status in ("completed", "incomplete", "in_progress"):
        output = {
            "id": "msg_1",
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": [text],
        }
        body = parsed(ResponseBody, {"model": "m", "input": [HELLO, output]})
        assert [each.role for each in body.input] == ["user", "assistant"]  # type: ignore[union-attr]


def test_a_message_that_the_client_parsed_goes_back() -> None:
    """As `client.chat.completions.parse()` of OpenAI's client returns it."""
    function = {"name": "f", "arguments": "{}", "parsed_arguments": {"a": 1}}
    call = {"id": "1", "type": "function", "function": function}
    sent = message(role="assistant", content="{}", parsed={"a": 1}, tool_calls=[call])
    (read,) = parsed(ChatBody, {"model": "m", **sent}).messages
    assert read.content == "{}"
    assert read.tool_calls is not None
    assert read.tool_calls[0].function.model_dump() == {"name": "f", "arguments": "{}"}


def test_a_prompt_that_is_too_long_for_the_memory() -> None:
    """The engine's own message is checked in tests/engine/test_scheduler.py."""
    told = "the prompt has 9 tokens, and kv_cache_memory has room for 8, output included: shorten"
    assert of_engine(PromptError(told), (), "prompt").code == "context_length_exceeded"
    assert of_engine(PromptError("the prompt is empty"), (), "prompt").code is None
    told = "kv_cache_memory has room for 8 tokens, prompt included, and the output"
    outgrown = of_output(RequestError(told, by_parameters=True), told)
    assert (outgrown.status, outgrown.code) == (400, "context_length_exceeded")
    assert of_output(RequestError("the logits contain NaN"), "NaN").status == 500
