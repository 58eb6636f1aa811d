"""`create_app`: the ASGI app of a server. It is the endpoints, and the guards around them."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
import logging
import re
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from hashlib import sha256
from importlib import resources
from typing import Any
from urllib.parse import urlsplit

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette._utils import get_route_path
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tokenleap import __version__
from tokenleap.async_llm import AsyncLLM
from tokenleap.core.sampler import check_token_ids
from tokenleap.engine.prompts import needed
from tokenleap.errors import TokenleapError
from tokenleap.serve import chat, completions
from tokenleap.serve.body import APIError, describe, fails, invalid, of_engine, read, refuse, takes
from tokenleap.serve.chat import chat_ids, refuse_special_tokens, text_ids
from tokenleap.serve.fields import DetokenizeBody, Templated, TokenizeBody
from tokenleap.serve.models import Models
from tokenleap.serve.running import MAX_CONTEXTS, ServerState, answer_of, check_model, server_of
from tokenleap.serve.settings import Settings


def create_app(llm: AsyncLLM | Models, settings: Settings) -> FastAPI:
    """The ASGI app that serves this model, or these.

    The caller closes `llm` in the end. `app.state.server` is the `Server`.
    """
    return endpoints(llm, settings, guards=_guards(settings))


def endpoints(
    llm: AsyncLLM | Models,
    settings: Settings,
    engine: str = "0",
    *,
    guards: Sequence[Middleware] = (),
) -> FastAPI:
    """The app; a caller that runs it without its guards adds them (`guarded`)."""
    app = FastAPI(
        title="Tokenleap",
        version=__version__,
        middleware=[*guards, Middleware(Faults)],
        docs_url=None,  # these pages would load their scripts from another host
        redoc_url=None,
    )
    own = llm if isinstance(llm, Models) else ServerState(llm, settings, engine)
    app.state.server = own
    for each in (chat.router, completions.router, router, page_router):
        app.include_router(each)
    app.add_exception_handler(APIError, _answered)
    app.add_exception_handler(HTTPException, _of_routing)
    app.openapi = lambda: describe(app, settings)  # type: ignore[method-assign]
    return app


def guarded(app: ASGIApp, settings: Settings) -> ASGIApp:
    """An app behind the same guards as `create_app`: log, origins and keys."""
    for kind, arguments, options in reversed(_guards(settings)):
        app = kind(app, *arguments, **options)
    return app


def _guards(settings: Settings) -> list[Middleware]:
    """Middleware around the endpoints, outermost first."""
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


# The page at `/`: a chat and the trace viewer, from the files in `static/`.
#
# The page is a client of `/v1/chat/completions` like any other. Its files are read once, when the
# app is made, so no request reads a file. A strict policy lets the page load these files and ask
# this server, and nothing else.


_STATIC = resources.files("tokenleap.serve") / "static"
FILES = {
    "/" if entry.name == "index.html" else f"/page/{entry.name}": entry
    for entry in sorted(_STATIC.iterdir(), key=lambda entry: entry.name)
    if entry.name != "trace.html"  # a template of `tokenleap trace --html`
}
"""The files by their paths."""

_KINDS = {
    "css": "text/css; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "txt": "text/plain; charset=utf-8",  # licences
}
_HEADERS = {
    "Cache-Control": "no-cache",  # ask again, with the tag below
    "Content-Security-Policy": "; ".join(
        [
            "default-src 'none'",
            "connect-src 'self'",
            "img-src data:",
            "script-src 'self'",
            "style-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        ]
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


async def _file(content: bytes, kind: str, request: Request) -> Response:
    """A file, or 304 if the browser has it."""
    headers = {**_HEADERS, "ETag": f'"{sha256(content).hexdigest()[:32]}"'}
    if request.headers.get("if-none-match") == headers["ETag"]:
        return Response(status_code=304, headers=headers)
    return Response(content, media_type=kind, headers=headers)


page_router = APIRouter()
for _path, _entry in FILES.items():
    _respond = partial(_file, _entry.read_bytes(), _KINDS[_entry.name.rpartition(".")[2]])
    page_router.add_route(_path, _respond, methods=["GET", "HEAD"], include_in_schema=False)


# `POST .../ID/cancel`: a client stops an answer that it reads, and gets its end with the trace.
#
# OpenAI's API has this path for `/v1/responses`. Closing the connection stops an answer, too, but
# then no client is left to read its end.


router = APIRouter()


@router.post("/v1/chat/completions/{response_id}/cancel", status_code=204, **fails(404))
@router.post("/v1/completions/{response_id}/cancel", status_code=204, **fails(404))
@router.post("/v1/responses/{response_id}/cancel", status_code=204, **fails(404))
async def cancel(request: Request, response_id: str) -> Response:
    """End the outputs of a response where they are; they have the finish reason "abort"."""
    server_of(request).stop(response_id)
    return Response(status_code=204)


# Around every request: its id, its log line, the API key, and what becomes of errors.


_log = logging.getLogger("tokenleap.serve.requests")
_faults = logging.getLogger(__name__)

_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)
_OPEN = frozenset({*FILES, "/health", "/live", "/version", "/openapi.json", "/metrics"})
"""Paths that need no key, as the app's routes have them; all others need one, known or not."""


class Faults:
    """Answers a mistake of ours with 500: the traceback is in the log, and not in the answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def send_on(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, receive, send_on)
        except Exception:
            if begun or scope["type"] != "http":
                raise
            _faults.exception("%s %s failed", scope["method"], scope["path"])
            error = APIError(500, "an internal error: see the server's log.")
            await refuse(error, scope, receive, send)


class Authentication:
    """Refuses requests without an API key, except to paths that are open to all.

    The path is the one that the app routes by, wherever the app is mounted. So a path that is
    written in another way, or that the app does not know, needs a key.

    The state of requests with a key has the `caller`, which identifies the key.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._callers = {key.encode(): hashlib.sha256(key.encode()).hexdigest() for key in keys}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        lifespan = scope["type"] == "lifespan"
        caller = None if lifespan else self._caller(scope)
        if caller is not None:
            scope.setdefault("state", {})["caller"] = caller
        if lifespan or caller is not None or get_route_path(scope) in _OPEN:
            await self._app(scope, receive, send)
            return
        error = APIError(
            401,
            "an API key is needed: send 'Authorization: Bearer KEY'.",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await refuse(error, scope, receive, send)

    def _caller(self, scope: Scope) -> str | None:
        kind, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        found = given.strip().encode("latin-1", errors="replace")
        # All of them are compared, in constant time.
        matches = [of for key, of in self._callers.items() if hmac.compare_digest(found, key)]
        return matches[0] if kind.lower() == "bearer" and matches else None


class RequestLog:
    """Gives each request an id, or keeps that of `X-Request-Id`, and logs its end as JSON."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        began, status = time.perf_counter(), 0

        async def send_on(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_on)
        finally:
            line = {
                "request_id": request_id,
                "method": scope["method"],
                "path": scope["path"],
                "status": status or None,
                "seconds": round(time.perf_counter() - began, 4),
                **scope["state"].get("log", {}),
            }
            _log.info("%s", json.dumps(line))


# Which web pages may use the server: a page must not reach it through its visitor's browser.


class Origins:
    """Refuses requests that a browser sends for the page of another server.

    Browsers send simple requests anywhere, whether the page may read the answer or not (CORS), and
    name the page in `Origin`. A page whose own name was made to lead to this machine (DNS
    rebinding) has that name in `Host`. Other clients send no `Origin`.

    Args:
        host: the address that the server listens at; None if it is not known. At a loopback
            address, `Host` has to name this machine.
        allowed: origins of pages that may use it, whose hosts may be in `Host` too; "*" is any.
    """

    def __init__(self, app: ASGIApp, host: str | None, allowed: Sequence[str]) -> None:
        self._app = app
        self._allowed = {origin.lower() for origin in allowed}
        self._hosts = {urlsplit(origin).netloc for origin in self._allowed} - {""}
        self._local = host is not None and _is_loopback(host) and "*" not in self._allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refused = None if scope["type"] == "lifespan" else self._refused(Headers(scope=scope))
        if refused is None:
            await self._app(scope, receive, send)
        else:
            await refuse(refused, scope, receive, send)

    def _refused(self, headers: Headers) -> APIError | None:
        host, origin = headers.get("host", "").lower(), headers.get("origin", "").lower()
        if self._local and host not in self._hosts and not _is_loopback(_name(host)):
            return APIError(
                403,
                "this server answers requests to localhost only: --allowed-origins names others.",
                code="host_not_allowed",
            )
        own = origin in (f"http://{host}", f"https://{host}")
        if not origin or own or self._allowed & {origin, "*"}:
            return None
        return APIError(
            403,
            "pages of other servers may not use this one: --allowed-origins names those that may.",
            code="origin_not_allowed",
        )


def _name(host: str) -> str:
    """The name or address in a `Host` header."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:  # brackets that do not close
        return ""


def _is_loopback(name: str) -> bool:
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


@router.get("/health")
async def health(request: Request) -> Response:
    """Readiness: 200 while the server takes requests, else 503."""
    server = server_of(request)
    return Response(status_code=200 if server.alive and not server.stopping else 503)


@router.get("/live")
async def live(request: Request) -> Response:
    """Liveness: 200 while the engine runs, also while the last requests end, else 503."""
    return Response(status_code=200 if server_of(request).alive else 503)


@router.get("/version")
async def version() -> dict[str, str]:
    """The version of Tokenleap."""
    return {"version": __version__}


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """For Prometheus, in its text format."""
    content, media_type = server_of(request).metrics.exposition()
    return Response(content, media_type=media_type)


@router.get("/v1/models")
async def models(request: Request) -> dict[str, Any]:
    """The models that are served, by all their names, and whether they are loaded."""
    return {"object": "list", "data": server_of(request).cards()}


@router.get("/v1/models/{name:path}", responses={404: {"description": "no such model"}})
async def model(request: Request, name: str) -> dict[str, Any]:
    """The model, by one of its names."""
    server = server_of(request)
    check_model(server.settings, name)
    return next(card for card in server.cards() if card["id"] == name)


@router.post("/tokenize", **takes(TokenizeBody))
async def tokenize(request: Request) -> Response:
    """The token ids of a text or a conversation."""
    body = await read(request, TokenizeBody, server_of(request).settings)
    if (body.prompt is None) == (body.messages is None):
        raise invalid("prompt", "send either prompt or messages.")
    if body.messages is not None:
        refuse_special_tokens(given=body.add_special_tokens)
    elif name := next(
        (name for name in Templated.model_fields if getattr(body, name) is not None), None
    ):
        raise invalid(name, f"{name} is for messages.")
    return JSONResponse(await _off_loop(request, body, _tokenized))


def _tokenized(body: TokenizeBody, state: ServerState) -> dict[str, Any]:
    llm, limit = state.llm.llm, replace(state.text_limit, times=MAX_CONTEXTS)
    if body.prompt is not None:
        special = body.add_special_tokens is not False
        ids = text_ids(body.prompt, llm.tokenizer, add_special_tokens=special, limit=limit)
    else:
        assert body.messages is not None
        tools = body.tools or ()
        ids = chat_ids(body.messages, llm.tokenizer, limit=limit, tools=tools, asked=body)
    names = None
    if body.return_token_strs:
        names = needed(llm.tokenizer).convert_ids_to_tokens(ids)
    return {
        "count": len(ids),
        "max_model_len": llm.max_model_len,
        "tokens": ids,
        "token_strs": names,
    }


@router.post("/detokenize", **takes(DetokenizeBody))
async def detokenize(request: Request) -> Response:
    """The text of token ids."""
    body = await read(request, DetokenizeBody, server_of(request).settings)
    return JSONResponse(await _off_loop(request, body, _detokenized))


def _detokenized(body: DetokenizeBody, state: ServerState) -> dict[str, str]:
    llm = state.llm.llm
    if len(body.tokens) > (most := MAX_CONTEXTS * llm.max_model_len):
        raise invalid("tokens", f"tokens: at most {most} here, got {len(body.tokens)}.")
    check_token_ids("tokens", body.tokens, llm.engine.target.vocab_size)
    return {"prompt": str(needed(llm.tokenizer).decode(body.tokens))}


async def _off_loop(request: Request, body: Any, act: Callable[[Any, ServerState], Any]) -> Any:
    async with server_of(request).using(request, body.model) as state:
        state.enter(1)  # it waits for the same threads as an output
        try:
            return await state.llm.prepare(
                partial(act, body, state), client=state.client_of(request)
            )
        except APIError:
            raise
        except TokenleapError as error:
            state.check_open()
            raise of_engine(error, type(body).model_fields, "prompt") from error
        finally:
            state.leave(1)
