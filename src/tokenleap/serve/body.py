"""Request bodies: read within limits of size and time, parsed strictly, checked field by field."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Discriminator, ValidationError, model_validator
from pydantic_core import PydanticCustomError
from starlette.requests import ClientDisconnect, Request

from tokenleap.serve.errors import APIError, invalid, of_validation
from tokenleap.serve.settings import Settings

__all__ = ["AT_ONCE", "Body", "by_kind", "by_type", "content_of", "parsed", "read"]

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
    """A body of this kind.

    Raises:
        APIError: 400, which names the field.
    """
    if not isinstance(value, dict):
        raise invalid(None, f"the body must be a JSON object, not {type(value).__name__}.")
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        refused = of_validation(error, kind.model_fields)
    raise refused  # without pydantic's error, which keeps the body


def by_kind(kind: Callable[[Any], str | None], expected: str) -> Discriminator:
    """Chooses the branch of a union, so that an error is about the branch that was meant.

    Args:
        kind: the tag of a value's branch, in angle brackets; None if it has none.
        expected: what a value has to be.
    """
    return Discriminator(
        kind, custom_error_type="wrong_type", custom_error_message=f"it must be {expected}"
    )


def by_type(text: str = "", items: str = "", fields: str = "") -> Discriminator:
    """Chooses the branch of a union by the JSON type: `<text>`, `<list>` or `<object>`.

    Args:
        text: what a string is, if one is allowed.
        items: what a list is, if one is allowed.
        fields: what an object is, if one is allowed.
    """
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
    """The body of a request, which is of this kind.

    Raises:
        APIError: it is too large (413), too slow (408), not JSON, or a field is wrong (400).
    """
    content = await content_of(request, settings)
    if len(content) <= AT_ONCE:
        return parsed(kind, _loads(content))
    return await asyncio.to_thread(lambda: parsed(kind, _loads(content)))


async def content_of(request: Request, settings: Settings) -> bytes:
    """The body of a request as it came.

    Raises:
        APIError: it is too large (413) or too slow (408).
    """
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
