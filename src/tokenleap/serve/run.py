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

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from tokenleap.async_llm import AsyncLLM
from tokenleap.core.garbage import kept
from tokenleap.errors import TokenleapError
from tokenleap.serve.app import create_app
from tokenleap.serve.models import Models
from tokenleap.serve.settings import Settings

_log = logging.getLogger(__name__)


TELLING = 2
"""Seconds after the time to end in which clients are told that their requests were cut off."""
LAST_STEP = 5.0
"""Seconds that a step of the engine has left after that; then the process ends in its middle."""
KEEP_ALIVE = 75
"""Seconds after which idle connections are closed: more than clients and proxies keep theirs (httpx
5 s, nginx 60 s). Otherwise a request may meet a connection that is just being closed."""


class Serves(Protocol):
    """The engine of an app."""

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
    llm: AsyncLLM | Models,
    settings: Settings,
    at: socket.socket,
    ready: Callable[[], object] = lambda: None,
) -> None:
    """Serve a model, or several, until a signal ends it, then close `llm`.

    If a step of the engine still runs `LAST_STEP` seconds after the last connection was closed, the
    process ends at once, with the exit code that it would have had.
    """
    app = create_app(llm, settings)
    server = TokenleapServer(app, app.state.server, settings, ready)
    try:
        try:
            if isinstance(llm, AsyncLLM):
                llm.measure_costs()
        except KeyboardInterrupt:
            server.interrupted = True
            raise
        until_signalled(server, at)
        if not llm.alive:
            raise TokenleapError("the engine failed; its log says why: start the server again.")
    finally:
        if not llm.close(LAST_STEP):
            _leave(130 if server.interrupted else 0 if server.should_exit else 1)


def until_signalled(server: TokenleapServer, at: socket.socket) -> None:
    with kept():
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


# The connection of a client: strict about its requests, and with limits of time.


PROBE_SECONDS = 0.25
"""How often a client that has closed its side is asked whether it is still there."""


PARTS = 50
"""Parts of a request that are read in one turn of the event loop (a millisecond or two). A body may
come in chunks of one byte, hundreds of thousands of which have come at once."""


class _Connection(h11.Connection):
    """Refuses requests whose end a proxy may see elsewhere (request smuggling, RFC 9112, 6.1).

    Attributes:
        left: parts that may be read in this turn; without any, it asks for more bytes.
    """

    left = PARTS

    def next_event(self) -> Any:
        """The next event of the bytes that have come."""
        if not self.left:
            return h11.NEED_DATA
        self.left -= 1
        event = super().next_event()
        if isinstance(event, h11.Request):
            names = {name for name, _ in event.headers}
            old = event.http_version < b"1.1"
            if b"transfer-encoding" in names and (old or b"content-length" in names):
                raise h11.RemoteProtocolError("two lengths, or one that HTTP/1.0 does not have")
        return event


class _Transport:
    """A transport that does not stay half open: what was closed is dropped after a time.

    `close` of asyncio's transports waits until the client has taken what was written, and a client
    may take nothing for ever.

    Attributes:
        held: whether nothing more is read, even if others ask for it.
    """

    held = False

    def __init__(self, transport: asyncio.Transport, seconds: float) -> None:
        self._transport, self._seconds = transport, seconds
        self._dropping: asyncio.TimerHandle | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def close(self) -> None:
        """Close it when all is written, or when the time is over."""
        self._transport.close()
        if self._dropping is None:
            loop = asyncio.get_running_loop()
            self._dropping = loop.call_later(self._seconds, self._transport.abort)

    def resume_reading(self) -> None:
        """Read on, unless it is held."""
        if not self.held:
            self._transport.resume_reading()

    def lost(self) -> None:
        if self._dropping is not None:
            self._dropping.cancel()


def timed_protocol(header_seconds: float, write_seconds: float) -> type[H11Protocol]:
    """Uvicorn's protocol, which drops clients that are too slow."""

    class TimedProtocol(H11Protocol):
        _deadline: asyncio.TimerHandle | None = None
        _stalled: asyncio.TimerHandle | None = None
        _probing: asyncio.TimerHandle | None = None
        _no_more = False  # the client has closed its side
        conn: _Connection

        def __init__(self, config: Any, *arguments: Any, **options: Any) -> None:
            super().__init__(config, *arguments, **options)
            self.conn = _Connection(h11.SERVER)

        def connection_made(self, transport: Any) -> None:
            self._wire = _Transport(transport, write_seconds)
            super().connection_made(self._wire)  # type: ignore[arg-type]
            self._wait()

        def data_received(self, data: bytes) -> None:
            if self._deadline is None and self._between_requests():
                self._wait()
            super().data_received(data)
            if not self._between_requests():
                self._stop_waiting()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_waiting()
            self._go_on()
            if self._probing is not None:
                self._probing.cancel()
            super().connection_lost(exc)
            # Timers that stay would keep the connection's memory until their time.
            self._unset_keepalive_if_required()
            self._wire.lost()

        def handle_events(self) -> None:
            """Read some parts; the others wait until the other connections have had their turn."""
            if self._wire.held:
                return
            self.conn.left = PARTS
            super().handle_events()
            if not self.conn.left:
                self._wire.held = True
                self._wire.pause_reading()
                self.loop.call_soon(self._read_on)

        def _read_on(self) -> None:
            self._wire.held = False
            if self._wire.is_closing():
                return
            self.handle_events()
            if not self.flow.read_paused:
                self._wire.resume_reading()
            if not self._between_requests():
                self._stop_waiting()

        # Clients that send no more

        def eof_received(self) -> bool:  # type: ignore[override]
            """Go on if the client only sends no more: it may wait for the answer.

            One that has gone looks the same at first. What it gets next is answered with a reset.
            HTTP/1.0 has nothing to send before the answer, so there it counts as gone.
            """
            self._no_more = True
            whole = not self._between_requests() and not self.cycle.more_body
            if not whole or self.scope["http_version"] == "1.0":
                return False
            if self._probing is None:
                self._probe()
            return True

        def _probe(self) -> None:
            if not self._between_requests() and not self.cycle.response_started:
                event = h11.InformationalResponse(status_code=100, headers=[], reason="Continue")
                self.transport.write(self.conn.send(event))
            self._probing = self.loop.call_later(PROBE_SECONDS, self._probe)

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self._no_more and self._between_requests():
                self.transport.close()

        # Headers

        def _between_requests(self) -> bool:
            return self.cycle is None or self.cycle.response_complete

        def _wait(self) -> None:
            self._deadline = self.loop.call_later(header_seconds, self._give_up)

        def _stop_waiting(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

        def _give_up(self) -> None:
            self._deadline = None
            if self._between_requests():
                self.transport.close()

        # Answers

        def pause_writing(self) -> None:
            super().pause_writing()
            self._watch()

        def resume_writing(self) -> None:
            self._go_on()
            super().resume_writing()

        def _watch(self) -> None:
            left = self.transport.get_write_buffer_size()
            self._stalled = self.loop.call_later(write_seconds, self._check, left)

        def _check(self, before: int) -> None:
            """Drop a client that has taken nothing; the app sees that it has gone."""
            if self.transport.get_write_buffer_size() < before:
                self._watch()
                return
            _log.info("a client took nothing for %g s", write_seconds)
            self.transport.abort()

        def _go_on(self) -> None:
            if self._stalled is not None:
                self._stalled.cancel()
                self._stalled = None

    return TimedProtocol
