"""`/v1/chat/completions` and `/v1/responses` with OpenAI's own client."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
from pydantic import BaseModel, Field

from tests.serve.support import MODEL, Served
from tokenleap import SamplingParams

HELLO: Any = [{"role": "user", "content": "hello"}]
Client = openai.OpenAI


class Point(BaseModel):
    """A form that a random model fills in quickly."""

    x: int = Field(ge=0, le=9)
    colour: str = Field(pattern="^(red|blue)$")


def weather(name: str = "weather", **more: Any) -> Any:
    schema = {
        "type": "object",
        "properties": {"place": {"enum": ["Bern", "Rome"]}},
        "required": ["place"],
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "parameters": schema, **more}}


def test_a_message(server: Served, client: Client) -> None:
    params = SamplingParams(temperature=0, max_tokens=8)
    (expected,) = server.llm.chat(HELLO, params)
    found = client.chat.completions.create(
        model=MODEL, messages=HELLO, temperature=0, max_completion_tokens=8
    )
    assert found.choices[0].message.content == expected.text
    assert found.choices[0].message.role == "assistant"
    assert found.choices[0].finish_reason == "length"
    assert found.usage is not None
    assert found.usage.prompt_tokens == len(expected.prompt_token_ids)


def test_token_ids_whole_and_in_pieces(server: Served) -> None:
    fields = {"messages": HELLO, "max_tokens": 4, "seed": 1, "return_token_ids": True, "n": 2}
    whole = server.post("/v1/chat/completions", **fields).json()
    assert whole["prompt_token_ids"] == server.llm.encode(HELLO)
    stream = server.post("/v1/chat/completions", **fields, stream=True).text
    chunks = [json.loads(each.removeprefix("data: ")) for each in stream.split("\n\n")[:-2]]
    assert [each.get("prompt_token_ids") for each in chunks] == [
        whole["prompt_token_ids"],
        *[None] * (len(chunks) - 1),
    ]
    for choice in whole["choices"]:
        pieces = [each["choices"][0] for each in chunks]
        own = [piece.get("token_ids", []) for piece in pieces if piece["index"] == choice["index"]]
        assert [token for ids in own for token in ids] == choice["token_ids"]


@pytest.mark.parametrize("field", ["guided_regex", "structured_outputs"])
def test_the_form_that_contradicts_tools_is_named(server: Served, field: str) -> None:
    form = "a" if field == "guided_regex" else {"regex": "a"}
    fields = {"messages": HELLO, "tools": [weather()], field: form}
    error = server.refused("/v1/chat/completions", **fields)
    assert error["param"] == field
    assert f"{field} and tools contradict each other" in error["message"]


def test_parts_names_and_roles(server: Served, client: Client) -> None:
    messages: Any = [
        {"role": "developer", "content": "be kind"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]
    same = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "ab"}]
    fields: Any = {"model": MODEL, "temperature": 0, "max_tokens": 4}
    found = client.chat.completions.create(messages=messages, **fields)
    (expected,) = server.llm.chat(same, SamplingParams(temperature=0, max_tokens=4))
    assert found.choices[0].message.content == expected.text


def test_the_model_may_be_left_out(server: Served) -> None:
    for path, body in (
        ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 1}),
        ("/v1/completions", {"prompt": "hello", "max_tokens": 1}),
        ("/v1/responses", {"input": "hello", "max_output_tokens": 1}),
    ):
        response = server.http.post(path, json=body)
        assert response.status_code == 200, response.text
        assert response.json()["model"] == MODEL


def test_an_answer_can_be_given_back(client: Client) -> None:
    """The client sends all fields of its message object, most of them null."""
    fields: Any = {"model": MODEL, "temperature": 0, "max_tokens": 4}
    first = client.chat.completions.create(messages=HELLO, **fields)
    messages: Any = [*HELLO, first.choices[0].message, {"role": "user", "content": "on"}]
    assert client.chat.completions.create(messages=messages, **fields).choices


def test_a_stream(client: Client) -> None:
    fields: Any = {"model": MODEL, "messages": HELLO, "seed": 1, "max_tokens": 9, "n": 2}
    whole = client.chat.completions.create(**fields, logprobs=True, top_logprobs=2)
    options: Any = {"include_usage": True}
    stream = client.chat.completions.create(
        **fields, logprobs=True, top_logprobs=2, stream=True, stream_options=options
    )
    *chunks, last = list(stream)
    assert last.usage is not None
    assert whole.usage is not None
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    for choice in whole.choices:
        pieces = [c for chunk in chunks for c in chunk.choices if c.index == choice.index]
        assert pieces[0].delta.role == "assistant"
        assert "".join(p.delta.content or "" for p in pieces) == choice.message.content
        assert pieces[-1].finish_reason == choice.finish_reason
        assert choice.logprobs is not None
        scores = [s for p in pieces if p.logprobs for s in p.logprobs.content or ()]
        assert scores == choice.logprobs.content
        assert {len(score.top_logprobs) for score in scores} == {2}
        assert bytes(scores[0].bytes or ()).decode() == scores[0].token


def test_many_at_once_with_the_asynchronous_client(server: Served) -> None:
    async def all_at_once() -> list[str | None]:
        url = f"{server.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:

            async def whole(seed: int) -> str | None:
                found = await client.chat.completions.create(
                    model=MODEL, messages=HELLO, seed=seed, max_tokens=9
                )
                return found.choices[0].message.content

            async def streamed(seed: int) -> str | None:
                stream = await client.chat.completions.create(
                    model=MODEL, messages=HELLO, seed=seed, max_tokens=9, stream=True
                )
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            both = [*(whole(seed) for seed in range(10)), *(streamed(seed) for seed in range(10))]
            return list(await asyncio.gather(*both))

    texts = asyncio.run(all_at_once())
    alone = [
        server.llm.chat(HELLO, SamplingParams(seed=seed, max_tokens=9))[0].text
        for seed in range(10)
    ]
    assert texts == alone * 2


def test_a_predicted_answer(server: Served, client: Client) -> None:
    fields: Any = {"model": MODEL, "messages": HELLO, "temperature": 0, "max_tokens": 40}
    plain = client.chat.completions.create(**fields)
    text = plain.choices[0].message.content or ""
    prediction: Any = {"type": "content", "content": text[:20] + "~~" + text[20:]}
    found = client.chat.completions.create(**fields, prediction=prediction)
    assert found.choices[0].message.content == text
    assert found.usage is not None
    details = found.usage.completion_tokens_details
    assert details is not None
    assert details.accepted_prediction_tokens is not None
    assert details.accepted_prediction_tokens > 10
    assert details.rejected_prediction_tokens is not None
    assert plain.usage is not None
    assert plain.usage.completion_tokens_details is None
    prediction["content"] = [{"type": "text", "text": text[:10]}, {"type": "text", "text": "x"}]
    assert client.chat.completions.create(**fields, prediction=prediction).choices
    refused = server.refused("/v1/chat/completions", **fields, prediction={"type": "file"})
    assert refused["param"].startswith("prediction")


# Forms


def test_a_parsed_answer(client: Client) -> None:
    found = client.chat.completions.parse(
        model=MODEL, messages=HELLO, response_format=Point, seed=1, max_tokens=200
    )
    point = found.choices[0].message.parsed
    assert isinstance(point, Point)
    assert point.colour in ("red", "blue")


def test_any_object(client: Client) -> None:
    found = client.chat.completions.create(
        model=MODEL,
        messages=HELLO,
        response_format={"type": "json_object"},
        logit_bias={str(ord("}") - 31): 100},
        max_tokens=100,
    )
    assert isinstance(json.loads(found.choices[0].message.content or ""), dict)


# Tools


def test_a_forced_call(client: Client) -> None:
    choice: Any = {"type": "function", "function": {"name": "weather"}}
    fields: Any = {
        "model": MODEL,
        "messages": HELLO,
        "tools": [weather("other"), weather()],
        "tool_choice": choice,
        "seed": 1,
        "max_tokens": 80,
    }
    found = client.chat.completions.create(**fields).choices[0]
    assert found.finish_reason == "stop"
    assert found.message.content is None
    (call,) = found.message.tool_calls or []
    assert isinstance(call, openai.types.chat.ChatCompletionMessageFunctionToolCall)
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments)["place"] in ("Bern", "Rome")
    pieces = [
        chunk.choices[0].delta for chunk in client.chat.completions.create(**fields, stream=True)
    ]
    deltas = [delta.tool_calls[0] for delta in pieces if delta.tool_calls]
    functions = [delta.function for delta in deltas if delta.function]
    assert "".join(each.arguments or "" for each in functions) == call.function.arguments
    assert [each.name for each in functions if each.name] == ["weather"]
    assert deltas[0].id


def test_a_call_is_required(client: Client) -> None:
    fields: Any = {
        "model": MODEL,
        "messages": HELLO,
        "tools": [weather("one"), weather("two")],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "seed": 1,
        "max_tokens": 120,
    }
    found = client.chat.completions.create(**fields).choices[0]
    assert found.finish_reason == "tool_calls"
    (call,) = found.message.tool_calls or []
    assert call.type == "function"
    assert call.function.name in ("one", "two")
    assert json.loads(call.function.arguments)["place"] in ("Bern", "Rome")
    *_, last = client.chat.completions.create(**fields, stream=True)
    assert last.choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize("stream", [False, True])
def test_a_model_may_call(client: Client, monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    """A grammar plays the model; its template has no tools, so a system message has them."""
    answer = '<tool_call>{"name": "weather", "arguments": {"place": "Bern"}}</tool_call>'
    form = {"choice": [f"Well: {answer}{answer}"]}
    monkeypatch.setattr("tokenleap.serve.chat.forced_form", lambda body: form)
    fields: Any = {"model": MODEL, "messages": HELLO, "tools": [weather()], "max_tokens": 200}
    fields |= {"parallel_tool_calls": True}
    found: Any = client.chat.completions.create(**fields, stream=stream)
    text: Any
    calls: Any
    if stream:
        choices = [choice for chunk in found for choice in chunk.choices]
        text = "".join(choice.delta.content or "" for choice in choices)
        calls = [call for choice in choices for call in choice.delta.tool_calls or ()]
        reason = choices[-1].finish_reason
        assert [call.index for call in calls] == [0, 1]
    else:
        (choice,) = found.choices
        text, calls = choice.message.content, choice.message.tool_calls
        reason = choice.finish_reason
        assert found.usage.prompt_tokens > 300  # the functions are in it
    assert text.strip() == "Well:"
    assert reason == "tool_calls"
    assert [call.function.name for call in calls] == ["weather"] * 2
    assert {call.function.arguments for call in calls} == {'{"place": "Bern"}'}
    assert len({call.id for call in calls}) == 2


def test_only_the_first_call_is_kept_without_parallel_calls(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = '<tool_call>{"name": "weather", "arguments": {"place": "%s"}}</tool_call>'
    fields: Any = {"model": MODEL, "messages": HELLO, "tools": [weather()], "max_tokens": 300}
    fields |= {"parallel_tool_calls": False}
    form = {"choice": [one % "Bern" + one % "Rome"]}
    monkeypatch.setattr("tokenleap.serve.chat.forced_form", lambda body: form)
    whole = client.chat.completions.create(**fields).choices[0].message.tool_calls or []
    chunks = list(client.chat.completions.create(**fields, stream=True))
    streamed = [c for chunk in chunks for c in chunk.choices[0].delta.tool_calls or ()]
    for calls in (whole, streamed):
        assert [json.loads(call.function.arguments)["place"] for call in calls] == ["Bern"]


def test_a_model_need_not_call(server: Served, client: Client) -> None:
    fields: Any = {"model": MODEL, "messages": HELLO, "tools": [weather()], "max_tokens": 9}
    assert client.chat.completions.create(**fields).choices[0].message.tool_calls is None
    refused = server.refused("/v1/chat/completions", **fields, guided_choice=["a"])
    assert refused["param"] == "guided_choice"


def test_results_of_calls_reach_the_model(server: Served) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    messages = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "rain"},
    ]
    ids = server.post("/tokenize", messages=messages, tools=[weather()]).json()["tokens"]
    text = server.post("/detokenize", tokens=ids).json()["prompt"]
    assert '"name": "weather"' in text
    assert "<tool_response>\nrain\n</tool_response>" in text
    assert text.endswith("assistant: ")


# Responses


def test_a_response(server: Served, client: Client) -> None:
    fields: Any = {"model": MODEL, "temperature": 0, "max_output_tokens": 6}
    messages: Any = [{"role": "system", "content": "be kind"}, *HELLO]
    (expected,) = server.llm.chat(messages, SamplingParams(temperature=0, max_tokens=6))
    found = client.responses.create(input="hello", instructions="be kind", **fields)
    assert found.output_text == expected.text
    assert found.status == "incomplete"
    assert found.usage is not None
    assert found.usage.output_tokens == 6
    listed = client.responses.create(input=HELLO, instructions="be kind", **fields)
    assert listed.output_text == expected.text
    *events, last = client.responses.create(
        input="hello", instructions="be kind", stream=True, **fields
    )
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == expected.text
    assert last.type == "response.incomplete"
    assert last.response.output_text == expected.text
    assert [event.sequence_number for event in (*events, last)] == list(range(len(events) + 1))


def test_a_parsed_response(client: Client) -> None:
    found = client.responses.parse(
        model=MODEL, input="hello", text_format=Point, max_output_tokens=200
    )
    assert isinstance(found.output_parsed, Point)
    assert found.status == "completed"


@pytest.mark.parametrize("stream", [False, True])
def test_the_client_sees_errors_as_its_own(client: Client, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model=MODEL, messages=HELLO, stream=stream, extra_body={"colour": 1}
        )
    assert caught.value.param == "colour"
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.chat.completions.create(model="other", messages=HELLO, stream=stream)
    assert client.models.retrieve(MODEL).id == MODEL
    assert [model.id for model in client.models.list()] == [MODEL]


WITHOUT_EFFECT: dict[str, Any] = {
    "metadata": {"team": "a"},
    "prompt_cache_key": "a",
    "safety_identifier": "a",
    "service_tier": "priority",
    "store": True,
}


def test_fields_without_effect(client: Client) -> None:
    """OpenAI's client sends them; the text stays the same, and nothing is stored."""
    fields: Any = {"model": MODEL, "seed": 3, **WITHOUT_EFFECT}
    chats = [
        client.chat.completions.create(messages=HELLO, max_tokens=9, **more)
        for more in (
            {"model": MODEL, "seed": 3},
            {**fields, "reasoning_effort": "high", "verbosity": "low"},
        )
    ]
    assert chats[0].choices == chats[1].choices
    plain = client.responses.create(input="hello", model=MODEL, extra_body={"seed": 3})
    del fields["seed"]
    answer = client.responses.create(
        input="hello",
        extra_body={"seed": 3},
        reasoning={"effort": "low"},
        text={"verbosity": "high"},
        **fields,
    )
    assert answer.output_text == plain.output_text
    assert answer.metadata == WITHOUT_EFFECT["metadata"]
    assert answer.model_dump()["store"] is False
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        client.responses.create(input="hello", model=MODEL, previous_response_id=answer.id)
