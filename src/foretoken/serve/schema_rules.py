"""Which fields of a body contradict or need each other, in JSON Schema.

The endpoints check the same by themselves, with a message for each. Null is the same as no field.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from foretoken.core.params import GREEDY_BELOW
from foretoken.serve.fields import TokenizeBody

__all__ = ["RULES"]

_Schema: TypeAlias = dict[str, Any]


def _has(name: str, value: _Schema) -> _Schema:
    """A body whose field has a value of this schema."""
    return {"required": [name], "properties": {name: value}}


def _is(name: str, *values: Any) -> _Schema:
    return _has(name, {"enum": list(values)})


def _given(name: str) -> _Schema:
    return _has(name, {"not": {"type": "null"}})


def _needs(one: _Schema, other: _Schema) -> _Schema:
    return {"if": one, "then": other}


def _without(one: _Schema, *others: _Schema) -> _Schema:
    return {"if": one, "then": {"not": {"anyOf": list(others)}}}


def _at_most_one(given: Sequence[_Schema]) -> list[_Schema]:
    return [_without(one, *given[place:]) for place, one in enumerate(given[:-1], 1)]


_STREAM = _needs(_given("stream_options"), _is("stream", True))
_COPIES = _without(
    _has("n", {"type": "integer", "minimum": 2}),
    _has("temperature", {"type": "number", "exclusiveMaximum": GREEDY_BELOW}),
)
_GOES_ON = _without(_is("continue_final_message", True), _is("add_generation_prompt", True))
_NO_SPECIAL = {"not": _is("add_special_tokens", True)}

_FORMS = [
    *(_given(f"guided_{kind}") for kind in ("json", "regex", "choice", "grammar")),
    _given("structured_outputs"),
    _has("response_format", {"type": "object", **_is("type", "json_schema", "json_object")}),
]
_LEFT_TO_FORMS = [
    _has("min_tokens", {"type": "integer", "minimum": 1}),
    _is("ignore_eos", True),
    _given("allowed_token_ids"),
]
"""What structured outputs decide themselves."""

_TOOLS = _has("tools", {"type": "array", "minItems": 1})
_CHOICE = _has("tool_choice", {"not": {"enum": [None, "none"]}})
_FORCED = _has("tool_choice", {"not": {"enum": [None, "none", "auto"]}})
_SHOWN = {"allOf": [_TOOLS, {"not": _is("tool_choice", "none")}]}

RULES: Mapping[str, Sequence[_Schema]] = {
    "CompletionBody": [
        _STREAM,
        _COPIES,
        *_at_most_one(_FORMS),
        _without({"anyOf": _FORMS}, *_LEFT_TO_FORMS),
        {"if": {"not": _given("n")}, "then": {"properties": {"best_of": {"enum": [None, 1]}}}},
        _needs(
            _given("add_special_tokens"),
            _has("prompt", {"type": ["string", "array"], "prefixItems": [{"type": "string"}]}),
        ),
    ],
    "ChatBody": [
        _STREAM,
        _COPIES,
        *_at_most_one(_FORMS),
        _without({"anyOf": [*_FORMS, _FORCED]}, *_LEFT_TO_FORMS),
        _without(_SHOWN, *_FORMS),
        _needs({"anyOf": [_given("parallel_tool_calls"), _CHOICE]}, _TOOLS),
        _needs(_given("top_logprobs"), _is("logprobs", True)),
        _without(_given("max_tokens"), _given("max_completion_tokens")),
        _GOES_ON,
        _NO_SPECIAL,
    ],
    "TokenizeBody": [
        {"oneOf": [_given("prompt"), _given("messages")]},
        _without(_given("prompt"), *map(_given, TokenizeBody.for_messages)),
        _needs(_given("messages"), _NO_SPECIAL),
        _GOES_ON,
    ],
}
"""By the name of the body; all of them hold."""
