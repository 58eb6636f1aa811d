"""`create_app`: the ASGI app of a server."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from foretoken import __version__
from foretoken.async_llm import AsyncLLM
from foretoken.serve import chat, completions, info, page, responses, stopping
from foretoken.serve.errors import APIError
from foretoken.serve.events import as_json
from foretoken.serve.middleware import Authentication, Faults, RequestLog
from foretoken.serve.origins import Origins
from foretoken.serve.schema import describe
from foretoken.serve.settings import Settings
from foretoken.serve.state import ServerState

__all__ = ["create_app"]


def create_app(llm: AsyncLLM, settings: Settings) -> FastAPI:
    """The ASGI app that serves this model.

    Whoever runs it closes `llm` in the end. `app.state.server` is the `ServerState`.

    Args:
        llm: the engine.
        settings: limits and names.
    """
    app = FastAPI(
        title="Foretoken",
        version=__version__,
        docs_url=None,  # these pages would load their scripts from another host
        redoc_url=None,
    )
    app.state.server = ServerState(llm, settings)
    for each in (chat, completions, responses, stopping, info, page):
        app.include_router(each.router)
    app.add_exception_handler(APIError, _answered)
    app.add_exception_handler(HTTPException, _of_routing)
    app.openapi = lambda: describe(app, settings)  # type: ignore[method-assign]
    # What is added last is outermost.
    app.add_middleware(Faults)
    if settings.api_keys:
        app.add_middleware(Authentication, keys=settings.api_keys)
    app.add_middleware(Origins, host=settings.host, allowed=settings.allowed_origins)
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],  # clients send their own, such as X-Stainless-Lang
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    if settings.log_requests:
        app.add_middleware(RequestLog)
    return app


async def _answered(request: Request, error: Any) -> Response:
    assert isinstance(error, APIError)
    request.state.log = {"error": error.code, "param": error.param}  # the message may quote prompts
    content = as_json(error.as_dict())  # may quote text that has no encoding
    return Response(content, error.status, error.headers, "application/json")


async def _of_routing(request: Request, error: Any) -> Response:
    """No such path, or not with this method."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.scope['path']}: {error.detail}."
    made = APIError(error.status_code, message, headers=error.headers)
    return await _answered(request, made)
