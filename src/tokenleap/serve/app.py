"""`create_app`: the ASGI app of a server. It is the endpoints, and the guards around them."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
import logging
import math
import re
import time
import uuid
from base64 import b64encode
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from hashlib import sha256
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.openapi.docs import get_swagger_ui_html
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
from tokenleap.serve.settings import LogFormat, Settings


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
        docs_url=None,  # FastAPI's pages load their scripts from another host
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
    """An app behind the same guards as `create_app`: log, origins, keys and their limits."""
    for kind, arguments, options in reversed(_guards(settings)):
        app = kind(app, *arguments, **options)
    return app


def _guards(settings: Settings) -> list[Middleware]:
    """Middleware around the endpoints, outermost first."""
    found = []
    if settings.log_requests:
        found.append(Middleware(RequestLog, form=settings.log_format))
    if settings.allowed_origins:
        cors = Middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],  # clients send their own, such as X-Stainless-Lang
            expose_headers=["X-Request-Id", "Retry-After", *_rates(_allowances(settings))],
        )
        found.append(cors)
    found.append(Middleware(Origins, host=settings.host, allowed=settings.allowed_origins))
    if settings.api_keys:
        found.append(Middleware(Authentication, keys=settings.api_keys))
    if settings.limits:
        found.append(Middleware(KeyLimits, settings=settings))
    return found


async def _answered(request: Request, error: Any) -> Response:
    assert isinstance(error, APIError)
    # Without the message, which may quote prompts; with the tokens that were computed.
    log = getattr(request.state, "log", {})
    request.state.log = {**log, "error": error.code, "param": error.param}
    return answer_of(error)


async def _of_routing(request: Request, error: Any) -> Response:
    """No such path, or not with this method."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.scope['path']}: {error.detail}."
    made = APIError(error.status_code, message, headers=error.headers)
    return await _answered(request, made)


# The page at `/`: a chat and the trace viewer, from the files in `static/`; and Swagger UI at
# `/docs`, from the files of `fastapi-offline`.
#
# The pages are clients of this server like any other. Their files are read once, when the app is
# made, so no request reads a file. A strict policy lets a page load these files and ask this
# server, and nothing else.


_STATIC = resources.files("tokenleap.serve") / "static"
_SWAGGER = resources.files("fastapi_offline") / "static"
FILES = {
    "/" if entry.name == "index.html" else f"/page/{entry.name}": entry
    for entry in sorted(_STATIC.iterdir(), key=lambda entry: entry.name)
    if entry.name != "trace.html"  # a template of `tokenleap trace --html`
} | {f"/docs/{name}": _SWAGGER / name for name in ("swagger-ui-bundle.js", "swagger-ui.css")}
"""The files by their paths."""

_DOCS = bytes(
    get_swagger_ui_html(
        title="Tokenleap API",
        openapi_url="openapi.json",  # all are relative: the app may be mounted
        swagger_js_url="docs/swagger-ui-bundle.js",
        swagger_css_url="docs/swagger-ui.css",
        swagger_favicon_url="data:,",
        swagger_ui_parameters={"validatorUrl": None, "tryItOutEnabled": True},
    ).body
)
_START = _DOCS.rpartition(b"<script>")[2].partition(b"</script>")[0]
_SCRIPT = f"script-src 'sha256-{b64encode(sha256(_START).digest()).decode()}'"
"""How the policy allows the script in that page."""

_KINDS = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".txt": "text/plain; charset=utf-8",  # licences
}
_POLICY = "; ".join(
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
)
_HEADERS = {
    "Cache-Control": "no-cache",  # ask again, with the tag below
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


async def _file(content: bytes, kind: str, headers: dict[str, str], request: Request) -> Response:
    """A file, or 304 if the browser has it."""
    if request.headers.get("if-none-match") == headers["ETag"]:
        return Response(status_code=304, headers=headers)
    return Response(content, media_type=kind, headers=headers)


page_router = APIRouter()


def _add_file(path: str, content: bytes, suffix: str, policy: str = _POLICY) -> None:
    tag = f'"{sha256(content).hexdigest()[:32]}"'
    headers = {**_HEADERS, "Content-Security-Policy": policy, "ETag": tag}
    respond = partial(_file, content, _KINDS[suffix], headers)
    page_router.add_route(path, respond, methods=["GET", "HEAD"], include_in_schema=False)


for _path, _entry in FILES.items():
    _add_file(_path, _entry.read_bytes(), Path(_entry.name).suffix)
_add_file("/docs", _DOCS, ".html", _POLICY.replace("script-src", _SCRIPT))


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


# Around every request: its id and log line, the API key, its limits, and what becomes of errors.


_log = logging.getLogger("tokenleap.serve.requests")
_faults = logging.getLogger(__name__)

_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)
_WORD = re.compile(r"[\w.,:/@+-]+", re.ASCII)
_UNLOGGED = frozenset({*FILES, "/docs", "/health", "/live", "/metrics"})
"""Paths, as the app's routes have them, that have a line in the log only if they fail."""
_OPEN = frozenset({*_UNLOGGED, "/version", "/openapi.json"})
"""Paths that need no key; all others need one, known or not."""


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

    The state of requests with a key has the `caller`, which identifies the key, and its number.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._callers = {key.encode(): hashlib.sha256(key.encode()).hexdigest() for key in keys}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        lifespan = scope["type"] == "lifespan"
        caller = None if lifespan else self._caller(scope)
        if caller is not None:
            number = 1 + list(self._callers.values()).index(caller)
            scope.setdefault("state", {}).update(caller=caller, key=number)
        if lifespan or caller is not None or get_route_path(scope) in _OPEN:
            await self._app(scope, receive, send)
            return
        error = APIError(
            401,
            "an API key is needed: send 'Authorization: Bearer KEY'."
            if Headers(scope=scope).get("authorization") is None
            else "this API key is not one of the server's.",
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


class Allowance:
    """What an API key may take per minute.

    It refills steadily, and whoever took too much waits until that is refilled, too. So whatever
    the end of a request adds, the limit holds over time.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._left, self._at = float(limit), time.monotonic()

    @property
    def left(self) -> float:
        now = time.monotonic()
        self._left = min(self._left + (now - self._at) * self.limit / 60, self.limit)
        self._at = now
        return self._left

    def take(self, amount: int) -> None:
        self._left = self.left - amount

    def seconds_until(self, amount: int) -> float:
        """Seconds until so much is left."""
        return max(amount - self.left, 0.0) * 60 / self.limit


class KeyLimits:
    """Refuses requests of an API key beyond its limits, before their bodies are read.

    Tokens count when a request ends, as its log line has them. GET requests and `.../cancel` are
    free.
    """

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app, self._most = app, settings.max_parallel_requests
        self._running = Counter[str]()
        self._allowances = defaultdict[str, dict[str, Allowance]](partial(_allowances, settings))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        caller = scope.get("state", {}).get("caller")
        free = scope["type"] != "http" or scope["method"] != "POST"
        if caller is None or free or get_route_path(scope).endswith("/cancel"):
            await self._app(scope, receive, send)
            return
        allowances = self._allowances[caller]

        async def send_on(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_rates(allowances))
            await send(message)

        refused = self._refused(caller, allowances)
        if refused is not None:
            await refuse(refused, scope, receive, send_on)
            return
        if "requests" in allowances:
            allowances["requests"].take(1)
        self._running[caller] += 1
        try:
            await self._app(scope, receive, send_on)
        finally:
            self._running[caller] -= 1
            if "tokens" in allowances:
                log = scope["state"].get("log", {})
                used = log.get("prompt_tokens", 0) + log.get("completion_tokens", 0)
                allowances["tokens"].take(used)

    def _refused(self, caller: str, allowances: Mapping[str, Allowance]) -> APIError | None:
        if self._most is not None and self._running[caller] >= self._most:
            return _beyond(f"{self._most} requests at a time", 1)
        for what, allowance in allowances.items():
            if seconds := math.ceil(allowance.seconds_until(1)):
                return _beyond(f"{allowance.limit} {what} per minute", seconds)
        return None


def _allowances(settings: Settings) -> dict[str, Allowance]:
    """Those of a key, by what they count."""
    counted = {"requests": settings.rpm_limit, "tokens": settings.tpm_limit}
    return {what: Allowance(limit) for what, limit in counted.items() if limit is not None}


def _rates(allowances: Mapping[str, Allowance]) -> dict[str, str]:
    """OpenAI's headers about these limits."""
    found = {}
    for what, each in allowances.items():
        found[f"x-ratelimit-limit-{what}"] = str(each.limit)
        found[f"x-ratelimit-remaining-{what}"] = str(max(int(each.left), 0))
        found[f"x-ratelimit-reset-{what}"] = f"{each.seconds_until(each.limit):.3f}s"
    return found


def _beyond(limit: str, seconds: int) -> APIError:
    return APIError(
        429,
        f"rate limit: {limit} for this API key: try again in {seconds} s.",
        code="rate_limit_exceeded",
        headers={"Retry-After": str(seconds)},
    )


class RequestLog:
    """Gives each request an id, or keeps that of `X-Request-Id`, and logs its end.

    Files of a page, probes and scrapes have a line only if they fail.
    """

    def __init__(self, app: ASGIApp, form: LogFormat) -> None:
        self._app, self._written = app, json.dumps if form == "json" else _plain

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
            if not 200 <= status < 400 or get_route_path(scope) not in _UNLOGGED:
                state, client = scope["state"], scope.get("client")
                line = {
                    "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
                    "request_id": request_id,
                    "client": client and client[0],
                    "key": state.get("key"),
                    "method": scope["method"],
                    "path": scope["path"],
                    "status": status or None,
                    "seconds": round(time.perf_counter() - began, 4),
                    **state.get("log", {}),
                }
                _log.info("%s", self._written(line))


def _plain(line: Mapping[str, Any]) -> str:
    """One line without the time, which the log's handler adds."""
    named = {name: _word(value) for name, value in line.items() if value is not None}
    named.pop("time")
    first = [named.pop(name, "-") for name in ("client", "method", "path", "status")]
    first.append(f"{named.pop('seconds')}s")
    return " ".join([*first, *(f"{name}={word}" for name, word in named.items())])


def _word(value: Any) -> str:
    text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if _WORD.fullmatch(text) else json.dumps(text)


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


@router.post("/tokenize", **takes(TokenizeBody, prompt="Hello"))
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


@router.post("/detokenize", **takes(DetokenizeBody, tokens=[1]))
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
