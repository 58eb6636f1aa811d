"""Web pages of other servers cannot use this one through their visitor's browser."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tokenleap.serve.app import Origins

HERE = "https://here.example"


def status(bound: str | None, allowed: tuple[str, ...] = (), /, **headers: str) -> int:
    """The status of a request with these headers; 200 if it reached the app."""
    found: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            found.append(message["status"])

    listed = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": listed}
    asyncio.run(Origins(app, bound, allowed)(scope, app, send))  # type: ignore[arg-type]
    return found[0]


@pytest.mark.parametrize("bound", ["127.0.0.1", "localhost", "::1", "0.0.0.0", None])
@pytest.mark.parametrize("host", ["127.0.0.1:8000", "localhost", "LOCALHOST:80", "[::1]:8000"])
def test_clients_on_this_machine_are_served(bound: str | None, host: str) -> None:
    assert status(bound, host=host) == 200
    assert status(bound, host=host, origin=f"http://{host}") == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "localhost.evil", "[", ""])
def test_another_name_for_this_machine(host: str) -> None:
    """DNS rebinding: the page's own name leads to this machine."""
    assert status("127.0.0.1", host=host) == 403
    assert status("127.0.0.1", (HERE,), host=host, origin=f"http://{host}") == 403
    assert status("127.0.0.1", ("*",), host=host) == 200
    assert status("0.0.0.0", host=host) == 200  # the server may have any name


@pytest.mark.parametrize(
    "origin",
    ["http://evil.example", "null", "http://localhost", "http://localhost:3000", "x", "http://é"],
)
@pytest.mark.parametrize("bound", ["127.0.0.1", "0.0.0.0", None])
def test_another_origin(bound: str | None, origin: str) -> None:
    assert status(bound, host="localhost:8000", origin=origin) == 403
    assert status(bound, (HERE,), host="localhost:8000", origin=origin) == 403
    assert status(bound, ("*",), host="localhost:8000", origin=origin) == 200


def test_allowed_origins() -> None:
    assert status("127.0.0.1", (HERE,), host="localhost:8000", origin=HERE) == 200
    # Behind a proxy on this machine, which passes the name on.
    assert status("127.0.0.1", (HERE,), host="here.example", origin=HERE) == 200
    assert status("127.0.0.1", (HERE,), host="here.example") == 200
    assert status("127.0.0.1", (HERE,), host="here.example", origin="http://evil.example") == 403
