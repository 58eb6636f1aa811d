"""Request bodies: read within limits of size and time, parsed strictly, checked field by field."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Any, ClassVar, TypeAlias, TypeVar

from annotated_types import Ge, MaxLen
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    FailFast,
    Tag,
    ValidationError,
    model_validator,
)
from pydantic.json_schema import models_json_schema
from pydantic_core import PydanticCustomError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocketClose

from tokenleap.core.config import nearest
from tokenleap.core.params import SamplingParams
from tokenleap.errors import PromptError, RequestError, TokenleapError, told
from tokenleap.serve.settings import Settings

_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


_TOO_LONG = ("no room in the context", "kv_cache_memory has ")
"""Parts of messages about prompts and outputs that would fit if they were shorter."""

_TAG = re.compile("<[a-z]+>")


_MOST_SHOWN = 200, 4000
"""Characters of a field's name and of a message, which may quote any length of a request."""


class APIError(Exception):
    """A request that is answered with an error object."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        names, messages = _MOST_SHOWN
        super().__init__(message[:messages])
        self.status, self.message, self.code = status, message[:messages], code
        self.param = None if param is None else param[:names]
        self.headers = dict(headers or {})

    def as_dict(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {
            "error": {
                "message": self.message,
                "type": _KINDS.get(self.status, kind),
                "param": self.param,
                "code": self.code,
            }
        }


def invalid(param: str | None, message: str, code: str | None = None) -> APIError:
    """A field of a request that has to change."""
    return APIError(400, message, param=param, code=code)


async def refuse(error: APIError, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a request with an error before it reaches the app; close a websocket (403)."""
    told = {"error": error.code, "param": error.param}
    scope.setdefault("state", {}).setdefault("log", told)
    if scope["type"] == "websocket":
        await WebSocketClose(reason=error.message)(scope, receive, send)
    else:
        await JSONResponse(error.as_dict(), error.status, error.headers)(scope, receive, send)


def unknown_response(response_id: str) -> APIError:
    """A response that is to be stopped, and is not being generated."""
    return APIError(404, f"no response '{response_id[:100]}' is being generated.")


def of_validation(error: ValidationError, known: Collection[str]) -> APIError:
    """The first error of a request's body."""
    first = error.errors(include_input=False, include_url=False)[0]
    # Tags of unions are not in the request.
    location = tuple(str(part)[:100] for part in first["loc"] if not _TAG.fullmatch(str(part)))
    if first["type"] in ("unsupported_field", "unknown_field"):
        location = (*location, first["ctx"]["field"])
    param = ".".join(str(part) for part in location) or None
    if first["type"] == "unknown_field":
        advice = nearest(str(location[-1]), sorted(known)) if len(location) == 1 else ""
        return invalid(param, f"unknown field '{param}'. {advice}".strip(), "unknown_field")
    reason = first["msg"].removeprefix("Value error, ")
    message = f"{param}: {reason[:1].lower()}{reason[1:]}." if param else reason
    return invalid(
        param, message, "unsupported_field" if first["type"] == "unsupported_field" else None
    )


def of_output(failure: Exception | None, error: str) -> APIError:
    """Why an output ended with an error: `failure`, in these words."""
    message = f"the request failed: {error}"
    if not (isinstance(failure, RequestError) and failure.by_parameters):
        return APIError(500, message)
    if any(part in message for part in _TOO_LONG):
        return invalid("max_tokens", message, "context_length_exceeded")
    return APIError(400, message)


def of_engine(error: TokenleapError, known: Collection[str], prompt: str) -> APIError:
    message = told(error)
    if isinstance(error, RequestError):
        return APIError(500, message)
    if isinstance(error, PromptError):
        too_long = any(part in message for part in _TOO_LONG)
        return invalid(prompt, message, "context_length_exceeded" if too_long else None)
    named = re.match(r"[a-z_]+(?=: )", message)
    own = {*known, "structured_outputs"}  # forms have several fields
    return invalid(named[0] if named and named[0] in own else None, message)


AT_ONCE = 65536
"""Bytes of JSON that are read in the event loop (about a millisecond); more in a thread."""


class Body(BaseModel):
    """Base of all bodies: no unknown fields, no conversion between types, null is the default."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    only: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """Fields of OpenAI's API that are not supported, with the values that ask for nothing."""

    dropped: ClassVar[Collection[str]] = ()
    """Fields that OpenAI's clients send back with a response, and that change nothing here."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        for name, neutral in cls.only.items():
            if value.get(name) is not None and value[name] not in neutral:
                shown = " or ".join(json.dumps(each) for each in neutral)
                advice = f"leave it out, or send {shown}" if shown else "leave it out"
                raise PydanticCustomError(
                    "unsupported_field", f"it is not supported: {advice}", {"field": name}
                )
        unset = {
            name
            for name, field in value.items()
            if field is None or name in cls.only or name in cls.dropped
        }
        for name in value:
            if name not in cls.model_fields and name not in unset:
                # Here, because pydantic would collect an error for each of them.
                shown = name.encode(errors="replace").decode()  # halves of characters
                raise PydanticCustomError("unknown_field", "unknown field", {"field": shown})
        return {name: field for name, field in value.items() if name not in unset}


AnyBody = TypeVar("AnyBody", bound=Body)


def parsed(kind: type[AnyBody], value: Any) -> AnyBody:
    if not isinstance(value, dict):
        raise invalid(None, f"the body must be a JSON object, not {type(value).__name__}.")
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        refused = of_validation(error, kind.model_fields)
    raise refused  # without pydantic's error, which keeps the body


def by_kind(kind: Callable[[Any], str | None], expected: str) -> Discriminator:
    """Chooses the branch of a union, so that an error is about the branch that was meant."""
    return Discriminator(
        kind, custom_error_type="wrong_type", custom_error_message=f"it must be {expected}"
    )


def by_type(text: str = "", items: str = "", fields: str = "") -> Discriminator:
    """Chooses the branch of a union by the JSON type: `<text>`, `<list>` or `<object>`."""
    tags: dict[str, tuple[str, Any]] = {
        "<text>": (text, str),
        "<list>": (items, list),
        "<object>": (fields, (dict, Body)),
    }
    allowed = {tag: kind for tag, (name, kind) in tags.items() if name}

    def kind_of(value: Any) -> str | None:
        return next((tag for tag, kind in allowed.items() if isinstance(value, kind)), None)

    return by_kind(kind_of, " or ".join(name for name in (text, items, fields) if name))


async def read(request: Request, kind: type[AnyBody], settings: Settings) -> AnyBody:
    """The body of a request, which is of this kind."""
    content = await content_of(request, settings)
    if len(content) <= AT_ONCE:
        return parsed(kind, _loads(content))
    return await asyncio.to_thread(lambda: parsed(kind, _loads(content)))


async def content_of(request: Request, settings: Settings) -> bytes:
    try:
        async with asyncio.timeout(settings.body_timeout):
            return await _read(request, settings.max_body_bytes)
    except TimeoutError:
        raise APIError(408, f"no whole body in {settings.body_timeout:g} s.") from None


async def _read(request: Request, most: int) -> bytes:
    too_large = APIError(413, f"the body is larger than {most} bytes, the limit of this server.")
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > most:
        raise too_large
    parts, size = [], 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > most:
                raise too_large
            parts.append(part)
    except ClientDisconnect:
        raise APIError(400, "the client went away.") from None
    return b"".join(parts)


def _loads(content: bytes) -> Any:
    try:
        return json.loads(
            content.decode(), object_pairs_hook=_without_duplicates, parse_constant=_no_constant
        )
    except UnicodeDecodeError as error:
        raise invalid(None, f"the body is not UTF-8: {error.reason}.") from None
    except RecursionError:
        raise invalid(None, "the body is not valid JSON: it is nested too deeply.") from None
    except ValueError as error:  # also of an integer with thousands of digits
        raise invalid(None, f"the body is not valid JSON: {error}.") from None


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen = set[str]()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise invalid(twice, f"{twice}: it is there twice: give it once.", "duplicate_field")
    return found


def _no_constant(name: str) -> Any:
    raise invalid(None, f"the body is not valid JSON: {name} is no JSON number.")


# The OpenAPI description of bodies that endpoints parse by themselves (`body.py`).


_REFERENCE = "#/components/schemas/{model}"
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_STATUSES = {
    400: "a field has to change",
    401: "no API key, or a wrong one",
    403: "a page of another server asks",
    404: "no such model",
    408: "the body came too slowly",
    413: "the body is too large",
    429: "too many requests run and wait, or the API key is beyond its limits",
    500: "the request failed",
    503: "the server is shutting down, or the model could not be loaded",
}
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_kinds: dict[str, type[Body]] = {}
_examples: dict[str, dict[str, Any]] = {}


def takes(kind: type[Body], **example: Any) -> dict[str, Any]:
    """Arguments of a route whose body is of this kind.

    Args:
        example: the fields of an example besides the model.
    """
    _kinds[kind.__name__], _examples[kind.__name__] = kind, example
    reference = {"$ref": _REFERENCE.format(model=kind.__name__)}
    return {
        "openapi_extra": {
            "requestBody": {
                "required": True,
                "content": {"application/json": {"schema": reference}},
            }
        },
        **fails(*_STATUSES),
    }


def fails(*statuses: int) -> dict[str, Any]:
    """Arguments of a route that may answer with an error object and one of these statuses."""
    error = {"application/json": {"schema": {"$ref": _REFERENCE.format(model="Error")}}}
    found = {status: {"description": _STATUSES[status], "content": error} for status in statuses}
    return {"responses": found}


def describe(app: FastAPI, settings: Settings) -> dict[str, Any]:
    """The OpenAPI description of an app, with the bodies' schemas; made once.

    The bounds of numbers are those of `SamplingParams` and of this server.
    """
    if app.openapi_schema is None:
        made = get_openapi(title=app.title, version=app.version, routes=app.routes)
        listed = [(kind, "validation") for kind in _kinds.values()]
        _, bodies = models_json_schema(listed, ref_template=_REFERENCE)  # type: ignore[arg-type]
        schemas = made.setdefault("components", {}).setdefault("schemas", {})
        schemas.update(bodies["$defs"])
        bounds = _bounds(settings)
        for kind in _kinds:
            _narrow(schemas[kind]["properties"], bounds)
            schemas[kind]["examples"] = [{"model": settings.model, **_examples[kind]}]
        schemas["Error"] = _ERROR
        made["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        made["security"] = [{"key": []}, {}]  # none is needed without --api-key
        app.openapi_schema = made
    return app.openapi_schema


def _branches(schema: dict[str, Any]) -> list[dict[str, Any]]:
    """The types that a value may have."""
    found: list[dict[str, Any]] = schema.get("anyOf", [schema])
    return found


def _bounds(settings: Settings) -> dict[str, dict[str, Any]]:
    """Bounds of a field's numbers or texts, by the field's name."""
    found = {}
    for name, schema in SamplingParams.model_json_schema()["properties"].items():
        numbers = [each for each in _branches(schema) if each.get("type") in ("integer", "number")]
        found[name] = {key: each[key] for each in numbers for key in _BOUNDS if key in each}
    logprobs = {"minimum": 0, "maximum": settings.max_logprobs}
    found |= dict.fromkeys(("logprobs", "top_logprobs", "prompt_logprobs"), logprobs)
    found["n"] = {**found["n"], "maximum": settings.max_n}
    found["model"] = {"enum": list(settings.served_model_names)}
    return found


def _narrow(fields: dict[str, dict[str, Any]], bounds: dict[str, dict[str, Any]]) -> None:
    """Add bounds to fields that have none of their own."""
    for name in fields.keys() & bounds.keys():
        for each in _branches(fields[name]):
            text = name == "model" and each.get("type") == "string"
            if text or each.get("type") in ("integer", "number"):
                each.update({key: value for key, value in bounds[name].items() if key not in each})


# Types of fields that several bodies have: lists that end at their first error, texts, prompts.


T = TypeVar("T")


class FirstError(FailFast):
    """A list ends at its first error, where pydantic would collect one for each item."""

    def __hash__(self) -> int:  # unions need it
        return hash(self.fail_fast)


Items: TypeAlias = Annotated[list[T], MaxLen(10_000), FirstError()]
JSONObject: TypeAlias = dict[str, Any]
Text: TypeAlias = Annotated[str, MaxLen(1000)]
Texts: TypeAlias = Annotated[list[Text], MaxLen(64), FirstError()]
TokenIds: TypeAlias = Annotated[list[Annotated[int, Ge(0)]], FirstError()]


def few(most: int) -> Callable[[Any], Any]:
    """Refuses a large object before it is read: pydantic would collect an error for each item."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > most:
            shown = {"most": most}
            raise PydanticCustomError("too_long", "it must have at most {most} items", shown)
        return value

    return check


def _kind_of_prompt(value: Any) -> str | None:
    if isinstance(value, str):
        return "<text>"
    if not isinstance(value, list):
        return None
    first = value[0] if value else ""
    if isinstance(first, str):
        return "<texts>"
    return "<lists>" if isinstance(first, list) else "<ids>"


Prompts: TypeAlias = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[Items[str], Tag("<texts>")]
    | Annotated[TokenIds, Tag("<ids>")]
    | Annotated[Items[TokenIds], Tag("<lists>")],
    by_kind(_kind_of_prompt, "a string, token ids, or a list of these"),
]
