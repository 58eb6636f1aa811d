"""What a server tells about itself: metrics under vLLM's names, and its OpenAPI description."""

from __future__ import annotations

from collections.abc import Callable
from types import NoneType
from typing import Any

import pytest

from foretoken import __version__
from foretoken.serve.schema_rules import RULES
from tests.serve.support import MODEL, Served, samples, served


def test_metrics() -> None:
    with served() as running:
        before = samples(running)
        fields: Any = {"max_tokens": 40, "ignore_eos": True, "foretoken": {"metrics": True}}
        prompt = "ab" * 80
        metrics = [
            running.complete(prompt, **fields)["choices"][0]["foretoken"]["metrics"]
            for _ in range(2)
        ]
        after = samples(running)
        running.refused("/v1/completions", prompt="")
        assert samples(running)["vllm:request_success_total/length"] == 2

    def total(name: str) -> int:
        return sum(each[name] for each in metrics)

    expected = {
        "vllm:prompt_tokens_total": 320,
        "vllm:generation_tokens_total": 80,
        "vllm:prefix_cache_queries_total": 320,
        "vllm:prefix_cache_hits_total": total("cached_prompt_tokens"),
        "vllm:num_preemptions_total": 0,
        "vllm:request_success_total/length": 2,
        "vllm:spec_decode_num_drafts_total": total("num_drafts"),
        "vllm:spec_decode_num_draft_tokens_total": total("num_draft_tokens"),
        "vllm:spec_decode_num_accepted_tokens_total": total("num_accepted_tokens"),
        "vllm:time_to_first_token_seconds_count": 2,
        "vllm:e2e_request_latency_seconds_count": 2,
        "vllm:request_generation_tokens_sum": 80,
        "foretoken:drafter_failures_total": 0,
        "foretoken:requests_refused_total": 0,
    }
    assert {name: after[name] - before.get(name, 0) for name in expected} == expected
    assert expected["vllm:prefix_cache_hits_total"] > 0
    assert expected["vllm:spec_decode_num_drafts_total"] > 0
    positions = zip(*(each["accepted_per_position"] for each in metrics), strict=False)
    first = sum(next(positions))
    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total/0"
    assert after.get(name, 0) == first
    assert after["foretoken:step_seconds_total"] > 0
    assert after["foretoken:goodput_tokens_per_second"] > 0
    assert "foretoken:seconds_saved" in after


def test_the_load_while_requests_run(server: Served) -> None:
    with server.http.stream(
        "POST",
        "/v1/completions",
        json={
            "model": "tiny",
            "prompt": "a",
            "stream": True,
            "max_tokens": 900,
            "n": 2,
            "ignore_eos": True,
        },
    ) as response:
        next(response.iter_text())
        load = server.llm.engine.load
        assert load.running == 2
        assert load.waiting == 0
        assert 0 < load.kv_usage < 1


def test_the_openapi_description(server: Served) -> None:
    made = server.http.get("/openapi.json").json()
    post = made["paths"]["/v1/chat/completions"]["post"]
    schema = post["requestBody"]["content"]["application/json"]["schema"]
    schemas = made["components"]["schemas"]
    name = schema["$ref"].rpartition("/")[2]
    assert {"messages", "tools", "temperature"} <= set(schemas[name]["properties"])
    assert schemas[name]["additionalProperties"] is False
    references = set()

    def walk(value: Any) -> None:
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            if key == "$ref":
                references.add(item.removeprefix("#/components/schemas/"))
            elif isinstance(item, dict | list):
                walk(item)

    walk(made)
    assert references <= set(schemas)
    assert server.http.get("/docs").status_code == 404  # it would load scripts from elsewhere


def test_health_and_version(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    assert server.http.get("/health").status_code == 200
    assert server.http.get("/version").json() == {"version": __version__}
    monkeypatch.setattr(server.state, "stopping", True)
    assert server.http.get("/health").status_code == 503
    error = server.refused("/v1/completions", 503, prompt="a")
    assert "shutting down" in error["message"]


BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "CompletionBody": ("/v1/completions", {"prompt": "a"}),
    "ChatBody": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    "ResponseBody": ("/v1/responses", {"input": "a"}),
}


@pytest.mark.parametrize("kind", BODIES)
def test_the_bounds_in_the_description_are_those_of_the_server(server: Served, kind: str) -> None:
    schemas = server.http.get("/openapi.json").json()["components"]["schemas"]
    path, fields = BODIES[kind]
    with_bounds, found = schemas[kind]["properties"], 0
    for name, schema in with_bounds.items():
        for each in schema.get("anyOf", [schema]):
            step = 1 if each.get("type") == "integer" else 1e-3
            outside = [each[key] - step for key in ("minimum",) if key in each]
            outside += [each[key] for key in ("exclusiveMinimum",) if key in each]
            outside += [each[key] * 1.01 + 1 for key in ("maximum",) if key in each]
            more = {"logprobs": True} if kind == "ChatBody" and name == "top_logprobs" else {}
            for value in outside:
                sent = int(value) if each["type"] == "integer" else value
                error = server.refused(path, **fields, **more, **{name: sent})
                assert error["param"] == name, (name, sent, error)
                found += 1
    assert found >= 6
    assert with_bounds["model"]["enum"] == [MODEL]
    assert {"minimum": 0, "maximum": 2**63 - 1, "type": "integer"} in with_bounds["seed"]["anyOf"]


# Rules across fields

SAID: dict[str, Any] = {"role": "user", "content": "a"}
TOOL = {"type": "function", "function": {"name": "f"}}
NAMED = {"type": "function", "function": {"name": "f"}}
TEXT, OBJECT = {"type": "text"}, {"type": "json_object"}
PATHS = {"TokenizeBody": "/tokenize", **{kind: path for kind, (path, _) in BODIES.items()}}


def holds(schema: Any, value: Any) -> bool:
    """Whether a value fits a JSON Schema of the few words that the rules use."""
    known: dict[str, Callable[[Any], bool]] = {
        "required": lambda names: not isinstance(value, dict) or value.keys() >= set(names),
        "properties": lambda fields: (
            not isinstance(value, dict)
            or all(holds(fields[name], value[name]) for name in fields.keys() & value.keys())
        ),
        "enum": lambda values: any(type(each) is type(value) and each == value for each in values),
        "type": lambda kinds: any(
            isinstance(value, TYPES[kind]) and (isinstance(value, bool) <= (kind == "boolean"))
            for kind in ([kinds] if isinstance(kinds, str) else kinds)
        ),
        "minimum": lambda least: not isinstance(value, int) or value >= least,
        "exclusiveMaximum": lambda most: not isinstance(value, int | float) or value < most,
        "minItems": lambda least: not isinstance(value, list) or len(value) >= least,
        "prefixItems": lambda each: not isinstance(value, list) or holds(each[0], value[0]),
        "not": lambda one: not holds(one, value),
        "anyOf": lambda some: any(holds(each, value) for each in some),
        "allOf": lambda some: all(holds(each, value) for each in some),
        "oneOf": lambda some: sum(holds(each, value) for each in some) == 1,
        "if": lambda one: not holds(one, value) or holds(schema["then"], value),
        "then": lambda _: True,
    }
    return all(known[word](said) for word, said in schema.items())


TYPES: dict[str, type | tuple[type, ...]] = {
    "null": NoneType,
    "boolean": bool,
    "integer": int,
    "number": (int, float),
    "string": str,
    "array": list,
    "object": dict,
}
RULED: list[tuple[str, bool, dict[str, Any]]] = [
    ("CompletionBody", True, {"prompt": "a", "stream_options": None, "n": 2, "temperature": 1}),
    ("CompletionBody", True, {"prompt": "a", "stream_options": {}, "stream": True}),
    ("CompletionBody", False, {"prompt": "a", "stream_options": {}}),
    ("CompletionBody", False, {"prompt": "a", "stream_options": {}, "stream": None}),
    ("CompletionBody", False, {"prompt": "a", "n": 2, "temperature": 0}),
    ("CompletionBody", True, {"prompt": "a", "n": 1, "temperature": 0, "best_of": 1}),
    ("CompletionBody", True, {"prompt": "a", "n": 2, "best_of": 2}),
    ("CompletionBody", False, {"prompt": "a", "n": None, "best_of": 2}),
    ("CompletionBody", True, {"prompt": ["a"], "add_special_tokens": False}),
    ("CompletionBody", True, {"prompt": [1, 2], "add_special_tokens": None}),
    ("CompletionBody", False, {"prompt": [1, 2], "add_special_tokens": False}),
    ("CompletionBody", False, {"prompt": [[1, 2]], "add_special_tokens": True}),
    ("CompletionBody", True, {"prompt": "a", "guided_regex": "a", "response_format": TEXT}),
    ("CompletionBody", True, {"prompt": "a", "guided_regex": "a", "response_format": None}),
    ("CompletionBody", False, {"prompt": "a", "guided_regex": "a", "response_format": OBJECT}),
    ("CompletionBody", False, {"prompt": "a", "guided_regex": "a", "guided_json": {}}),
    ("CompletionBody", False, {"prompt": "a", "guided_regex": "a", "guided_choice": ["a"]}),
    ("CompletionBody", False, {"prompt": "a", "guided_grammar": "a", "guided_choice": ["a"]}),
    ("CompletionBody", False, {"prompt": "a", "guided_grammar": "a", "structured_outputs": {}}),
    ("CompletionBody", False, {"prompt": "a", "response_format": OBJECT, "structured_outputs": {}}),
    ("CompletionBody", True, {"prompt": "a", "guided_regex": "a", "min_tokens": 0}),
    ("CompletionBody", False, {"prompt": "a", "guided_regex": "a", "min_tokens": 1}),
    ("CompletionBody", False, {"prompt": "a", "response_format": OBJECT, "ignore_eos": True}),
    ("CompletionBody", False, {"prompt": "a", "guided_regex": "a", "allowed_token_ids": [1]}),
    ("ChatBody", False, {"stream_options": {}}),
    ("ChatBody", False, {"n": 2, "temperature": 0}),
    ("ChatBody", True, {"logprobs": True, "top_logprobs": 2}),
    ("ChatBody", True, {"logprobs": False, "top_logprobs": None}),
    ("ChatBody", False, {"logprobs": False, "top_logprobs": 2}),
    ("ChatBody", False, {"top_logprobs": 0}),
    ("ChatBody", True, {"max_tokens": 2, "max_completion_tokens": None}),
    ("ChatBody", False, {"max_tokens": 2, "max_completion_tokens": 2}),
    ("ChatBody", True, {"parallel_tool_calls": False, "tools": [TOOL]}),
    ("ChatBody", False, {"parallel_tool_calls": True, "tools": []}),
    ("ChatBody", True, {"tool_choice": "none"}),
    ("ChatBody", False, {"tool_choice": "auto"}),
    ("ChatBody", False, {"tool_choice": "auto", "tools": None}),
    ("ChatBody", True, {"tool_choice": "auto", "tools": [TOOL], "ignore_eos": True}),
    ("ChatBody", False, {"tool_choice": NAMED, "tools": [TOOL], "ignore_eos": True}),
    ("ChatBody", False, {"tool_choice": "required", "tools": [TOOL], "min_tokens": 1}),
    ("ChatBody", True, {"tool_choice": "none", "tools": [TOOL], "guided_regex": "a"}),
    ("ChatBody", True, {"tools": [TOOL], "response_format": TEXT}),
    ("ChatBody", False, {"tools": [TOOL], "guided_regex": "a"}),
    ("ChatBody", False, {"guided_json": {}, "guided_regex": "a"}),
    ("ChatBody", False, {"guided_regex": "a", "guided_choice": ["a"]}),
    ("ChatBody", False, {"guided_choice": ["a"], "guided_grammar": "a"}),
    ("ChatBody", False, {"guided_grammar": "a", "structured_outputs": {}}),
    ("ChatBody", False, {"response_format": OBJECT, "structured_outputs": {}}),
    ("ChatBody", True, {"add_special_tokens": False, "add_generation_prompt": True}),
    ("ChatBody", False, {"add_special_tokens": True}),
    ("ChatBody", False, {"continue_final_message": True, "add_generation_prompt": True}),
    ("TokenizeBody", True, {"prompt": "a", "messages": None, "add_special_tokens": True}),
    ("TokenizeBody", False, {}),
    ("TokenizeBody", False, {"prompt": "a", "messages": [SAID]}),
    ("TokenizeBody", False, {"prompt": "a", "chat_template_kwargs": {"mood": "good"}}),
    ("TokenizeBody", False, {"prompt": "a", "add_generation_prompt": False}),
    ("TokenizeBody", True, {"messages": [SAID], "add_special_tokens": False}),
    ("TokenizeBody", False, {"messages": [SAID], "add_special_tokens": True}),
    (
        "TokenizeBody",
        False,
        {"messages": [SAID], "continue_final_message": True, "add_generation_prompt": True},
    ),
]


def test_rules_across_fields_are_those_of_the_server(server: Served) -> None:
    schemas = server.http.get("/openapi.json").json()["components"]["schemas"]
    broken = set()
    for kind, accepted, fields in RULED:
        body: dict[str, Any] = {"messages": [SAID]} if kind == "ChatBody" else {}
        if kind != "TokenizeBody" and not {"max_tokens", "max_completion_tokens"} & fields.keys():
            body["max_tokens"] = 2
        body |= fields
        status = server.post(PATHS[kind], **body).status_code
        assert status == (200 if accepted else 400), (kind, fields)
        rules = schemas[kind]["allOf"]
        against = {place for place, rule in enumerate(rules) if not holds(rule, body)}
        assert bool(against) != accepted, (kind, fields, against)
        broken |= {(kind, place) for place in against}
    all_of_them = {(kind, place) for kind in RULES for place, _ in enumerate(RULES[kind])}
    assert broken == all_of_them  # each rule refuses something
