"""Errors as OpenAI's API returns them, and their HTTP status."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from pydantic import ValidationError
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocketClose

from tokenleap.core.config import nearest
from tokenleap.errors import PromptError, RequestError, TokenleapError, told

__all__ = [
    "APIError",
    "invalid",
    "of_engine",
    "of_output",
    "of_validation",
    "refuse",
    "unknown_response",
]

_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


_TOO_LONG = ("no room in the context", "kv_cache_memory has ")
"""Parts of messages about prompts and outputs that would fit if they were shorter."""

_TAG = re.compile("<[a-z]+>")


class APIError(Exception):
    """A request that is answered with an error object.

    Args:
        message: what is wrong and what to do, in one line.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    def as_dict(self) -> dict[str, Any]:
        """OpenAI's error object."""
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
    location = tuple(part for part in first["loc"] if not _TAG.fullmatch(str(part)))
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
    """An error of the library about a request."""
    message = told(error)
    if isinstance(error, RequestError):
        return APIError(500, message)
    if isinstance(error, PromptError):
        too_long = any(part in message for part in _TOO_LONG)
        return invalid(prompt, message, "context_length_exceeded" if too_long else None)
    named = re.match(r"[a-z_]+(?=: )", message)
    own = {*known, "structured_outputs"}  # forms have several fields
    return invalid(named[0] if named and named[0] in own else None, message)
