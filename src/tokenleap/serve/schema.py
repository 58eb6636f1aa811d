"""The OpenAPI description of bodies that endpoints parse by themselves (`body.py`)."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from tokenleap.core.params import SamplingParams
from tokenleap.serve.body import Body
from tokenleap.serve.settings import Settings

__all__ = ["describe", "fails", "takes"]

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
    429: "too many requests run and wait",
    500: "the request failed",
    503: "the server is shutting down",
}
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_kinds: dict[str, type[Body]] = {}


def takes(kind: type[Body]) -> dict[str, Any]:
    """Arguments of a route whose body is of this kind."""
    _kinds[kind.__name__] = kind
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
        schemas["Error"] = _ERROR
        app.openapi_schema = made
    return app.openapi_schema


def _branches(schema: dict[str, Any]) -> list[dict[str, Any]]:
    """The types that a value may have."""
    found: list[dict[str, Any]] = schema.get("anyOf", [schema])
    return found


def _bounds(settings: Settings) -> dict[str, dict[str, Any]]:
    """What a field's numbers or texts may be, by the field's name."""
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
