"""`POST .../ID/cancel`: a client stops an answer that it reads, and gets its end with the trace.

OpenAI's API has this path for `/v1/responses`. Closing the connection stops an answer, too, but
then nobody is left to read its end.
"""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from tokenleap.serve.schema import fails
from tokenleap.serve.state import state_of

__all__ = ["router"]

router = APIRouter()


@router.post("/v1/chat/completions/{response_id}/cancel", status_code=204, **fails(404))
@router.post("/v1/completions/{response_id}/cancel", status_code=204, **fails(404))
@router.post("/v1/responses/{response_id}/cancel", status_code=204, **fails(404))
async def cancel(request: Request, response_id: str) -> Response:
    """End the outputs of a response where they are; they have the finish reason "abort"."""
    state_of(request).stop(response_id)
    return Response(status_code=204)
