"""The OpenAPI description of bodies that endpoints parse by themselves (`body.py`)."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from foretoken.serve.body import Body

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


def describe(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI description of an app, with the bodies' schemas; made once."""
    if app.openapi_schema is None:
        made = get_openapi(title=app.title, version=app.version, routes=app.routes)
        listed = [(kind, "validation") for kind in _kinds.values()]
        _, bodies = models_json_schema(listed, ref_template=_REFERENCE)  # type: ignore[arg-type]
        schemas = made.setdefault("components", {}).setdefault("schemas", {})
        schemas.update(bodies["$defs"])
        schemas["Error"] = _ERROR
        app.openapi_schema = made
    return app.openapi_schema
