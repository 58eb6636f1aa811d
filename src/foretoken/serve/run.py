"""Runs an app with uvicorn: the socket, timeouts of headers, signals, and a graceful end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from foretoken.async_llm import AsyncLLM
from foretoken.errors import ForetokenError
from foretoken.serve.app import create_app
from foretoken.serve.settings import Settings

__all__ = ["ForetokenServer", "Serves", "serve", "until_signalled"]

_log = logging.getLogger(__name__)


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


def timed_protocol(seconds: float) -> type[H11Protocol]:
    """Uvicorn's protocol, which closes connections whose headers do not come in time.

    Args:
        seconds: from the connection, or from the first byte of a later request, to the last header.
    """

    class TimedProtocol(H11Protocol):
        _deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._wait()

        def data_received(self, data: bytes) -> None:
            if self._deadline is None and self._between_requests():
                self._wait()
            super().data_received(data)
            if not self._between_requests():
                self._stop_waiting()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_waiting()
            super().connection_lost(exc)

        def _between_requests(self) -> bool:
            return self.cycle is None or self.cycle.response_complete

        def _wait(self) -> None:
            self._deadline = self.loop.call_later(seconds, self._give_up)

        def _stop_waiting(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

        def _give_up(self) -> None:
            self._deadline = None
            if self._between_requests():
                self.transport.close()

    return TimedProtocol


class ForetokenServer(uvicorn.Server):
    """uvicorn's server with a graceful end.

    After SIGTERM or SIGINT, it takes no more requests and lets those that run go on for
    `Settings.shutdown_timeout` seconds. A second SIGINT ends it at once.

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
                http=timed_protocol(settings.header_timeout),
                ws="none",
                lifespan="off",
                access_log=False,
                log_config=None,
                server_header=False,
                timeout_graceful_shutdown=max(1, round(settings.shutdown_timeout)),
            )
        )
        self._behind = behind
        self._ready = ready
        self.interrupted = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen."""
        await super().startup(sockets)
        if self.started:
            self._ready()

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

    Args:
        llm: the engine.
        settings: limits and names.
        at: a bound socket.
        ready: called when the server listens.

    Raises:
        KeyboardInterrupt: the signal was SIGINT.
        ForetokenError: the engine failed.
    """
    app = create_app(llm, settings)
    try:
        until_signalled(ForetokenServer(app, app.state.server, settings, ready), at)
        if not llm.worker.alive:
            raise ForetokenError("the engine failed; its log says why: start the server again.")
    finally:
        llm.close()


def until_signalled(server: ForetokenServer, at: socket.socket) -> None:
    """Run a server until a signal ends it.

    Raises:
        KeyboardInterrupt: the signal was SIGINT.
    """
    server.run(sockets=[at])
    if server.interrupted:
        raise KeyboardInterrupt
