"""Which web pages may use the server: a page must not reach it through its visitor's browser."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from tokenleap.serve.errors import APIError, refuse

__all__ = ["Origins"]


class Origins:
    """Refuses requests that a browser sends for the page of another server.

    Browsers send simple requests anywhere, whether the page may read the answer or not (CORS), and
    name the page in `Origin`. A page whose own name was made to lead to this machine (DNS
    rebinding) has that name in `Host`. Other clients send no `Origin`.

    Args:
        app: the rest of the app.
        host: the address that the server listens at; None if it is not known. At a loopback
            address, `Host` has to name this machine.
        allowed: origins of pages that may use it, whose hosts may be in `Host` too; "*" is any.
    """

    def __init__(self, app: ASGIApp, host: str | None, allowed: Sequence[str]) -> None:
        self._app = app
        self._allowed = {origin.lower() for origin in allowed}
        self._hosts = {urlsplit(origin).netloc for origin in self._allowed} - {""}
        self._local = host is not None and _is_loopback(host) and "*" not in self._allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        refused = None if scope["type"] == "lifespan" else self._refused(Headers(scope=scope))
        if refused is None:
            await self._app(scope, receive, send)
        else:
            await refuse(refused, scope, receive, send)

    def _refused(self, headers: Headers) -> APIError | None:
        host, origin = headers.get("host", "").lower(), headers.get("origin", "").lower()
        if self._local and host not in self._hosts and not _is_loopback(_name(host)):
            return APIError(
                403,
                "this server answers requests to localhost only: --allowed-origins names others.",
                code="host_not_allowed",
            )
        own = origin in (f"http://{host}", f"https://{host}")
        if not origin or own or self._allowed & {origin, "*"}:
            return None
        return APIError(
            403,
            "pages of other servers may not use this one: --allowed-origins names those that may.",
            code="origin_not_allowed",
        )


def _name(host: str) -> str:
    """The name or address in a `Host` header."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:  # brackets that do not close
        return ""


def _is_loopback(name: str) -> bool:
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
