"""`create_app`: the ASGI app of a server. It is the endpoints, and the guards around them."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from tokenleap import __version__
from tokenleap.async_llm import AsyncLLM
from tokenleap.serve import chat, completions, info, page, responses, stopping
from tokenleap.serve.errors import APIError
from tokenleap.serve.events import answer_of
from tokenleap.serve.middleware import Authentication, Faults, RequestLog
from tokenleap.serve.origins import Origins
from tokenleap.serve.schema import describe
from tokenleap.serve.settings import Settings
from tokenleap.serve.state import ServerState

__all__ = ["create_app", "endpoints", "guarded"]


def create_app(llm: AsyncLLM, settings: Settings) -> FastAPI:
    """The ASGI app that serves this model.

    Whoever runs it closes `llm` in the end. `app.state.server` is the `ServerState`.

    Args:
        llm: the engine.
        settings: limits and names.

    Raises:
        ConfigError: see `Settings.check_learning`.
    """
    app = endpoints(llm, settings)
    for kind, arguments, options in reversed(_guards(settings)):  # what is added last is outermost
        app.add_middleware(kind, *arguments, **options)
    return app


def endpoints(llm: AsyncLLM, settings: Settings, engine: str = "0") -> FastAPI:
    """The app without its guards: whoever runs it alone puts them in front (`guarded`).

    Args:
        llm: the engine.
        settings: limits and names.
        engine: the engine's name, a label of all metrics.
    """
    app = FastAPI(
        title="Tokenleap",
        version=__version__,
        docs_url=None,  # these pages would load their scripts from another host
        redoc_url=None,
    )
    app.state.server = ServerState(llm, settings, engine)
    for each in (chat, completions, responses, stopping, info, page):
        app.include_router(each.router)
    app.add_exception_handler(APIError, _answered)
    app.add_exception_handler(HTTPException, _of_routing)
    app.openapi = lambda: describe(app, settings)  # type: ignore[method-assign]
    app.add_middleware(Faults)
    return app


def guarded(app: ASGIApp, settings: Settings) -> ASGIApp:
    """An app behind the same guards as `create_app`: log, origins and keys."""
    for kind, arguments, options in reversed(_guards(settings)):
        app = kind(app, *arguments, **options)
    return app


def _guards(settings: Settings) -> list[Middleware]:
    """What is around the endpoints, outermost first."""
    found = [Middleware(RequestLog)] if settings.log_requests else []
    if settings.allowed_origins:
        cors = Middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],  # clients send their own, such as X-Stainless-Lang
            expose_headers=["X-Request-Id", "Retry-After"],
        )
        found.append(cors)
    found.append(Middleware(Origins, host=settings.host, allowed=settings.allowed_origins))
    if settings.api_keys:
        found.append(Middleware(Authentication, keys=settings.api_keys))
    return found


async def _answered(request: Request, error: Any) -> Response:
    assert isinstance(error, APIError)
    request.state.log = {"error": error.code, "param": error.param}  # the message may quote prompts
    return answer_of(error)


async def _of_routing(request: Request, error: Any) -> Response:
    """No such path, or not with this method."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.scope['path']}: {error.detail}."
    made = APIError(error.status_code, message, headers=error.headers)
    return await _answered(request, made)
