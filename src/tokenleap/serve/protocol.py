"""The connection of a client: strict about its requests, and with limits of time."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

__all__ = ["timed_protocol"]

_log = logging.getLogger(__name__)

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
        held: whether nothing more is read, whoever else asks for it.
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
        """Nothing is left to drop."""
        if self._dropping is not None:
            self._dropping.cancel()


def timed_protocol(header_seconds: float, write_seconds: float) -> type[H11Protocol]:
    """Uvicorn's protocol, which drops clients that are too slow.

    Args:
        header_seconds: from the connection, or from the first byte of a later request, to the last
            header.
        write_seconds: in which a client has to take something of what waits for it.
    """

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
