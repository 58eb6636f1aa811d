"""Limits, keys, clients that go away, and faults: one request never reaches another."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import re
import signal
import socket
import struct
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote

import h11
import httpx2
import pytest
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from tests.serve.support import MODEL, Served, samples, served, tiny_llm, tiny_parts, until
from tokenleap import LLM, AsyncLLM, Metrics, SamplingParams, TokenleapError
from tokenleap.core.sequence import SHARED
from tokenleap.serve.app import FILES, create_app
from tokenleap.serve.body import APIError
from tokenleap.serve.run import PARTS, TokenleapServer, serve
from tokenleap.serve.running import DONE, EventStream, Run, ServerState
from tokenleap.serve.settings import Settings, bound_socket

KEYS = ("first-key", "second-key")
LONG = {"model": MODEL, "max_tokens": 900, "ignore_eos": True}
ENDLESS = {**LONG, "prompt": "hello"}
HELLO = {"role": "user", "content": "hello"}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {**ENDLESS, "n": 2},
    "/v1/chat/completions": {**LONG, "messages": [HELLO]},
    "/v1/responses": {"model": MODEL, "input": "hello", "max_output_tokens": 900},
}


@pytest.fixture(scope="module")
def strict() -> Iterator[Served]:
    """A server with small limits and keys."""
    with served(
        api_keys=KEYS,
        allowed_origins=("https://here.example",),
        max_body_bytes=2000,
        body_timeout=0.3,
        header_timeout=0.3,
        max_n=2,
    ) as running:
        running.http.headers["Authorization"] = f"Bearer {KEYS[1]}"
        yield running


class Gate:
    """Lets the engine's steps through, or holds them back after the first ones.

    Attributes:
        open: whether all are let through.
        holds: whether one has been held back.
    """

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch, steps: int = 0) -> None:
        self.open = self.holds = False
        advance, left = llm.engine.advance, iter(range(steps))

        def wait() -> Any:
            if next(left, None) is None:
                self.holds = True
                until(lambda: self.open)
            return advance()

        monkeypatch.setattr(llm.engine, "advance", wait)


def raw(served: Served, content: bytes) -> socket.socket:
    """A connection that has sent these bytes."""
    connection = socket.create_connection(("127.0.0.1", served.port), timeout=60)
    connection.sendall(content)
    return connection


def whole(connection: socket.socket) -> bytes:
    """All that comes until the server closes the connection."""
    content = b""
    while part := connection.recv(65536):
        content += part
    return content


def request_of(body: Any, path: str = "/v1/completions") -> bytes:
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
    return head.encode() + content


# Keys


@pytest.mark.parametrize(
    "given", [None, "", "Bearer", "Bearer wrong", f"Basic {KEYS[0]}", "Bearer é"]
)
def test_without_a_key(strict: Served, given: str | None) -> None:
    headers = {} if given is None else {"Authorization": given.encode("latin-1")}
    for path in ("/v1/models", "/v1/completions", "/tokenize", "/v1/nothing"):
        request = strict.http.build_request("GET", path)
        request.headers.pop("Authorization")
        request.headers.update(headers)  # type: ignore[arg-type]
        response = strict.http.send(request)
        assert response.status_code == 401
        assert response.headers["www-authenticate"] == "Bearer"
        assert response.json()["error"]["type"] == "authentication_error"


def test_with_a_key(strict: Served) -> None:
    for key in KEYS:
        headers = {"Authorization": f"bearer {key}"}
        assert strict.http.get("/v1/models", headers=headers).status_code == 200
    opened = ("/", "/health", "/live", "/version", "/metrics", "/openapi.json", "/page/page.css")
    for path in opened:
        assert strict.http.get(path, headers={"Authorization": ""}).status_code == 200


@pytest.fixture(scope="module")
def guarded_app(server: Served) -> Any:
    """An app with a key, to be mounted."""
    return create_app(server.state.llm, Settings(served_model_names=(MODEL,), api_keys=KEYS))


def asked(app: Any, method: str, path: str, **options: Any) -> httpx2.Response:
    async def run() -> httpx2.Response:
        transport = httpx2.ASGITransport(app, root_path=options.pop("root_path", ""))
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(method, path, **options)

    return asyncio.run(run())


@pytest.mark.parametrize("root_path", ["", "/outer"])
def test_keys_guard_an_app_that_is_mounted(guarded_app: Any, root_path: str) -> None:
    outer = FastAPI()
    outer.mount("/llm", guarded_app)
    body = {"json": {"model": MODEL, "prompt": "a", "max_tokens": 1}, "root_path": root_path}
    at = f"{root_path}/llm"
    assert asked(outer, "POST", f"{at}/v1/completions", **body).status_code == 401
    key = {"headers": {"Authorization": f"Bearer {KEYS[0]}"}}
    assert asked(outer, "POST", f"{at}/v1/completions", **body, **key).status_code == 200
    for path in ("/health", "/metrics", "/", "/docs", "/page/page.css"):
        assert asked(outer, "GET", at + path, root_path=root_path).status_code == 200
    for path in ("/", "/docs"):
        page = asked(outer, "GET", at + path, root_path=root_path).text
        links = re.findall(r'(?:href|src)="([^"#:]+)"', page)
        assert {f"/{link}" for link in links} < set(FILES)  # relative: they lead into the mount


PATHS = ["/v1/models", "//v1/models", "/v1//models", "/V1/models", "/v1/models/", "/x/../v1/models"]
PATHS += ["/%76%31/models", "/page/../v1/models", "/health/../v1/models", "/health/", "//health"]
PATHS += ["/Health", "/page/", "/page/nothing", "/nothing", "/health%2f..%2fv1/models", "/docs/"]


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "OPTIONS", "TRACE"])
@pytest.mark.parametrize("root_path", ["", "/llm", "/v1", "/health"])
def test_what_is_not_open_needs_a_key(guarded_app: Any, root_path: str, method: str) -> None:
    """However it is written, and whether it exists or not."""
    for path in PATHS:
        scope = scope_of("http", root_path + unquote(path), root_path) | {"method": method}
        assert sent_by(guarded_app, scope)[0]["status"] == 401, path
    scope = scope_of("http", "/v1/completions", root_path)  # a server that leaves the prefix out
    if root_path != "/v1":
        assert sent_by(guarded_app, scope)[0]["status"] == 401


def scope_of(kind: str, path: str, root_path: str = "") -> dict[str, Any]:
    scope = {"type": kind, "method": "GET", "path": path, "root_path": root_path, "headers": []}
    return scope | {"raw_path": path.encode(), "query_string": b"", "subprotocols": []}


def sent_by(app: Any, scope: dict[str, Any]) -> list[Any]:
    """The messages of an app to a client that has sent everything."""
    sent = list[Any]()
    first = "websocket.connect" if scope["type"] == "websocket" else "http.request"

    async def receive() -> Any:
        return {"type": first, "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    return sent


def test_websockets_need_a_key_and_the_right_origin(guarded_app: Any, server: Served) -> None:
    (refused,) = sent_by(guarded_app, scope_of("websocket", "/v1/realtime"))
    assert refused["type"] == "websocket.close"
    assert "an API key is needed" in refused["reason"]
    app = create_app(server.state.llm, Settings(served_model_names=(MODEL,)))
    page = scope_of("websocket", "/v1/realtime") | {"headers": [(b"origin", b"http://evil")]}
    (refused,) = sent_by(app, page)
    assert "pages of other servers" in refused["reason"]


def test_origins(strict: Served, server: Served) -> None:
    header = "access-control-allow-origin"
    for origin, allowed in (("https://here.example", True), ("https://there.example", False)):
        ask = {"Origin": origin, "Access-Control-Request-Method": "POST"}
        answer = strict.http.options("/v1/completions", headers=ask)
        assert (answer.headers.get(header) == origin) is allowed
        assert header not in server.http.options("/v1/completions", headers=ask).headers
        assert header not in server.http.get("/health", headers={"Origin": origin}).headers


def test_pages_of_allowed_origins_can_read_answers_and_errors(strict: Served) -> None:
    body = {"model": MODEL, "prompt": "a", "max_tokens": 2, "temperature": 0}
    for content, key, status in ((body, KEYS[0], 200), (body, "x", 401), ({}, KEYS[0], 400)):
        headers = {"Origin": "https://here.example", "Authorization": f"Bearer {key}"}
        answer = strict.http.post("/v1/completions", json=content, headers=headers)
        assert answer.status_code == status
        assert answer.headers["access-control-allow-origin"] == "https://here.example"
        assert answer.headers["access-control-expose-headers"] == "X-Request-Id, Retry-After"
        assert "Origin" in answer.headers["vary"]
        assert "access-control-allow-credentials" not in answer.headers
        headers["Origin"] = "https://there.example"
        answer = strict.http.post("/v1/completions", json=content, headers=headers)
        assert answer.status_code == 403
        assert "access-control-allow-origin" not in answer.headers


def test_any_origin_may_be_allowed() -> None:
    with served(allowed_origins=("*",), host="127.0.0.1") as running:
        headers = {"Origin": "https://anywhere.example"}
        for path in ("/health", "/v1/models"):
            answer = running.http.get(path, headers=headers)
            assert answer.headers["access-control-allow-origin"] == "*"


# Limits


def test_a_large_body(strict: Served) -> None:
    error = strict.refused("/v1/completions", 413, prompt="a" * 3000)
    assert "2000 bytes" in error["message"]
    pieces = (b"a" * 500 for _ in range(10))  # without its length
    assert strict.http.post("/v1/completions", content=pieces).status_code == 413
    assert strict.complete()["choices"]


def test_too_many_outputs(strict: Served) -> None:
    assert strict.refused("/v1/completions", prompt="a", n=3)["param"] == "n"


HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
KEY = f"Authorization: Bearer {KEYS[0]}\r\n".encode()
UNFINISHED = {
    b"": b"",
    b"POST /v1/completions HT": b"",
    POST + b"A: b\r\n": b"",
    POST + KEY + b"Content-Length: 100\r\n\r\n{": b"HTTP/1.1 408",
    b"\x16\x03\x01 hello\r\n\r\n": b"HTTP/1.1 400",  # no HTTP
}


def test_what_does_not_come_in_time(strict: Served) -> None:
    connections = [raw(strict, sent) for sent in UNFINISHED]
    with raw(strict, HEALTH) as connection:
        assert connection.recv(1000).startswith(b"HTTP/1.1 200")
        connection.sendall(b"GET /health HTTP/1.1\r\n")
        assert connection.recv(100) == b""
    for connection, expected in zip(connections, UNFINISHED.values(), strict=True):
        with connection:
            answer = connection.recv(1000)
            assert answer.startswith(expected)
            assert bool(answer) == bool(expected)
            assert b"408" in expected or connection.recv(1000) == b""


@pytest.mark.parametrize(
    "lines",
    [
        "Content-Length: 5\r\nTransfer-Encoding: chunked",
        "transfer-encoding: chunked\r\ncontent-length: 5",
        "Transfer-Encoding:\r\n chunked\r\nContent-Length: 5",
        "Content-Length: 5\r\nContent-Length: 6",
        "Content-Length: 5, 6",
        "Content-Length: +5",
        "Content-Length : 5",
        "Transfer-Encoding: xchunked",
        "HTTP/1.0",  # which has no chunks
    ],
)
def test_a_length_that_a_proxy_may_read_otherwise(server: Served, lines: str) -> None:
    """Request smuggling: what follows must not become a request of its own."""
    head = POST + lines.encode()
    if lines == "HTTP/1.0":
        head = POST.replace(b"HTTP/1.1", b"HTTP/1.0") + b"Transfer-Encoding: chunked"
    with raw(server, head + b"\r\n\r\n0\r\n\r\n" + HEALTH) as connection:
        answer = whole(connection)
    assert answer.startswith(b"HTTP/1.1 400")
    assert answer.count(b"HTTP/1.1") == 1


def test_tiny_chunks_let_others_in(monkeypatch: pytest.MonkeyPatch, server: Served) -> None:
    """A turn of the event loop reads a few of them, however many have come at once."""
    turns: list[int] = []
    handle, following = H11Protocol.handle_events, h11.Connection.next_event

    def handled(protocol: H11Protocol) -> None:
        turns.append(0)
        handle(protocol)

    def next_event(connection: h11.Connection) -> Any:
        turns[-1] += 1
        return following(connection)

    monkeypatch.setattr(H11Protocol, "handle_events", handled)
    monkeypatch.setattr(h11.Connection, "next_event", next_event)
    fields = {"model": MODEL, "prompt": "hello", "max_tokens": 1}
    content = json.dumps(fields) + " " * 3000
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunks = "".join(f"1\r\n{each}\r\n" for each in content)
    last = "0\r\n\r\nGET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    with raw(server, (head + chunks + last).encode()) as connection:
        assert whole(connection).count(b"HTTP/1.1 200") == 2
    assert sum(turns) > 3000
    assert max(turns) <= PARTS


def test_a_full_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = tiny_llm(max_num_seqs=2)
    with served(llm, max_waiting=1) as running:
        too_many = running.refused("/v1/completions", prompt=["a"] * 4)
        assert too_many["param"] == "n"
        gate = Gate(llm, monkeypatch)
        connections = [raw(running, request_of(ENDLESS)) for _ in range(3)]
        until(lambda: running.state.open_sequences == 3)
        response = running.post("/v1/completions", prompt="a")
        assert response.status_code == 429
        assert response.headers["retry-after"] == "1"
        assert response.json()["error"]["code"] == "queue_full"
        assert "tokenleap:requests_refused_total" in running.http.get("/metrics").text
        assert running.http.get("/health").status_code == 200
        gate.open = True
        for connection in connections:
            connection.close()
        until(lambda: running.state.open_sequences == 0)
        assert running.complete()["choices"]


# Clients that go away


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_a_client_that_goes_away(
    monkeypatch: pytest.MonkeyPatch, server: Served, path: str, stream: bool
) -> None:
    gate = Gate(server.llm, monkeypatch)
    connection = raw(server, request_of(BODIES[path] | {"stream": stream}, path))
    until(lambda: server.state.open_sequences > 0)
    if stream:  # after the first bytes of the answer
        gate.open = True
        assert connection.recv(10)
    connection.close()
    gate.open = True
    until(lambda: server.state.open_sequences == 0)
    until(lambda: not server.llm.engine._scheduler.busy)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_only_sends_no_more(
    monkeypatch: pytest.MonkeyPatch, server: Served, stream: bool
) -> None:
    """It has closed its side of the connection, and waits for the answer."""
    monkeypatch.setattr("tokenleap.serve.run.PROBE_SECONDS", 0.01)
    gate = Gate(server.llm, monkeypatch)
    body = {**ENDLESS, "max_tokens": 5, "stream": stream}
    with raw(server, request_of(body)) as connection:
        connection.shutdown(socket.SHUT_WR)
        until(lambda: gate.holds)
        time.sleep(0.05)  # in which it is asked a few times
        gate.open = True
        answer = whole(connection)
    before, _, rest = answer.partition(b"HTTP/1.1 200 ")
    assert rest.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n" if stream else b"}")
    assert b'"finish_reason":"length"' in rest
    assert before.replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"") == b""
    assert stream or before


def test_requests_in_a_row_and_then_no_more(server: Served) -> None:
    ask = request_of({**ENDLESS, "max_tokens": 2})
    with raw(server, ask + ask) as connection:
        connection.shutdown(socket.SHUT_WR)
        assert whole(connection).count(b"HTTP/1.1 200") == 2
    with raw(server, ask[:-5]) as connection:
        connection.shutdown(socket.SHUT_WR)
        assert b"200" not in whole(connection)


def test_an_output_that_nobody_waits_for_is_counted() -> None:
    with served() as running:
        connection, content = raw(running, request_of({**ENDLESS, "stream": True})), b""
        while b'"text"' not in content:
            content += connection.recv(1000)
        connection.close()
        until(lambda: running.state.open_sequences == 0)
        found = samples(running)
        assert found["vllm:request_success_total/abort"] == 1
        assert found["vllm:prompt_tokens_total"] == 5
        assert found["vllm:request_generation_tokens_sum"] >= 1


class FakeRequest:
    """A prompt with one output."""

    def __init__(self, *, finished: bool) -> None:
        self.output = SimpleNamespace(
            finished=finished,
            finish_reason="length" if finished else None,
            index=0,
            params=SamplingParams(),
            admitted_at=1.0,
            metrics=Metrics(prompt_tokens=3),
        )
        self.job = SimpleNamespace(requests=[self.output])
        self.prompt_token_ids = (1, 2, 3)
        self.aborted = False

    def abort(self) -> None:
        self.aborted = True


def open_run(state: ServerState, *, finished: bool) -> tuple[Run, FakeRequest]:
    state.enter(1)
    request = FakeRequest(finished=finished)
    run = Run(state, [request], 1, time.perf_counter(), SHARED)  # type: ignore[list-item]
    run.entered = True
    return run, request


def test_a_client_that_takes_nothing() -> None:
    """`send` waits for ever where the client's buffers are full."""
    with closing(AsyncLLM(tiny_llm())) as llm:
        state = ServerState(llm, Settings(served_model_names=(MODEL,)))
        run, request = open_run(state, finished=False)

        async def events() -> AsyncIterator[bytes]:
            yield DONE

        async def never(*_: Any) -> Any:
            await asyncio.Event().wait()

        stream = EventStream(run, events(), write_timeout=0.01)
        asyncio.run(stream({"type": "http"}, never, never))
        assert request.aborted
        assert state.open_sequences == 0
        assert not state.runs


def test_ended_outputs_take_no_place() -> None:
    with closing(AsyncLLM(tiny_llm(max_num_seqs=1))) as llm:
        state = ServerState(llm, Settings(served_model_names=(MODEL,), max_waiting=1))
        slow, _ = open_run(state, finished=True)
        running, _ = open_run(state, finished=False)
        third, _ = open_run(state, finished=False)
        assert state.open_sequences == 2
        with pytest.raises(APIError, match="2 outputs run or wait"):
            state.enter(1)
        for run in (slow, running, third):
            run.close()
        assert state.open_sequences == 0


def test_idle_connections_are_kept_longer_than_clients_keep_theirs(server: Served) -> None:
    """Else a request may meet a connection that the server is just closing."""
    theirs = httpx2.Limits().keepalive_expiry
    assert theirs is not None
    assert server.server.config.timeout_keep_alive > theirs


def test_connections_that_clients_close_are_not_kept(server: Served) -> None:
    """No timer has them until its time, however they are closed."""

    def kept() -> int:
        gc.collect()
        return sum(type(each).__name__ == "_SelectorSocketTransport" for each in gc.get_objects())

    connections = server.server.server_state.connections
    there, before = len(connections), kept()
    for place in range(20):
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
            client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b"200" in client.recv(4096)
            if place % 2:  # closed by a reset
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    until(lambda: len(connections) <= there)
    assert kept() - before < 5


def test_a_connection_whose_client_takes_nothing_is_dropped() -> None:
    """It would stay half open: `close` waits until all was taken."""
    with served(write_timeout=0.2) as running:
        prompt = {"model": MODEL, "prompt": "x" * 900, "max_tokens": 0, "temperature": 0}
        asks = request_of(prompt | {"echo": True, "logprobs": 5})
        with socket.create_connection(("127.0.0.1", running.port), timeout=60) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            until(lambda: len(running.server.server_state.connections) == 1)
            (accepted,) = running.server.server_state.connections
            there = accepted.transport.get_extra_info("socket")
            there.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            with pytest.raises(ConnectionError):  # noqa: PT012
                while True:  # answers that are not read
                    connection.sendall(asks)
                    time.sleep(0.002)
            until(lambda: not running.server.server_state.connections)
        until(lambda: running.state.open_sequences == 0)


# The end


@pytest.mark.parametrize("stream", [False, True])
def test_clients_are_told_when_the_time_is_over(
    monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    llm = tiny_llm()
    with served(llm, shutdown_timeout=0.0) as running:
        gate = Gate(llm, monkeypatch)
        with raw(running, request_of({**ENDLESS, "stream": stream})) as connection:
            until(lambda: bool(llm.engine.load.waiting))
            running.server.handle_exit(signal.SIGTERM, None)
            content = whole(connection)
        gate.open = True
    assert content.startswith(b"HTTP/1.1 200" if stream else b"HTTP/1.1 503")
    assert b"the server is shutting down" in content
    assert b"[DONE]" not in content


def test_the_server_listens_until_the_last_answer_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm = tiny_llm()
    with served(llm) as running:
        gate = Gate(llm, monkeypatch, steps=2)
        with raw(running, request_of({**ENDLESS, "max_tokens": 20, "stream": True})) as connection:
            until(lambda: gate.holds)
            with raw(running, b"") as idle:
                running.server.handle_exit(signal.SIGTERM, None)
                assert idle.recv(100) == b""  # the end has begun
            for _ in range(2):
                ready = running.http.get("/health")
                assert (ready.status_code, ready.headers["connection"]) == (503, "close")
                assert running.http.get("/live").status_code == 200
                refused = running.post("/v1/completions", prompt="a")
                assert refused.status_code == 503
                assert refused.headers["retry-after"] == "5"
            with raw(running, b"GET /v1/models HTTP/1.1\r\n") as late:  # it holds no one up
                gate.open = True
                assert whole(connection).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
                assert late.recv(100) == b""
        until(running.stopped.is_set)
        with pytest.raises(ConnectionError):
            raw(running, b"")


def test_a_request_that_is_prepared_is_told_too(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, begun = threading.Event(), threading.Event()

    def slow(*_: Any, **__: Any) -> Any:
        begun.set()
        go_on.wait(60)
        raise TokenleapError("made to fail")

    monkeypatch.setattr("tokenleap.serve.completions.text_ids", slow)
    with served(shutdown_timeout=0.0) as running:
        with raw(running, request_of(ENDLESS)) as connection:
            assert begun.wait(60)
            running.server.handle_exit(signal.SIGTERM, None)
            assert connection.recv(1000).startswith(b"HTTP/1.1 503")
        go_on.set()


# Stopping an answer


@pytest.mark.parametrize("path", BODIES)
def test_an_answer_that_its_client_stops(
    server: Served, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(server.llm, monkeypatch, steps=3)
    more = {} if path == "/v1/responses" else {"tokenleap": {"trace": True}}
    body = BODIES[path] | more | {"stream": True, "seed": 3}
    with server.http.stream("POST", path, json=body) as response:
        lines = (line for line in response.iter_lines() if line.startswith("data: "))
        first = json.loads(next(lines).removeprefix("data: "))
        response_id = first.get("id") or first["response"]["id"]
        until(lambda: gate.holds)  # the first event may come before the first token
        told = server.http.post(f"{path}/{response_id}/cancel")
        assert told.status_code == 204
        gate.open = True
        events = [json.loads(x.removeprefix("data: ")) for x in lines if x != "data: [DONE]"]
    last = events[-1]
    if path == "/v1/responses":
        assert last["type"] == "response.incomplete"
        assert last["response"]["status"] == "incomplete"
    else:
        assert last["choices"][0]["finish_reason"] == "abort"
        assert last["choices"][0]["tokenleap"]["trace"]["steps"]
    until(lambda: server.state.open_sequences == 0)
    assert server.http.post(f"{path}/{response_id}/cancel").status_code == 404


def test_an_answer_that_is_stopped_before_all_prompts_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, tokenizer = tiny_parts()
    with served(LLM(model, tokenizer=tokenizer, max_num_seqs=1)) as server:
        gate = Gate(server.llm, monkeypatch, steps=3)
        body = {**ENDLESS, "prompt": ["hello", "world"], "echo": True, "logprobs": 1}
        path = "/v1/completions"
        with server.http.stream("POST", path, json=body | {"stream": True}) as response:
            lines = (line for line in response.iter_lines() if line.startswith("data: "))
            response_id = json.loads(next(lines).removeprefix("data: "))["id"]
            until(lambda: gate.holds)
            assert server.http.post(f"{path}/{response_id}/cancel").status_code == 204
            gate.open = True
            events = [json.loads(x.removeprefix("data: ")) for x in lines if x != "data: [DONE]"]
    ends = [event["choices"][0] for event in events]
    assert {choice["index"] for choice in ends if choice["finish_reason"] == "abort"} == {0, 1}
    unread = next(choice for choice in ends if choice["index"] == 1)
    assert unread["text"] == "world"
    assert unread["logprobs"]["token_logprobs"] == [None] * 5


# Faults


def test_a_fault_in_one_request(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = server.complete(max_tokens=30)["choices"]
    rule = server.llm.engine._speculation.default.rule
    accept = type(rule).accept

    def failing(self: Any, draft: Any, p: Any, noise: Any) -> Any:
        if p._sampler.params.seed == 13:
            raise RuntimeError("made to fail")
        return accept(self, draft, p, noise)

    monkeypatch.setattr(type(rule), "accept", failing)
    error = server.refused("/v1/completions", 500, prompt="a", seed=13)
    assert error["type"] == "server_error"
    assert "made to fail" in error["message"]
    response = server.post("/v1/completions", prompt="a", seed=13, stream=True)
    assert '"type":"server_error"' in response.text
    assert "[DONE]" not in response.text
    streamed = server.post("/v1/responses", input="a", seed=13, stream=True).text
    assert "event: response.failed" in streamed
    assert server.complete(max_tokens=30)["choices"] == alone


def test_a_mistake_of_ours(
    server: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(*_: Any, **__: Any) -> Any:
        raise RuntimeError("secret")

    monkeypatch.setattr("tokenleap.serve.completions.params_of", failing)
    error = server.refused("/v1/completions", 500, prompt="a")
    assert "secret" not in error["message"]
    assert "secret" in caplog.text
    assert server.state.open_sequences == 0


def test_a_drafter_that_fails(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = server.complete("aaaa", max_tokens=30)["choices"][0]["text"]
    before = samples(server)["tokenleap:drafter_failures_total"]

    def failing(*_: Any) -> Any:
        raise RuntimeError("made to fail")

    drafter = server.llm.engine._speculation.default.drafter
    monkeypatch.setattr(type(drafter), "propose", failing)
    choice = server.complete("aaaa", max_tokens=30, tokenleap={"metrics": True})["choices"][0]
    assert choice["text"] == alone
    assert "made to fail" in choice["tokenleap"]["metrics"]["drafter_failure"]
    assert samples(server)["tokenleap:drafter_failures_total"] == before + 1


def test_costs_are_measured_before_the_first_request(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, measured = tiny_llm(speculative_config={"method": "none"}), list[bool]()
    assert llm.bit_exact

    def run(*_: Any, **__: Any) -> None:
        measured.append(llm.engine.strategies.costs.measured)

    monkeypatch.setattr(TokenleapServer, "run", run)
    with bound_socket("127.0.0.1", 0) as at:
        serve(AsyncLLM(llm), Settings(served_model_names=(MODEL,)), at)
    assert measured == [True]


# Logs


def test_ids_and_lines_of_requests(server: Served, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tokenleap.serve.requests")
    body = {"model": MODEL, "prompt": "hello", "max_tokens": 3, "ignore_eos": True}
    for request_id, more in (("whole", {}), ("stream", {"stream": True}), ("bad", {"colour": 1})):
        headers = {"X-Request-Id": request_id}
        answer = server.http.post("/v1/completions", json=body | more, headers=headers)
        assert answer.headers["x-request-id"] == request_id
    made = server.http.get("/nothing", headers={"X-Request-Id": "a b\tc"}).headers["x-request-id"]
    assert len(made) == 32

    def lines() -> dict[str, Any]:
        found = [json.loads(record.getMessage()) for record in caplog.records]
        return {line.pop("request_id"): line for line in found}

    until(lambda: {"whole", "stream", "bad", made} <= set(lines()))  # a little after the response
    for request_id in ("whole", "stream"):
        line = lines()[request_id]
        assert (line["prompt_tokens"], line["completion_tokens"]) == (5, 3)
        assert line["finish_reasons"] == ["length"]
    assert (lines()["bad"]["status"], lines()["bad"]["param"]) == (400, "colour")
    line = lines()[made]
    assert (line["method"], line["path"], line["status"]) == ("GET", "/nothing", 404)
    assert line["client"] == "127.0.0.1"
    assert datetime.fromisoformat(line["time"]).tzinfo is UTC


def test_what_has_no_line(caplog: pytest.LogCaptureFixture) -> None:
    """Files, probes and scrapes; unless they fail."""
    caplog.set_level(logging.INFO, "tokenleap.serve.requests")
    with served() as server:
        for path in (*FILES, "/docs", "/health", "/live", "/metrics"):
            assert server.http.get(path).status_code == 200
        server.state.stopping = True
        assert server.http.get("/health").status_code == 503

        def lines() -> list[tuple[str, int]]:
            found = [json.loads(record.getMessage()) for record in caplog.records]
            # The last request of an earlier test may be logged only now.
            return [(line["path"], line["status"]) for line in found if line["method"] == "GET"]

        until(lambda: bool(lines()))
        assert lines() == [("/health", 503)]


def test_plain_lines(caplog: pytest.LogCaptureFixture) -> None:
    """What a client sends makes no second line, and nothing that a terminal obeys."""
    caplog.set_level(logging.INFO, "tokenleap.serve.requests")
    with served(log_format="plain", api_keys=("k",)) as server:
        server.http.headers |= {"Authorization": "Bearer k", "X-Request-Id": "x"}
        body = {"model": MODEL, "prompt": "hello", "max_tokens": 3, "ignore_eos": True}
        for path, more in (
            ("v1/completions", {}),
            ("v1/completions", {"\x1b\n": 1}),
            ("a%0a%1b", {}),
        ):
            server.http.post(f"/{path}", json=body | more)
        until(lambda: len(caplog.records) == 3)
    found = [re.sub(r"[\d.]+s ", "1s ", record.getMessage()) for record in caplog.records]
    assert found == [
        "127.0.0.1 POST /v1/completions 200 1s request_id=x key=1 prompt_tokens=5 "
        "completion_tokens=3 finish_reasons=length",
        "127.0.0.1 POST /v1/completions 400 1s request_id=x key=1 error=unknown_field "
        'param="\\u001b\\n"',
        '127.0.0.1 POST "/a\\n\\u001b" 404 1s request_id=x key=1',
    ]


class Panic(BaseException):
    """As PyO3 raises for a panic of Rust."""


def test_a_panic_ends_all_requests_and_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    def panics() -> Any:
        raise Panic("as the test wants it")

    with served() as server:
        monkeypatch.setattr(server.llm.engine, "advance", panics)
        refused = server.post("/v1/completions", prompt="hello", max_tokens=8)
        assert refused.status_code >= 500, refused.text
        assert not server.state.llm.alive
        server.stopped.wait(60)
        assert server.stopped.is_set()
        monkeypatch.undo()


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
def test_a_request_that_the_end_overtakes(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with served() as server:

        def closes(*_: Any, **__: Any) -> Any:
            server.state.llm.close()
            raise TokenleapError("the engine was closed.")

        monkeypatch.setattr("tokenleap.serve.completions.text_ids", closes)
        monkeypatch.setattr("tokenleap.serve.app.text_ids", closes)
        server.refused(path, 503, prompt="hello")
