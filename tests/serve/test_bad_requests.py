"""A wrong field in a request gets OpenAI's error object, which names it; none is ignored."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.serve.support import CONTEXT, MODEL, Served
from tokenleap import SpeculativeConfig
from tokenleap.serve import running
from tokenleap.serve.fields import MAX_NESTED, check_speculation
from tokenleap.serve.text_limit import TextLimit

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
HELLO = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"[]", "must be a JSON object, not list"),
        (b'"text"', "must be a JSON object, not str"),
        (b"\xff\xfe", "not UTF-8"),
        (b'{"a": NaN}', "NaN is no JSON number"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"a": ' + b"9" * 10_000 + b"}", "not valid JSON"),
        (b'{"model": "tiny", "prompt": "a", "prompt": "b"}', "prompt: it is there twice"),
        (b'{"model": "tiny", "prompt": "\\ud800"}', "half of a character"),
        (b'{"model": "tiny", "prompt": "a", "\\ud800": 1}', "unknown field"),
        (b'{"model": "tiny", "logit_bias": {"1": 0, "1": 1}}', "1: it is there twice"),
    ],
)
def test_no_json_object(server: Served, content: bytes, message: str) -> None:
    response = server.http.post(COMPLETIONS, content=content)
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]
    assert response.json()["error"]["type"] == "invalid_request_error"


FIELDS: list[tuple[dict[str, Any], str | None]] = [
    ({"colour": 1}, "colour"),
    ({"max_token": 1}, "max_token"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"n": 0}, "n"),
    ({"n": 17}, "n"),
    ({"n": 10**30}, "n"),
    ({"n": 2, "temperature": 0}, None),
    ({"seed": -1}, "seed"),
    ({"seed": 2**63}, "seed"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 2, "min_tokens": 3}, None),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a"] * 65}, "stop"),
    ({"stop": "a" * 1001}, "stop"),
    ({"stop": [1]}, "stop"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": [10**6]}, "stop_token_ids"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"100000": 1}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"bad_words": [" "]}, "bad_words"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"usage": True}}, "stream_options"),
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": {"type": "text", "colour": 1}}, "response_format"),
    ({"guided_json": {"type": "nothing"}}, "guided_json"),
    ({"guided_regex": "("}, "guided_regex"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_grammar": "start: nothing"}, "guided_grammar"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
    ({"structured_outputs": {"colour": 1}}, "structured_outputs"),
    ({"tokenleap": {"colour": True}}, "tokenleap"),
    ({"speculative_config": {"method": "nogram"}}, "speculative_config"),
    ({"speculative_config": {"method": "eagle"}}, "speculative_config"),
    ({"speculative_config": {"method": "hybrid", "min_lookup": 3}}, "speculative_config"),
    ({"speculative_config": {"method": "ngram", "prompt_lookup": 1}}, None),
    ({"speculative_config": "ngram"}, "speculative_config"),
]


@pytest.mark.parametrize(("fields", "param"), FIELDS, ids=[json.dumps(f)[:50] for f, _ in FIELDS])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_fields(server: Served, path: str, fields: dict[str, Any], param: str | None) -> None:
    prompt: dict[str, Any] = {"prompt": "a"} if path == COMPLETIONS else {"messages": HELLO}
    error = server.refused(path, **prompt, **fields)
    assert error["type"] == "invalid_request_error"
    assert (error["param"] or "").partition(".")[0] == (param or "")
    assert "\n" not in error["message"]


def tool(name: str = "f", **parameters: Any) -> Any:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    COMPLETIONS: [
        ({}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [100_000]}, "prompt"),
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"prompt": {"prompt": "a"}}, "prompt"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": [5], "add_special_tokens": False}, "add_special_tokens"),
        ({"prompt": [[5]], "add_special_tokens": True}, "add_special_tokens"),
        ({"prompt": "a", "best_of": 2}, "best_of"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"),
        ({"prompt": "a", "logprobs": True}, "logprobs"),
        ({"prompt": "a", "messages": HELLO}, "messages"),
    ],
    CHAT: [
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"role": "king", "content": "a"}]}, "messages"),
        ({"messages": [{"role": "user", "content": "a", "colour": 1}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": "a", "audio": {"id": "1"}}]}, "messages"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 2}, "logprobs"),
        ({"max_tokens": 1, "max_completion_tokens": 1}, "max_tokens"),
        ({"store": "yes"}, "store"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"metadata": {str(number): "" for number in range(17)}}, "metadata"),
        ({"metadata": {"a" * 65: ""}}, "metadata"),
        ({"metadata": {"a": "b" * 513}}, "metadata"),
        ({"prompt_cache_key": "a" * 1001}, "prompt_cache_key"),
        ({"safety_identifier": "a" * 129}, "safety_identifier"),
        ({"service_tier": "first"}, "service_tier"),
        ({"verbosity": "loud"}, "verbosity"),
        ({"audio": {}}, "audio"),
        ({"functions": []}, "functions"),
        ({"reasoning_effort": "most"}, "reasoning_effort"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs"),
        *(
            ({"chat_template_kwargs": {name: []}}, "chat_template_kwargs")
            for name in ("messages", "tokenizer", "conversation", "conversations", "self")
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [tool("f"), tool("f")]}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [tool()], "tool_choice": "f"}, "tool_choice"),
        (
            {"tools": [tool()], "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice",
        ),
        ({"tools": [tool(type="none")], "tool_choice": "required"}, "tools"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"tools": [tool()], "response_format": {"type": "json_object"}}, "response_format"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ],
    RESPONSES: [
        ({"input": []}, "input"),
        ({"input": "a", "store": 1}, "store"),
        ({"input": "a", "reasoning": {"effort": "most"}}, "reasoning"),
        ({"input": "a", "reasoning": {"summary": "auto"}}, "reasoning"),
        ({"input": "a", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": "a", "tools": [{"type": "web_search"}]}, "tools"),
        ({"input": "a", "text": {"format": {"type": "xml"}}}, "text"),
        ({"input": "a", "text": {"verbosity": "loud"}}, "text"),
        ({"input": "a", "text": {"format": "xml"}}, "text"),
        ({"input": "a", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "a", "colour": 1}, "colour"),
        ({"input": "a", "temperature": -1}, "temperature"),
    ],
    "/tokenize": [
        ({}, "prompt"),
        ({"prompt": "a", "messages": HELLO}, "prompt"),
        ({"prompt": "a", "tools": []}, "tools"),
        ({"messages": HELLO, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ],
    "/detokenize": [
        ({"tokens": [10**6]}, "tokens"),
        ({"tokens": [7] * (4 * CONTEXT + 1)}, "tokens"),
    ],
}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [(path, *each) for path, refused in REFUSED.items() for each in refused],
)
def test_fields_of_an_endpoint(
    server: Served, path: str, fields: dict[str, Any], param: str
) -> None:
    given = {"messages": HELLO} if path == CHAT else {}
    assert server.refused(path, **given | fields)["param"].partition(".")[0] == param


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, RESPONSES])
def test_a_text_that_cannot_fit_is_not_split(
    server: Served, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def split(*_: Any, **__: Any) -> Any:
        raise AssertionError("the text was split into tokens")

    fields: dict[str, Any] = {"prompt": "a" * 9000}
    if path != COMPLETIONS:
        messages = [{"role": "user", "content": "a" * 9000}]
        fields = {"messages": messages} if path == CHAT else {"input": messages}
    monkeypatch.setattr(server.state, "text_limit", TextLimit(CONTEXT, 4))
    monkeypatch.setattr(type(server.llm.tokenizer), "__call__", split)
    monkeypatch.setattr(type(server.llm.tokenizer), "encode", split)
    error = server.refused(path, **fields)
    assert error["code"] == "context_length_exceeded"
    assert "bytes, at least" in error["message"]
    monkeypatch.undo()
    if path != RESPONSES:
        fields |= {"truncate_prompt_tokens": 5, "max_tokens": 1}
        assert server.post(path, **fields).json()["usage"]["prompt_tokens"] == 5


def test_a_prompt_that_is_too_long(server: Served) -> None:
    error = server.refused(COMPLETIONS, prompt="a" * 2000)
    assert error["code"] == "context_length_exceeded"
    assert "2000 tokens" in error["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": "a"}),
        (CHAT, {"messages": HELLO}),
        (RESPONSES, {"input": "a"}),
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [1]}),
    ],
)
def test_an_unknown_model(server: Served, path: str, body: dict[str, Any]) -> None:
    error = server.refused(path, 404, model="other", **body)
    assert (error["param"], error["code"]) == ("model", "model_not_found")


@pytest.mark.parametrize(
    "config",
    [
        {"method": "draft_model", "model": "/etc"},
        {"model": "ORG/NAME"},
        {"method": "ensemble", "drafters": "/etc"},
        {"method": "ensemble", "drafters": ["/etc", "/etc"]},
        {
            "method": "ensemble",
            "drafters": [{"method": "ngram"}, {"method": "rest", "datastore": "x"}],
        },
        {"method": "rest", "datastore": "/etc/passwd"},
        {"method": "corpus_ngram", "corpus": "/etc/passwd"},
        {"method": "layer_skip", "layers": "/etc/passwd"},
        {"method": "early_exit", "tree": "/etc/passwd.json"},
        {"method": "hybrid", "model": "/etc"},
        {"method": "ngram", "online": {"save": "/tmp/x"}},
        {"method": "ngram", "acceptance": {"rule": "/etc"}},
        {"method": "a.plugin"},
        {"method": "regex", "expected": {"json": {"properties": {"a": {}}}}},  # is compiled
    ],
)
def test_a_request_names_no_files(
    server: Served, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(*_: Any, **__: Any) -> Any:
        raise AssertionError("the configuration reached the engine")

    monkeypatch.setattr(server.llm.engine, "jobs", opened)
    error = server.refused(COMPLETIONS, prompt="a", speculative_config=config)
    assert error["param"] == "speculative_config"


def nested(levels: int) -> dict[str, Any]:
    config: dict[str, Any] = {"method": "ngram"}
    for _ in range(levels - 1):
        config = {"method": "ensemble", "drafters": [config, {"method": "ngram"}]}
    return config


@pytest.mark.parametrize(
    "config",
    [
        nested(8),
        nested(400),
        {"method": "ensemble", "drafters": [{"method": "ngram"}] * 8},
        {"method": "suffix", "suffix_decoding_max_cached_tokens": 100_001},
        {"method": "suffix", "suffix_decoding_max_cached_requests": 10**9},
        {"method": "prediction", "drafter": {"method": "recycle", "recycle_max_contexts": 10**9}},
        {"method": "early_exit", "tree": [[0] * 15_000]},
        {"method": "early_exit", "tree": [1] * 5000},
        {"method": "ngram", "controller": {"rule": "batch", "lengths": [[[0]] * 100] * 100}},
    ],
)
def test_a_request_has_bounded_drafters(server: Served, config: dict[str, Any]) -> None:
    error = server.refused(COMPLETIONS, prompt="a", speculative_config=config)
    assert error["param"] == "speculative_config"
    assert " at most " in error["message"]


@pytest.mark.parametrize("acceptance", ["synthetic", {"rule": "synthetic"}])
def test_only_the_operator_replaces_the_text_by_chance(server: Served, acceptance: Any) -> None:
    config = {"method": "ngram", "acceptance": acceptance}
    error = server.refused(COMPLETIONS, prompt="a", speculative_config=config)
    assert "cannot ask for 'synthetic': start the server with it" in error["message"]


@pytest.mark.parametrize(
    "config",
    [
        {"method": []},
        {"method": {}},
        {"method": "ngram", "acceptance": {"rule": ["a"]}},
        {"method": "ngram", "acceptance": {"rule": {}}},
    ],
)
def test_names_that_are_no_text(server: Served, config: dict[str, Any]) -> None:
    server.refused(COMPLETIONS, prompt="a", speculative_config=config)


def test_the_operator_may_allow_more() -> None:
    given: dict[str, Any] = {"method": "suffix", "suffix_decoding_max_cached_tokens": 100_001}
    check_speculation(given, SpeculativeConfig(**given))
    check_speculation(nested(MAX_NESTED), SpeculativeConfig())


def test_what_is_wrong_is_quoted_in_part(server: Served) -> None:
    """In the answer, and in the line of the log; and it is not compared in all its length."""
    long = "x" * 100_000
    for fields in (
        {long: 1},
        {"messages": [{"role": "user", "content": "x", long: 1}]},
        {"logit_bias": {long: 1}},
        {"structured_outputs": {long: 1}},
    ):
        body: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], **fields}
        error = server.refused("/v1/chat/completions", **body)
        assert len(error["message"]) <= 4000
        assert len(error["param"] or "") <= 200
    twice = f'{{"{long}": 1, "{long}": 2}}'
    error = server.http.post("/v1/completions", content=twice).json()["error"]
    assert error["code"] == "duplicate_field"
    assert error["param"] == long[:200]


def test_other_paths_and_methods(server: Served) -> None:
    for method, path, status in (("GET", "/nothing", 404), ("GET", COMPLETIONS, 405)):
        response = server.http.request(method, path)
        assert response.status_code == status
        assert response.json()["error"]["message"].startswith(f"{method} {path}")
    assert server.http.get("/v1/models/other").status_code == 404


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(VALUES, st.integers(0, 4))
def test_large_answers_are_written_alike(value: Any, levels: int) -> None:
    assert running._json(value, levels) == running._json(value)


def test_log_probabilities_of_prompts_are_bounded(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "MAX_PROMPT_LOGPROBS", 30)
    fields: dict[str, Any] = {"prompt": ["hello", "world"], "max_tokens": 0}
    error = server.refused(COMPLETIONS, **fields, prompt_logprobs=3)
    assert "at most 30 for all prompts together on this server, got 40" in error["message"]
    server.refused(COMPLETIONS, **fields, echo=True, logprobs=3)
    server.refused(COMPLETIONS, **fields, prompt_logprobs=1, n=2)
    assert server.post(COMPLETIONS, **fields, prompt_logprobs=2).status_code == 200


def test_tokens(server: Served) -> None:
    found = server.post("/tokenize", prompt="ab", return_token_strs=True).json()
    assert found["token_strs"] == ["a", "b"]
    assert found["count"] == 2
    assert server.post("/detokenize", tokens=found["tokens"]).json() == {"prompt": "ab"}


def test_arguments_that_are_nested_too_deeply_are_text(server: Served) -> None:
    function = {"name": "f", "arguments": "[" * 5000}
    call = {"id": "1", "type": "function", "function": function}
    messages = [*HELLO, {"role": "assistant", "tool_calls": [call]}, *HELLO]
    assert server.post("/tokenize", messages=messages).status_code == 200


def test_a_template_that_cannot_write_what_is_nested(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusing(*_: Any, **__: Any) -> Any:
        raise RecursionError

    monkeypatch.setattr("tokenleap.engine.prompts.rendered", refusing)
    assert "nested too deeply" in server.refused(CHAT, messages=HELLO)["message"]


def test_nulls_are_defaults(server: Served) -> None:
    names = ("temperature", "n", "stop", "suffix", "logit_bias", "user", "stream", "logprobs")
    assert server.post(COMPLETIONS, prompt="a", **dict.fromkeys(names)).status_code == 200
    assert server.post(COMPLETIONS, prompt="a", suffix="", user="me").status_code == 200


def test_the_engine_still_serves(server: Served) -> None:
    """After all of the above, nothing is left of it (the fixture looks at the end)."""
    assert server.complete()["choices"][0]["text"]
    assert server.state.open_sequences == 0
    assert server.http.get("/v1/models").json()["data"][0]["id"] == MODEL


def test_strict_is_no_number(server: Served) -> None:
    form = {"type": "json_schema", "name": "x", "schema": {"type": "object"}, "strict": 1e300}
    error = server.refused(RESPONSES, input="hello", text={"format": form})
    assert "strict must be true or false" in error["message"]
