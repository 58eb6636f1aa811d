"""The front and its replicas in one process, with a stand-in for Ray that loses replicas."""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import httpx2
import pytest

from tests.serve.support import tiny_llm, until
from tokenleap import LLM, SamplingParams
from tokenleap.errors import TokenleapError
from tokenleap.ray.serving import _check_loaded
from tokenleap.serve.app import guarded
from tokenleap.serve.settings import Settings

SETTINGS = Settings(
    served_model_names=("tiny",), api_keys=("k",), max_body_bytes=500, log_format="json"
)
BODY = {"model": "tiny", "prompt": "hello", "temperature": 0, "max_tokens": 8, "ignore_eos": True}
OWN = ("replicas",)


class RayError(Exception):
    pass


class RayTaskError(RayError):
    pass


class RayServeException(Exception):  # noqa: N818 - the name that Ray has
    pass


class DeploymentUnavailableError(RayServeException):
    pass


NEVER, AT_THE_END, UNAVAILABLE = -1, -2, -3
"""Instead of a number of messages: no replica takes the call for now, it is lost after its last
message, or Ray has no replica any more."""


class Stream:
    """A stream, as Ray's handle returns it."""

    def __init__(self, pieces: AsyncIterator[Any], lost_after: int | None) -> None:
        self._pieces, self._lost_after = pieces, lost_after
        self.cancelled = False

    async def __aiter__(self) -> AsyncIterator[Any]:
        taken = 0
        try:
            if self._lost_after == NEVER:
                await asyncio.Event().wait()
            if self._lost_after == UNAVAILABLE:
                raise DeploymentUnavailableError
            async for piece in self._pieces:
                for message in piece:  # how many come in one piece depends on load
                    if taken == self._lost_after:
                        raise RayError("the actor died")
                    taken += 1
                    yield [message]
            if self._lost_after == AT_THE_END:
                raise RayError("the actor died")
        finally:
            await self._pieces.aclose()  # type: ignore[attr-defined]

    def cancel(self) -> None:
        self.cancelled = True


class Handle:
    """Ray Serve's handle of one replica.

    Attributes:
        losses: after how many messages each next call loses its replica; none of the calls after.
        streams: all calls so far.
        silent: methods that a replica does not answer when all are asked.
    """

    def __init__(self, replica: Any) -> None:
        self._replica = replica
        self.losses: list[int | None] = []
        self.streams: list[Stream] = []
        self.silent: set[str] = set()
        self.check_health = SimpleNamespace(remote=replica.check_health)

    def options(self, *, stream: bool, method_name: str) -> Any:
        assert stream
        method = getattr(self._replica, method_name)

        def remote(**arguments: Any) -> Stream:
            lost_after = self.losses.pop(0) if self.losses else None
            self.streams.append(Stream(method(**arguments), lost_after))
            return self.streams[-1]

        return SimpleNamespace(remote=remote)

    def broadcast(self, method: str, *arguments: str) -> Any:
        """As Ray does, it calls no replica before the results are asked for."""

        async def results_async(*, timeout_s: float, return_exceptions: bool) -> list[Any]:
            assert return_exceptions
            if method in self.silent:
                raise TimeoutError
            async with asyncio.timeout(timeout_s):
                found = await getattr(self._replica, method)(*arguments)
            return [RayError("one has just died"), found]

        return SimpleNamespace(results_async=results_async)


def status_of(word: str) -> Any:
    """The status of applications, as Ray Serve reports it."""
    return SimpleNamespace(
        applications={"app": SimpleNamespace(status=SimpleNamespace(value=word))}
    )


def stand_in() -> dict[str, Any]:
    """The names of Ray that the module uses."""
    modules = {
        "ray": {},
        "ray.exceptions": {"RayError": RayError, "RayTaskError": RayTaskError},
        "ray.serve": {
            "get_replica_context": lambda: SimpleNamespace(
                rank=SimpleNamespace(rank=3), app_name="app"
            ),
            "status": lambda: status_of("DEPLOYING"),
        },
        "ray.serve.exceptions": {
            "RayServeException": RayServeException,
            "DeploymentUnavailableError": DeploymentUnavailableError,
        },
    }
    made: dict[str, Any] = {name: ModuleType(name) for name in modules}
    for name, names in modules.items():
        vars(made[name]).update(names)
    made["ray"].serve = made["ray.serve"]
    return made


@pytest.fixture(scope="module")
def llm() -> LLM:
    return tiny_llm()


@pytest.fixture(scope="module")
def handle(llm: LLM) -> Iterator[Handle]:
    with pytest.MonkeyPatch.context() as patch:
        for name, module in stand_in().items():
            patch.setitem(sys.modules, name, module)
        for name in OWN:
            patch.delitem(sys.modules, f"tokenleap.ray.{name}", raising=False)
        replica = importlib.import_module("tokenleap.ray.replicas")
        made = replica.Replica({"model": llm}, SETTINGS.model_copy(update={"api_keys": ()}), None)
        yield Handle(made)
        made.__del__()
        for name in OWN:  # made with the stand-in
            del sys.modules[f"tokenleap.ray.{name}"]


def asked(handle: Handle, act: Callable[[httpx2.AsyncClient, Any], Any]) -> Any:
    """The result of a client's action on the front."""
    front = sys.modules["tokenleap.ray.replicas"].Front(handle, SETTINGS)

    async def run() -> Any:
        transport = httpx2.ASGITransport(guarded(front, SETTINGS))
        headers = {"Authorization": "Bearer k"}
        async with httpx2.AsyncClient(
            transport=transport, base_url="http://localhost", headers=headers
        ) as client:
            return await act(client, front)

    return asyncio.run(run())


def completed(handle: Handle, **fields: Any) -> httpx2.Response:
    handle.streams.clear()
    found = asked(handle, lambda client, _: client.post("/v1/completions", json=BODY | fields))
    assert isinstance(found, httpx2.Response)
    return found


def expected(llm: LLM) -> str:
    (result,) = llm.generate(
        ["hello"], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    )
    return result.text


def text_of(stream: str) -> str:
    events = [line.removeprefix("data: ") for line in stream.split("\n\n")[:-1]]
    return "".join(
        choice["text"]
        for event in events
        if event != "[DONE]"
        for choice in json.loads(event).get("choices", ())
    )


def test_whole_answers_and_streams(
    handle: Handle, llm: LLM, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="tokenleap.serve.requests")
    assert completed(handle).json()["choices"][0]["text"] == expected(llm)
    found = completed(handle, stream=True)
    assert text_of(found.text) == expected(llm)
    assert found.text.endswith("data: [DONE]\n\n")
    lines = [json.loads(record.message) for record in caplog.records]
    assert [line["completion_tokens"] for line in lines] == [8, 8]
    assert lines[1]["request_id"] == found.headers["X-Request-Id"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_lost_request_is_made_again(handle: Handle, llm: LLM, stream: bool) -> None:
    handle.losses = [0, 0]
    found = completed(handle, stream=stream)
    assert len(handle.streams) == 3
    text = text_of(found.text) if stream else found.json()["choices"][0]["text"]
    assert text == expected(llm)


def test_what_may_end_replicas_is_given_up(handle: Handle) -> None:
    handle.losses = [0, 0, 0]
    found = completed(handle)
    assert len(handle.streams) == 3
    assert found.status_code == 503
    assert found.json()["error"]["code"] == "replica_lost"


def test_a_loss_behind_the_end_of_an_answer_changes_nothing(handle: Handle, llm: LLM) -> None:
    for stream in (False, True):
        handle.losses = [AT_THE_END]
        found = completed(handle, stream=stream)
        assert len(handle.streams) == 1
        text = text_of(found.text) if stream else found.json()["choices"][0]["text"]
        assert text == expected(llm)


def test_no_message_of_a_replica_is_sent_without_a_look_at_its_engine(
    handle: Handle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the last one either, so that no answer says what another replica can do better."""
    replica, looks = handle._replica, list[int]()
    monkeypatch.setattr(replica, "_end_if_dead", lambda: looks.append(len(sent)))
    scope: dict[str, Any] = {"type": "http", "method": "GET", "path": "/v1/models", "headers": []}
    scope |= {"query_string": b"", "client": None, "asgi": {}, "http_version": "1.1"}
    call = sys.modules["tokenleap.ray.cluster"].Call(scope, b"")
    sent: list[Any] = []

    async def run() -> None:
        async for messages in replica.respond(call=call, keys=[]):
            sent.append(messages)

    asyncio.run(run())
    assert looks == [0, *range(len(sent)), len(sent)]


def test_without_any_replica(handle: Handle) -> None:
    handle.losses = [UNAVAILABLE]
    found = completed(handle)
    assert len(handle.streams) == 1
    assert found.status_code == 503
    assert found.json()["error"]["message"] == "no replica takes requests: try again later."
    assert found.headers["Retry-After"]


def test_requests_that_no_replica_has_are_cut_off(handle: Handle) -> None:
    handle.losses = [NEVER]
    handle.streams.clear()

    async def act(client: httpx2.AsyncClient, front: Any) -> httpx2.Response:
        answer = asyncio.ensure_future(client.post("/v1/completions", json=BODY))
        while not handle.streams:
            await asyncio.sleep(0.001)
        front.cut_off()
        return await answer

    try:
        found = asked(handle, act)
    finally:
        handle._replica._app.state.server.stopping = False
    assert found.status_code == 503
    assert "shutting down" in found.text
    assert handle.streams[0].cancelled


def test_a_stream_that_had_begun_ends_with_an_error(handle: Handle, llm: LLM) -> None:
    handle.losses = [2]
    found = completed(handle, stream=True)
    assert len(handle.streams) == 1
    assert found.status_code == 200
    last = json.loads(found.text.split("\n\n")[-2].removeprefix("data: "))
    assert last["error"]["code"] == "replica_lost"
    assert expected(llm).startswith(text_of(found.text))


def test_guards_and_limits(handle: Handle) -> None:
    handle.streams.clear()

    async def act(client: httpx2.AsyncClient, front: Any) -> list[int]:
        large = await client.post("/v1/completions", json=BODY | {"prompt": "x" * 600})
        keyless = await client.post("/v1/completions", json=BODY, headers={"Authorization": ""})
        healthy = await client.get("/health")
        front.stopping = True
        closed = await client.post("/v1/completions", json=BODY)
        ill = await client.get("/health")
        live = await client.get("/live")
        return [each.status_code for each in (large, keyless, healthy, closed, ill, live)]

    assert asked(handle, act) == [413, 401, 200, 503, 503, 200]
    assert not handle.streams  # no replica was asked


def test_metrics_have_the_replica(handle: Handle) -> None:
    def page() -> str:
        found = asked(handle, lambda client, _: client.get("/metrics"))
        assert found.status_code == 200
        return str(found.text)

    # A request whose client has gone away may be ending.
    until(lambda: 'vllm:num_requests_running{engine="3",model_name="tiny"} 0.0' in page())


def test_replicas_that_do_not_answer_hold_nobody_up(handle: Handle) -> None:
    async def act(client: httpx2.AsyncClient, front: Any) -> list[httpx2.Response]:
        stopped = await client.post("/v1/completions/x/cancel")
        return [await client.get("/metrics"), stopped]

    handle.silent = {"metrics", "stop"}
    try:
        for found in asked(handle, act):
            assert found.status_code == 503
            assert "do not answer" in found.json()["error"]["message"]
    finally:
        handle.silent = set()


def ended(handle: Handle, end: Callable[[httpx2.AsyncClient, Any, str], Any]) -> tuple[Any, str]:
    """The result of `end` during an endless answer, and that answer."""
    server = handle._replica._app.state.server

    async def act(client: httpx2.AsyncClient, front: Any) -> tuple[Any, str]:
        endless = BODY | {"stream": True, "max_tokens": 900}
        answer = asyncio.ensure_future(client.post("/v1/completions", json=endless))
        while not (names := [run.response_id for run in server.runs if run.response_id]):
            await asyncio.sleep(0.001)
        found = await end(client, front, names[0])
        return found, (await answer).text

    found = asked(handle, act)
    assert isinstance(found, tuple)
    return found


def test_an_answer_is_stopped_where_it_is_generated(handle: Handle) -> None:
    async def end(client: httpx2.AsyncClient, _: Any, name: str) -> list[int]:
        paths = [f"/v1/completions/{each}/cancel" for each in ("nothing", name)]
        return [(await client.post(path)).status_code for path in paths]

    codes, text = ended(handle, end)
    assert codes == [404, 204]
    assert '"finish_reason":"abort"' in text


def test_answers_are_cut_off_when_the_time_to_end_is_over(handle: Handle) -> None:
    async def end(_: httpx2.AsyncClient, front: Any, name: str) -> None:
        front.cut_off()

    server = handle._replica._app.state.server
    try:
        _, text = ended(handle, end)
        assert server.stopping
    finally:
        server.stopping = False
    assert "shutting down" in text


def test_a_client_that_goes_away_ends_its_request(handle: Handle) -> None:
    """`receive` tells that it has gone, while the answer is on its way."""
    handle.streams.clear()
    front = sys.modules["tokenleap.ray.replicas"].Front(handle, SETTINGS)
    endless = BODY | {"stream": True, "max_tokens": 900}
    replica = handle._replica

    async def run() -> None:
        begun = asyncio.Event()
        bodies = [{"type": "http.request", "body": json.dumps(endless).encode()}]

        async def receive() -> Any:
            if bodies:
                return bodies.pop()
            await begun.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body":
                begun.set()

        scope: dict[str, Any] = {"type": "http", "method": "POST", "headers": []}
        scope["path"] = "/v1/completions"
        scope |= {"query_string": b"", "client": None, "asgi": {}, "http_version": "1.1"}
        await front(scope, receive, send)
        (stream,) = handle.streams
        assert stream.cancelled
        while replica._app.state.server.open_sequences:
            await asyncio.sleep(0.001)

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_model_that_cannot_be_loaded_is_told(handle: Handle) -> None:
    del handle
    made = sys.modules["tokenleap.ray.replicas"].Replica({"model": "no/such"}, SETTINGS, None)
    assert "no/such" in str(asyncio.run(made.problem()))
    asyncio.run(made.check_health())  # Ray would make it again before anybody could ask


def test_a_replica_whose_engine_has_ended_ends_at_the_next_look(
    handle: Handle, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray would wait for three looks that fail."""
    del handle
    replica, codes = sys.modules["tokenleap.ray.replicas"], list[int]()
    monkeypatch.setattr(replica.os, "_exit", codes.append)
    monkeypatch.setattr(replica.logging, "shutdown", lambda: None)
    made = replica.Replica({"model": llm}, SETTINGS, None)
    asyncio.run(made.check_health())
    assert not codes
    made._llm.close()
    asyncio.run(made.check_health())
    assert codes == [1]


@pytest.mark.parametrize("word", ["RUNNING", "UNHEALTHY"])
def test_a_replica_that_starts_later_and_cannot_load_fails(
    handle: Handle, monkeypatch: pytest.MonkeyPatch, word: str
) -> None:
    del handle
    replica = sys.modules["tokenleap.ray.replicas"]
    monkeypatch.setattr(replica.serve, "status", lambda: status_of(word))
    made = replica.Replica({"model": "no/such"}, SETTINGS, None)
    with pytest.raises(RuntimeError, match=r"the model cannot be loaded: .*no/such"):
        asyncio.run(made.check_health())


def test_all_replicas_are_asked_for_their_problem() -> None:
    found: list[TokenleapError | None] = [None, TokenleapError("no room")]
    response = SimpleNamespace(results=lambda *, timeout_s: found)
    handle = SimpleNamespace(broadcast=lambda method: {"problem": response}[method])
    with pytest.raises(TokenleapError, match="no room"):
        _check_loaded(handle)
    found.pop()
    _check_loaded(handle)
