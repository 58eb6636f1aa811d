"""`responded`: sends a run's answer, in pieces or whole, and closes the run however that ends."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from tokenleap.outputs import RequestOutput
from tokenleap.serve.events import EventStream, as_json
from tokenleap.serve.running import GONE, Run, while_connected
from tokenleap.serve.state import ServerState

__all__ = ["Answer", "responded"]


class Answer(Protocol):
    """What an endpoint makes of a run."""

    def whole(self, results: Sequence[RequestOutput]) -> dict[str, Any]:
        """The response when all outputs have ended; made off the loop."""
        ...

    def events(self) -> AsyncIterator[bytes]:
        """The response in pieces."""
        ...


async def responded(
    request: Request, state: ServerState, run: Run, answer: Answer, *, stream: bool | None
) -> Response:
    """The response to a request.

    Args:
        request: the HTTP request.
        state: the server's.
        run: the request's; it is closed in the end.
        answer: makes the response.
        stream: whether it is sent in pieces.

    Raises:
        APIError: an output has failed.
    """
    if stream:
        return EventStream(run, answer.events(), state.settings.write_timeout)
    try:
        results = await while_connected(request, run.results())
        if results is None:
            return GONE
        content = await state.llm.off_loop(lambda: as_json(answer.whole(results)))
        return Response(content, media_type="application/json")
    finally:
        run.close()
