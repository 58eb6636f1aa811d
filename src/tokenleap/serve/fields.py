"""The bodies of requests: OpenAI's fields, and vLLM's further ones."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    TypeAlias,
    get_args,
    get_origin,
    get_type_hints,
)

from annotated_types import Ge, Le, MaxLen, MinLen
from pydantic import BeforeValidator, Field, FiniteFloat, Tag, create_model

from tokenleap.config import SpeculativeConfig
from tokenleap.control import CONTROLLERS
from tokenleap.core.acceptance import RULES
from tokenleap.core.params import SamplingParams
from tokenleap.drafters.registry import METHODS, file_fields
from tokenleap.errors import ConfigError
from tokenleap.serve.body import (
    APIError,
    Body,
    Items,
    JSONObject,
    Prompts,
    Text,
    Texts,
    TokenIds,
    by_type,
    few,
    invalid,
)
from tokenleap.serve.settings import Settings

# The parts of a conversation as requests have them: messages, tools, calls, a prediction.


class TextPart(Body):
    """A part of a message's content."""

    type: Literal["text", "input_text", "output_text"]
    text: str
    only: ClassVar = {
        "annotations": ([],),
        "logprobs": ([],),
        "image_url": (),
        "input_audio": (),
        "file": (),
    }
    dropped: ClassVar = ("parsed",)


Content: TypeAlias = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[Items[TextPart], Tag("<list>")],
    by_type(text="a string", items="a list of text parts"),
]


class FunctionCall(Body):
    """A function's name, and its arguments as JSON."""

    dropped: ClassVar = ("parsed_arguments",)

    name: str
    arguments: str


class ToolCall(Body):
    """A call that the model made in an earlier turn."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class Message(Body):
    """A message of a conversation."""

    only: ClassVar = {
        "refusal": (),
        "annotations": ([],),
        "audio": (),
        "function_call": (),
        "reasoning": (),
        "reasoning_content": (),
    }
    dropped: ClassVar = ("parsed",)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    tool_calls: Items[ToolCall] | None = None
    tool_call_id: str | None = None


class Function(Body):
    """A function that the model may call."""

    name: Annotated[str, MinLen(1), MaxLen(64)]
    description: str | None = None
    parameters: JSONObject | None = None
    strict: bool | None = None


class Tool(Body):
    """A tool; all are functions."""

    type: Literal["function"]
    function: Function


class FunctionName(Body):
    """The name of a function."""

    name: str


class NamedTool(Body):
    """The one tool that the model has to call."""

    type: Literal["function"]
    function: FunctionName


class Prediction(Body):
    """A text that the answer will mostly repeat."""

    type: Literal["content"]
    content: Content

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


CacheSalt: TypeAlias = Annotated[Text, MinLen(1)] | None
"""vLLM's field: requests with the same API key and salt share what is kept between requests."""


class StreamOptions(Body):
    """When a stream tells its usage: in a last chunk, or in every chunk."""

    only: ClassVar = {"include_obfuscation": (False,)}

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Details(Body):
    """Speculation in a response, under `tokenleap` in each choice.

    Args:
        tokens: id, text and origin of each token, as they come.
        trace: what each step drafted and accepted, with p of every drafted token, at the end.
    """

    tokens: bool = False
    metrics: bool = False
    trace: bool = False


SAMPLED = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty"),
    *("frequency_penalty", "seed", "ignore_eos", "min_tokens", "include_stop_str_in_output"),
    *("skip_special_tokens", "truncate_prompt_tokens", "prompt_logprobs"),
)
"""Parameters that are fields of requests as they are; null is not given."""

_LIMITED = ("n", "stop", "stop_token_ids", "bad_words", "allowed_token_ids")
"""Those that have limits of their own in a request."""


def _asked(names: Iterable[str]) -> Any:
    """A body with these parameters. `SamplingParams` itself checks their bounds, and names them."""
    hints = get_type_hints(SamplingParams)
    found: dict[str, Any] = {}
    for name in names:
        kind = FiniteFloat if hints[name] is float else hints[name]
        about = SamplingParams.model_fields[name].description
        found[name] = (kind | None, Field(None, description=about))
    return create_model("Asked", __base__=Body, **found)


class SamplingBody(_asked(SAMPLED)):  # type: ignore[misc]
    """How the next token is drawn, and what the response has besides text."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Ge(1)] | None = None
    stop: (
        Annotated[
            Annotated[Text, Tag("<text>")] | Annotated[Texts, Tag("<list>")],
            by_type(text="a string", items="a list of strings"),
        ]
        | None
    ) = None
    logit_bias: Annotated[dict[str, FiniteFloat], BeforeValidator(few(1024))] | None = None
    user: str | None = None
    # vLLM's
    stop_token_ids: Annotated[TokenIds, MaxLen(1024)] | None = None
    bad_words: Annotated[Items[Text], MaxLen(256)] | None = None
    allowed_token_ids: TokenIds | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    cache_salt: CacheSalt = None
    structured_outputs: JSONObject | None = None
    guided_json: (
        Annotated[
            Annotated[str, Tag("<text>")] | Annotated[JSONObject, Tag("<object>")],
            by_type(text="a schema as a string", fields="an object"),
        ]
        | None
    ) = None
    guided_regex: str | None = None
    guided_choice: Items[str] | None = None
    guided_grammar: str | None = None
    # ours
    speculative_config: JSONObject | None = None
    tokenleap: Details | None = None

    @property
    def wants_trace(self) -> bool:
        return self.tokenleap is not None and self.tokenleap.trace


Effort: TypeAlias = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Verbosity: TypeAlias = Literal["low", "medium", "high"]


class WithoutEffect(Body):
    """OpenAI's fields that change nothing here; their values are checked."""

    metadata: (
        Annotated[
            dict[Annotated[str, MaxLen(64)], Annotated[str, MaxLen(512)]], BeforeValidator(few(16))
        ]
        | None
    ) = None
    prompt_cache_key: Text | None = None
    safety_identifier: Annotated[str, MaxLen(128)] | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast"] | None = None
    store: bool | None = None


class CompletionBody(SamplingBody):
    """The body of `/v1/completions`."""

    only: ClassVar = {"suffix": ("",)}

    prompt: Prompts
    max_tokens: Annotated[int, Ge(0)] | None = None
    logprobs: Annotated[int, Ge(0)] | None = None
    echo: bool | None = None
    best_of: int | None = None
    response_format: JSONObject | None = None


class Templated(Body):
    """The arguments of a chat template besides the messages."""

    tools: Annotated[Items[Tool], MaxLen(128)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: JSONObject | None = None


class ChatBody(Templated, WithoutEffect, SamplingBody):
    """The body of `/v1/chat/completions`."""

    only: ClassVar = {
        "modalities": (["text"],),
        "audio": (),
        "functions": (),
        "function_call": (),
        "web_search_options": (),
    }

    messages: Annotated[Items[Message], MinLen(1)]
    max_tokens: Annotated[int, Ge(0)] | None = None
    max_completion_tokens: Annotated[int, Ge(0)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Ge(0)] | None = None
    response_format: JSONObject | None = None
    tool_choice: (
        Annotated[
            Annotated[Literal["none", "auto", "required"], Tag("<text>")]
            | Annotated[NamedTool, Tag("<object>")],
            by_type(text="'none', 'auto' or 'required'", fields="an object that names a tool"),
        ]
        | None
    ) = None
    parallel_tool_calls: bool | None = None
    prediction: Prediction | None = None
    # without effect
    reasoning_effort: Effort | None = None
    verbosity: Verbosity | None = None


class InputMessage(Body):
    """A message of the input of `/v1/responses`."""

    dropped: ClassVar = ("id", "status")  # of a response's output that is sent back

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content


class Reasoning(Body):
    """How much a reasoning model thinks; without effect."""

    only: ClassVar = {"context": (), "generate_summary": (), "mode": (), "summary": ()}

    effort: Effort | None = None


class TextOptions(Body):
    """The form of a response's text."""

    format: JSONObject | None = None
    verbosity: Verbosity | None = None  # without effect


OF_RESPONSES = ("temperature", "top_p", "seed", "top_k")
"""Parameters that are fields of `/v1/responses`."""


class ResponseBody(WithoutEffect, _asked(OF_RESPONSES)):  # type: ignore[misc]
    """The body of `/v1/responses`: text in, text out."""

    only: ClassVar = {
        "background": (False,),
        "conversation": (),
        "include": ([],),
        "max_tool_calls": (),
        "parallel_tool_calls": (True,),
        "previous_response_id": (),
        "prompt": (),
        "stream_options": ({},),
        "tool_choice": ("auto", "none"),
        "tools": ([],),
        "truncation": ("disabled",),
    }

    model: str | None = None
    input: Annotated[
        Annotated[str, Tag("<text>")] | Annotated[Items[InputMessage], MinLen(1), Tag("<list>")],
        by_type(text="a string", items="a list of messages"),
    ]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Ge(1)] | None = None
    top_logprobs: Annotated[int, Ge(0), Le(0)] | None = None
    stream: bool | None = None
    text: TextOptions | None = None
    user: str | None = None
    reasoning: Reasoning | None = None
    # vLLM's and ours
    cache_salt: CacheSalt = None
    speculative_config: JSONObject | None = None


class EmbeddingBody(Body):
    """The body of `/v1/embeddings`."""

    stream: ClassVar[None] = None
    speculative_config: ClassVar[None] = None
    cache_salt: ClassVar[None] = None

    model: str | None = None
    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Ge(1)] | None = None
    user: str | None = None


class TokenizeBody(Templated):
    """The body of `/tokenize`: a prompt, or the messages of a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[Items[Message], MinLen(1)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """The body of `/detokenize`."""

    model: str | None = None
    tokens: TokenIds


# From a request's fields to `SamplingParams`, and which speculation a request may ask for.


_GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
_WORDS = ("method", "acceptance", "controller", "rule")
_OWN = frozenset({"model", "draft_tokenizer", "online", "expected"})
"""Fields of speculation that load a model, write files, or make the engine compile a form."""
MAX_NESTED, MAX_DRAFTERS, MAX_VALUES = 4, 8, 4096
"""Most levels of drafters in a request's configuration; most drafters, and most values, in all."""
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
    """The sampling parameters of a request. It may compile a grammar: call it off the loop."""
    named = (*SAMPLED, *_LIMITED)
    fields = {name: getattr(body, name) for name in named if getattr(body, name) is not None}
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
    """The form that a request wants its output to have, as fields of `StructuredOutputsParams`."""
    found: dict[str, dict[str, Any]] = {
        name: {name.removeprefix("guided_"): value}
        for name in _GUIDED
        if (value := getattr(body, name)) is not None
    }
    if body.structured_outputs is not None:
        found["structured_outputs"] = body.structured_outputs
    if response_format is not None and (form := _of_format(response_format, param)) is not None:
        found[param] = form
    if len(found) > 1:
        raise invalid(
            list(found)[1], f"{' and '.join(found)} contradict each other: send one of them."
        )
    return next(iter(found.values()), None)


def form_field(body: SamplingBody | ResponseBody | EmbeddingBody) -> str | None:
    """The field that says which form the output has."""
    names = ("structured_outputs", *_GUIDED, "response_format", "text", "tools")
    return next((name for name in names if getattr(body, name, None) is not None), None)


def wants_form(body: SamplingBody | ResponseBody | EmbeddingBody) -> bool:
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
        if not isinstance(rest.get("strict"), bool | None):
            raise invalid(param, f"{param}: strict must be true or false.")
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
    """Refuse what makes the server read files, load models, compile forms, or keep much."""
    drafters = _num_drafters(given)
    if drafters > MAX_DRAFTERS:
        raise _refused(f"at most {MAX_DRAFTERS} drafters on this server, got {drafters}.")
    method = given.get("method") if isinstance(given, dict) else None
    spec = METHODS.get(method) if isinstance(method, str) else None
    if spec is not None and spec.takes_head and given != {"method": own.method_name}:
        raise _refused(f"{method} needs a head; without the field, {own.method_name} drafts.")
    _check_fields(given, "speculative_config")
    limits = _memory_limits(own)
    for name, value in _options_in(given):
        if name in limits and isinstance(value, int | float) and value > limits[name]:
            raise _refused(f"{name}: at most {limits[name]} on this server, got {value}.")


@cache
def methods_of_requests() -> dict[str, str]:
    """Methods that a request can name without further fields, and what they are."""
    found = {}
    for name, spec in METHODS.items():
        with suppress(ConfigError):  # it needs a model, a file or other drafters
            SpeculativeConfig(method=name)
            found[name] = spec.summary
    return found


def _refused(message: str) -> APIError:
    return invalid("speculative_config", f"speculative_config: {message}")


def _num_drafters(given: Any) -> int:
    """Drafters of a configuration, which must be neither deep nor long."""
    found, values, level = 0, 0, [given]
    for _ in range(2 * MAX_NESTED + 2):  # each level of drafters is an object, mostly in a list
        inner: list[Any] = []
        for each in level:
            if isinstance(each, Mapping | list):
                values += len(each)
                if values > MAX_VALUES:
                    raise _refused(f"at most {MAX_VALUES} values on this server.")
                found += isinstance(each, Mapping) and "method" in each
                inner += each.values() if isinstance(each, Mapping) else each
        if not inner:
            return found
        level = inner
    raise _refused(f"at most {MAX_NESTED} levels of drafters on this server.")


def _check_fields(given: Any, path: str) -> None:
    if isinstance(given, Mapping):
        for name, value in given.items():
            here = f"{path}.{name}"
            if name in _OWN | file_fields():
                raise invalid(
                    "speculative_config",
                    f"{here}: a request cannot set it: start the server with it.",
                )
            if isinstance(value, str) and value in RULES and RULES[value].by_chance:
                raise _refused(
                    f"{name}: a request cannot ask for '{value}': start the server with it."
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
    """Most that a request may set of `_MEMORY`: the default, or what the server has if more."""
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
