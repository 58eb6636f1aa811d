"""Runs an app with uvicorn: the socket, timeouts of headers, signals, and a graceful end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, Protocol

import uvicorn
from starlette.types import ASGIApp

from tokenleap.async_llm import AsyncLLM
from tokenleap.errors import TokenleapError
from tokenleap.serve.app import create_app
from tokenleap.serve.protocol import timed_protocol
from tokenleap.serve.settings import Settings

__all__ = ["Serves", "TokenleapServer", "serve", "until_signalled"]

_log = logging.getLogger(__name__)


TELLING = 2
"""Seconds after the time to end in which clients are told that their requests were cut off."""
LAST_STEP = 5.0
"""Seconds that a step of the engine has left after that; then the process ends in its middle."""
KEEP_ALIVE = 75
"""Seconds after which idle connections are closed: more than clients and proxies keep theirs (httpx
5 s, nginx 60 s). Otherwise a request may meet a connection that is just being closed."""


class Serves(Protocol):
    """What is behind an app.

    Attributes:
        stopping: whether no more requests are taken.
    """

    stopping: bool

    @property
    def alive(self) -> bool:
        """Whether requests can be answered; the server ends if not."""
        ...

    def cut_off(self) -> None:
        """Tell the clients of all requests that the server shuts down before their end."""
        ...


class TokenleapServer(uvicorn.Server):
    """uvicorn's server with a graceful end.

    After SIGTERM or SIGINT, it lets those requests that run go on for `Settings.shutdown_timeout`
    seconds. Meanwhile it still listens: more requests are answered with 503, and so is `/health`.
    Then the clients of those that still run are told that they were cut off, and after `TELLING`
    seconds all connections are closed. A second SIGINT ends it at once.

    Args:
        app: the app.
        behind: what answers its requests.
        settings: the app's.
        ready: called when the server listens.
    """

    def __init__(
        self,
        app: ASGIApp,
        behind: Serves,
        settings: Settings,
        ready: Callable[[], object] = lambda: None,
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=timed_protocol(settings.header_timeout, settings.write_timeout),
                ws="none",
                lifespan="off",
                access_log=False,
                log_config=None,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE,
                timeout_graceful_shutdown=TELLING,
            )
        )
        self._behind, self._settings = behind, settings
        self._ready = ready
        self.interrupted = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen."""
        await super().startup(sockets)
        if self.started:
            self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let the requests end, and cut off those that do not in time; then listen no more."""
        self._behind.stopping = True
        busy = set(self.server_state.connections)
        for connection in busy:  # each is closed after its answer, and at once if it has none
            connection.shutdown()
        # Later clients connect anew for each request, so none is in the middle of one at the end.
        self.server_state.default_headers = [
            *self.server_state.default_headers,
            (b"connection", b"close"),
        ]
        loop = asyncio.get_running_loop()
        end = loop.time() + self._settings.shutdown_timeout
        await asyncio.sleep(0)  # in which idle connections are closed
        while busy & self.server_state.connections and loop.time() < end and not self.force_exit:
            await asyncio.sleep(0.02)
        if busy & self.server_state.connections:
            self._behind.cut_off()
        await super().shutdown(sockets)

    async def on_tick(self, counter: int) -> bool:
        """Whether to stop; also called when there is nothing to do."""
        return await super().on_tick(counter) or not self._behind.alive

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Begin to stop; called by a signal."""
        self._behind.stopping = True
        self.interrupted = self.interrupted or sig == signal.SIGINT
        super().handle_exit(sig, frame)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals without raising them again at the end: a graceful end is a success."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        both = (signal.SIGTERM, signal.SIGINT)
        before = {each: signal.signal(each, self.handle_exit) for each in both}
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)


def serve(
    llm: AsyncLLM,
    settings: Settings,
    at: socket.socket,
    ready: Callable[[], object] = lambda: None,
) -> None:
    """Serve a model until a signal ends it, then close `llm`.

    If a step of the engine still runs `LAST_STEP` seconds after the last connection was closed, the
    process ends at once, with the exit code that it would have had.

    Args:
        llm: the engine.
        settings: limits and names.
        at: a bound socket.
        ready: called when the server listens.

    Raises:
        KeyboardInterrupt: the signal was SIGINT.
        TokenleapError: the engine failed.
    """
    app = create_app(llm, settings)
    server = TokenleapServer(app, app.state.server, settings, ready)
    try:
        try:
            llm.measure_costs()
        except KeyboardInterrupt:
            server.interrupted = True
            raise
        until_signalled(server, at)
        if not llm.worker.alive:
            raise TokenleapError("the engine failed; its log says why: start the server again.")
    finally:
        if not llm.close(LAST_STEP):
            _leave(130 if server.interrupted else 0 if server.should_exit else 1)


def until_signalled(server: TokenleapServer, at: socket.socket) -> None:
    """Run a server until a signal ends it.

    Raises:
        KeyboardInterrupt: the signal was SIGINT.
    """
    server.run(sockets=[at])
    if server.interrupted:
        raise KeyboardInterrupt


def _leave(code: int) -> NoReturn:
    """End the process while another thread computes, which Python's own end would wait for."""
    _log.warning("a step of the engine did not end in time: the process ends without it")
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
