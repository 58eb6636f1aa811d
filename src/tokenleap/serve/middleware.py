"""Around every request: its id, its log line, the API key, and what becomes of errors."""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import re
import time
import uuid
from collections.abc import Sequence

from starlette._utils import get_route_path
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tokenleap.serve.errors import APIError, refuse
from tokenleap.serve.page import FILES

__all__ = ["Authentication", "Faults", "RequestLog"]

_log = logging.getLogger("tokenleap.serve.requests")
_faults = logging.getLogger(__name__)

_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)
_OPEN = frozenset({*FILES, "/health", "/live", "/version", "/openapi.json", "/metrics"})
"""Paths that need no key, as the app's routes have them; all others need one, known or not."""


class Faults:
    """Answers a mistake of ours with 500: the traceback is in the log, and not in the answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        begun = False

        async def send_on(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, receive, send_on)
        except Exception:
            if begun or scope["type"] != "http":
                raise
            _faults.exception("%s %s failed", scope["method"], scope["path"])
            error = APIError(500, "an internal error: see the server's log.")
            await refuse(error, scope, receive, send)


class Authentication:
    """Refuses requests without an API key, except to paths that are open to all.

    The path is the one that the app routes by, wherever the app is mounted. So a path that is
    written in another way, or that the app does not know, needs a key.

    The state of requests with a key has the `caller`, which identifies the key.

    Args:
        app: the rest of the app.
        keys: the keys, at least one.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._callers = {key.encode(): hashlib.sha256(key.encode()).hexdigest() for key in keys}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        caller = None if scope["type"] == "lifespan" else self._caller(scope)
        if caller is not None:
            scope.setdefault("state", {})["caller"] = caller
        open_to_all = scope["type"] == "lifespan" or get_route_path(scope) in _OPEN
        if open_to_all or caller is not None:
            await self._app(scope, receive, send)
            return
        error = APIError(
            401,
            "an API key is needed: send 'Authorization: Bearer KEY'.",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await refuse(error, scope, receive, send)

    def _caller(self, scope: Scope) -> str | None:
        kind, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        found = given.strip().encode("latin-1", errors="replace")
        # All of them are compared, in constant time.
        matches = [of for key, of in self._callers.items() if hmac.compare_digest(found, key)]
        return matches[0] if kind.lower() == "bearer" and matches else None


class RequestLog:
    """Gives each request an id, and logs it as one line of JSON when it has ended.

    The id is the header `X-Request-Id` of the request if it has a valid one, and of the response.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        began, status = time.perf_counter(), 0

        async def send_on(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_on)
        finally:
            line = {
                "request_id": request_id,
                "method": scope["method"],
                "path": scope["path"],
                "status": status or None,
                "seconds": round(time.perf_counter() - began, 4),
                **scope["state"].get("log", {}),
            }
            _log.info("%s", json.dumps(line))
