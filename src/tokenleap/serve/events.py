"""Server-sent events: a response that ends its run however it ends."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Mapping
from typing import Any

from starlette.responses import Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from tokenleap.errors import TokenleapError
from tokenleap.serve.errors import APIError
from tokenleap.serve.running import Run

__all__ = ["DONE", "EventStream", "answer_of", "as_json", "data", "event"]

_log = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
"""The end of a stream of completions."""


def as_json(value: Any) -> bytes:
    """JSON without spaces."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode(
        errors="replace"
    )


def data(value: Mapping[str, Any]) -> bytes:
    """An event without a name."""
    return b"data: " + as_json(value) + b"\n\n"


def event(value: Mapping[str, Any]) -> bytes:
    """An event whose name is its type."""
    return b"event: " + str(value["type"]).encode() + b"\n" + data(value)


def answer_of(error: APIError) -> Response:
    """An error as a response."""
    content = as_json(error.as_dict())  # may quote text that has no encoding
    return Response(content, error.status, error.headers, "application/json")


class EventStream(StreamingResponse):
    """Sends events while the client listens, and closes the run in the end.

    A failure becomes a last event with OpenAI's error object.

    Args:
        run: what brings the events.
        events: the events; they are not begun if the client has gone already.
        write_timeout: see `Settings`.
    """

    def __init__(self, run: Run, events: AsyncIterator[bytes], write_timeout: float) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(_told(events), headers=headers, media_type="text/event-stream")
        self._run = run
        self._write_timeout = write_timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""

        async def send_in_time(message: Message) -> None:
            async with asyncio.timeout(self._write_timeout):
                await send(message)

        try:
            await super().__call__(scope, receive, send_in_time)
        except TimeoutError:
            _log.info("a client took nothing for %g s", self._write_timeout)
        finally:
            self._run.close()


async def _told(events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    try:
        async for each in events:
            yield each
    except APIError as error:
        yield data(error.as_dict())
    except TokenleapError as error:
        yield data(APIError(500, str(error)).as_dict())
    except Exception:
        _log.exception("a stream failed")
        yield data(APIError(500, "an internal error: see the server's log.").as_dict())
