"""From a request's fields to `SamplingParams`, and which speculation a request may ask for."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, Literal, get_args, get_origin

from tokenleap.config import SpeculativeConfig
from tokenleap.control import CONTROLLERS
from tokenleap.core.acceptance import RULES
from tokenleap.core.params import SamplingParams
from tokenleap.drafters.registry import METHODS, file_fields
from tokenleap.serve.errors import APIError, invalid
from tokenleap.serve.fields import ResponseBody, SamplingBody
from tokenleap.serve.settings import Settings

__all__ = ["check_speculation", "form_field", "form_of", "params_of", "wants_form"]

_SAME = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty"),
    *("frequency_penalty", "seed", "stop", "stop_token_ids", "ignore_eos", "min_tokens"),
    *("include_stop_str_in_output", "skip_special_tokens", "bad_words", "allowed_token_ids"),
    *("truncate_prompt_tokens", "prompt_logprobs", "n"),
)
"""Fields with the same name and meaning in `SamplingParams`."""

_WORDS = ("method", "acceptance", "controller", "rule")
_OWN = frozenset({"model", "draft_tokenizer", "online", "expected"})
"""Fields of speculation that load a model, write files, or make the engine compile a form."""
MAX_NESTED, MAX_DRAFTERS = 4, 8
"""Most levels of drafters in a request's configuration, and most drafters in all."""
_MEMORY = frozenset(
    {
        "suffix_decoding_max_cached_requests",
        "suffix_decoding_max_cached_tokens",
        "recycle_max_contexts",
    }
)
"""Options that say how much a drafter keeps, without a limit of their own."""


def params_of(
    body: SamplingBody,
    settings: Settings,
    defaults: Mapping[str, Any],
    *,
    max_tokens: int | None,
    most: int | None = None,
    logprobs: int | None,
    form: Mapping[str, Any] | None,
) -> SamplingParams:
    """The sampling parameters of a request. It may compile a grammar: call it off the loop.

    Args:
        body: the request.
        settings: has the server's limits.
        defaults: the model's own values of what the request does not say.
        max_tokens: what the request says.
        most: `max_tokens` if neither it nor the model says it.
        logprobs: as `SamplingParams` has it.
        form: fields of `StructuredOutputs`, or None.

    Raises:
        APIError: a limit of the server is exceeded.
        ConfigError: a value is out of range or contradicts another.
    """
    fields = {name: getattr(body, name) for name in _SAME if getattr(body, name) is not None}
    if (body.n or 1) > settings.max_n:
        raise invalid("n", f"n: at most {settings.max_n} on this server, got {body.n}.")
    own = "top_logprobs" if "top_logprobs" in type(body).model_fields else "logprobs"
    for name, count in ((own, logprobs), ("prompt_logprobs", body.prompt_logprobs)):
        if count is not None and not 0 <= count <= settings.max_logprobs:
            limit = settings.max_logprobs
            raise invalid(name, f"{name}: 0 to {limit} on this server, got {count}.")
    if body.logit_bias is not None:
        fields["logit_bias"] = {_token_id(key): each for key, each in body.logit_bias.items()}
    if form is not None:
        fields["structured_outputs"] = dict(form)
    fields["max_tokens"] = defaults.get("max_tokens", most) if max_tokens is None else max_tokens
    return SamplingParams.parse({**fields, "logprobs": logprobs}, defaults)


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) < 10):
        raise invalid("logit_bias", f"logit_bias: {key!r} is no token id.")
    return int(key)


def form_of(
    body: SamplingBody, response_format: Mapping[str, Any] | None, param: str = "response_format"
) -> dict[str, Any] | None:
    """The form that a request wants its output to have, as fields of `StructuredOutputs`.

    Args:
        body: has vLLM's ways to say so.
        response_format: OpenAI's way.
        param: the field that `response_format` comes from.

    Raises:
        APIError: there are several, or `response_format` is not known.
    """
    found: dict[str, dict[str, Any]] = {}
    for kind in ("json", "regex", "choice", "grammar"):
        if (value := getattr(body, f"guided_{kind}")) is not None:
            found[f"guided_{kind}"] = {kind: value}
    if body.structured_outputs is not None:
        found["structured_outputs"] = body.structured_outputs
    if response_format is not None and (form := _of_format(response_format, param)) is not None:
        found[param] = form
    if len(found) > 1:
        raise invalid(
            list(found)[1], f"{' and '.join(found)} contradict each other: send one of them."
        )
    return next(iter(found.values()), None)


def form_field(body: SamplingBody | ResponseBody) -> str | None:
    """The field that says which form the output has."""
    kinds = (f"guided_{kind}" for kind in ("json", "regex", "choice", "grammar"))
    names = ("structured_outputs", *kinds, "response_format", "text", "tools")
    return next((name for name in names if getattr(body, name, None) is not None), None)


def wants_form(body: SamplingBody | ResponseBody) -> bool:
    """Whether a grammar may have to be compiled for a request."""
    field = form_field(body)
    return field is not None and (
        field != "tools" or getattr(body, "tool_choice", None) not in (None, "none", "auto")
    )


def _of_format(given: Mapping[str, Any], param: str) -> dict[str, Any] | None:
    kind, rest = given.get("type"), {k: v for k, v in given.items() if k != "type"}
    if kind == "json_schema":
        if param == "response_format":  # /v1/responses has the same fields one level higher
            rest = rest["json_schema"] if set(rest) == {"json_schema"} else {}
        if not isinstance(rest, dict) or not isinstance(rest.get("schema"), dict):
            raise invalid(param, f"{param}: json_schema needs an object under 'schema'.")
        if unknown := set(rest) - {"name", "description", "schema", "strict"}:
            raise invalid(param, f"{param}: json_schema has no field '{min(unknown)}'.")
        return {"json": rest["schema"]}
    if kind not in ("text", "json_object") or rest:
        raise invalid(
            param,
            f'{param}: known are {{"type": "text"}}, {{"type": "json_object"}} and "json_schema" '
            f"with a schema, got {json.dumps(dict(given))[:200]}.",
        )
    return {"json_object": True} if kind == "json_object" else None


# Speculation


def check_speculation(given: Any, own: SpeculativeConfig) -> None:
    """Refuse what makes the server read or write files, load models, compile forms, or keep much.

    Args:
        given: a request's `speculative_config`, or None.
        own: the server's.

    Raises:
        APIError: a field or a text of the configuration could do that, or it is too large.
    """
    drafters = _check_nesting(given)
    if drafters > MAX_DRAFTERS:
        raise _refused(f"at most {MAX_DRAFTERS} drafters on this server, got {drafters}.")
    _check_fields(given, "speculative_config")
    limits = _memory_limits(own)
    for name, value in _options_in(given):
        if name in limits and isinstance(value, int | float) and value > limits[name]:
            raise _refused(f"{name}: at most {limits[name]} on this server, got {value}.")


def _refused(message: str) -> APIError:
    return invalid("speculative_config", f"speculative_config: {message}")


def _check_nesting(given: Any, level: int = 0) -> int:
    """The number of drafters in a value.

    Raises:
        APIError: it is nested too deeply. What is returned can be read recursively.
    """
    if level > 2 * MAX_NESTED + 1:  # each level of drafters is an object, mostly in a list
        raise _refused(f"at most {MAX_NESTED} levels of drafters on this server.")
    if isinstance(given, Mapping):
        inner = sum(_check_nesting(value, level + 1) for value in given.values())
        return inner + ("method" in given)
    if isinstance(given, list):
        return sum(_check_nesting(value, level + 1) for value in given)
    return 0


def _check_fields(given: Any, path: str) -> None:
    if isinstance(given, Mapping):
        for name, value in given.items():
            here = f"{path}.{name}"
            if name in _OWN | file_fields():
                raise invalid(
                    "speculative_config",
                    f"{here}: a request cannot set it: start the server with it.",
                )
            if isinstance(value, str) and value not in (_names() if name in _WORDS else _words()):
                raise invalid("speculative_config", f"{here}: {value[:100]!r} is not known here.")
            _check_fields(value, here)
    elif isinstance(given, list):
        for value in given:
            if isinstance(value, str):
                raise invalid("speculative_config", f"{path}: text is not possible here.")
            _check_fields(value, path)


def _memory_limits(own: SpeculativeConfig) -> dict[str, int]:
    """Most that a request may set of each option of `_MEMORY`.

    It is the default, or what the server's own configuration has, if that is more.
    """
    limits = dict(_memory_defaults())
    for name, value in _options_in(own.options.model_dump()):
        if name in limits:
            limits[name] = max(limits[name], value)
    return limits


@cache
def _memory_defaults() -> Mapping[str, int]:
    fields = [field for spec in METHODS.values() for field in spec.options.model_fields.items()]
    return {name: field.default for name, field in fields if name in _MEMORY}


def _options_in(value: Any) -> Iterator[tuple[str, Any]]:
    """Names and values of all fields, at any depth."""
    if isinstance(value, Mapping):
        yield from value.items()
        value = list(value.values())
    if isinstance(value, list | tuple):
        for each in value:
            yield from _options_in(each)


@cache
def _names() -> frozenset[str]:
    """Methods, rules and controllers of this library."""
    return frozenset({*METHODS, *RULES, *CONTROLLERS})


@cache
def _words() -> frozenset[str]:
    """Texts that options of methods, rules and controllers may have: all choose from a few."""
    kinds = [spec.options for spec in METHODS.values()]
    classes = [*RULES.values(), *CONTROLLERS.values()]
    kinds += [options for each in classes if (options := getattr(each, "Options", None))]
    return frozenset(
        word
        for kind in kinds
        for field in kind.model_fields.values()
        for word in _literals(field.annotation)
    )


def _literals(annotation: Any) -> list[str]:
    if get_origin(annotation) is Literal:
        return [each for each in get_args(annotation) if isinstance(each, str)]
    return [word for part in get_args(annotation) for word in _literals(part)]
