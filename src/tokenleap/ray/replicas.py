"""The front, which hands each request to a replica, and the replicas. Both need Ray."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any

from prometheus_client.exposition import CONTENT_TYPE_LATEST
from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import DeploymentUnavailableError, RayServeException
from starlette._utils import get_route_path
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tokenleap.async_llm import AsyncLLM
from tokenleap.errors import TokenleapError
from tokenleap.ray.cluster import (
    LOG,
    Call,
    Message,
    joined,
    prompt_keys,
)
from tokenleap.runtime.native.network import set_num_threads
from tokenleap.serve.app import endpoints
from tokenleap.serve.body import AT_ONCE, APIError, content_of, unknown_response
from tokenleap.serve.run import LAST_STEP
from tokenleap.serve.running import answer_of, data, shut_down, while_connected
from tokenleap.serve.settings import Settings

_CANCEL = re.compile(r"/v1/(?:chat/completions|completions|responses)/([^/]+)/cancel")

ATTEMPTS = 3
"""Replicas that a request may lose before it is given up: it may be what ends them."""
HEALTH_SECONDS = 5.0
"""Seconds in which a replica has to say that it is well."""
ASKED_SECONDS = 10.0
"""Seconds in which all replicas have to answer what all are asked."""
NO_ANSWER = (TimeoutError, RayError, RayServeException, RuntimeError)
"""Errors that Ray raises if there is no answer."""


class Front:
    """Hands each request to a replica, chosen by the beginning of its prompt and by load.

    A request whose replica is lost before anything was sent goes to another one. A stream that had
    begun ends with an error.

    Args:
        alive: whether there is a cluster. Ray replaces replicas, but nothing replaces the cluster.
    """

    def __init__(
        self, replicas: Any, settings: Settings, alive: Callable[[], bool] = lambda: True
    ) -> None:
        self._replicas = replicas
        self._settings = settings
        self._alive = alive
        self._telling: asyncio.Future[Any] | None = None
        self._open: set[tuple[asyncio.Task[Any], _Answer]] = set()
        self.stopping = False

    @property
    def alive(self) -> bool:
        """Whether requests can be answered."""
        return self._alive()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            return
        request = Request(scope, receive)
        body, response = b"", await self._own(request)
        if response is None:
            try:
                if self.stopping:
                    raise shut_down()
                body = await content_of(request, self._settings)
            except APIError as error:
                request.state.log = {"error": error.code, "param": error.param}
                response = answer_of(error)
        if response is not None:
            await response(scope, receive, send)
            return
        answer = _Answer(scope, send, self._settings.write_timeout)
        try:
            # The connection tells when the client goes away: then the request ends.
            await while_connected(request, self._forward(Call.of(scope, body), answer))
        except TimeoutError:
            logging.getLogger(__name__).info(
                "a client took nothing for %g s", self._settings.write_timeout
            )

    async def _own(self, request: Request) -> Response | None:
        """The answer to what is asked of all replicas; None for all other requests."""
        path, method = get_route_path(request.scope), request.method
        if path == "/health" and method == "GET":
            return Response(status_code=200 if await self._healthy() else 503)
        if path == "/live" and method == "GET":
            return Response(status_code=200 if self.alive else 503)
        try:
            if path == "/metrics" and method == "GET":
                pages = [page for page in await self._all("metrics") if isinstance(page, str)]
                return Response(joined(pages), media_type=CONTENT_TYPE_LATEST)
            if method == "POST" and (stopped := _CANCEL.fullmatch(path)):
                if True in await self._all("stop", stopped[1]):
                    return Response(status_code=204)
                return answer_of(unknown_response(stopped[1]))
        except NO_ANSWER:
            return answer_of(APIError(503, "the replicas do not answer: try again later."))
        return None

    async def _all(self, method: str, *arguments: str) -> list[Any]:
        """The result of this method of each replica, or why it has failed."""
        asked = self._replicas.broadcast(method, *arguments)
        found: list[Any] = await asked.results_async(
            timeout_s=ASKED_SECONDS, return_exceptions=True
        )
        return found

    def cut_off(self) -> None:
        """Tell the clients of all requests that the server shuts down before their end.

        The replicas end the streams that have begun. All other requests are answered here: perhaps
        no replica has them yet.
        """
        self._telling = asyncio.ensure_future(self._cut_off())
        for task, answer in self._open:
            if not answer.begun:
                answer.cut = True
                task.cancel()

    async def _cut_off(self) -> None:
        with contextlib.suppress(*NO_ANSWER):  # then no client is cut off
            await self._all("cut_off")

    async def _healthy(self) -> bool:
        """Whether requests are taken, and a replica answers."""
        if self.stopping:
            return False
        try:
            async with asyncio.timeout(HEALTH_SECONDS):
                await self._replicas.check_health.remote()
        except NO_ANSWER:
            return False
        return True

    async def _forward(self, call: Call, answer: _Answer) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add((task, answer))
        try:
            await self._answered(call, answer)
        except APIError as error:
            await answer.refuse(error)
        except asyncio.CancelledError:
            if not answer.cut:
                raise
            task.uncancel()
            await answer.refuse(shut_down())
        finally:
            self._open.discard((task, answer))

    async def _answered(self, call: Call, answer: _Answer) -> None:
        path = get_route_path(call.scope)
        if len(call.body) <= AT_ONCE:
            keys = prompt_keys(path, call.body, call.caller)
        else:
            keys = await asyncio.to_thread(prompt_keys, path, call.body, call.caller)
        for _ in range(ATTEMPTS):
            lost = await self._once(call, keys, answer)
            if lost is None:
                return
            logging.getLogger(__name__).warning("a replica was lost: %s", lost.splitlines()[0])
            if answer.begun:
                break
        await answer.fail()

    async def _once(self, call: Call, keys: list[int], answer: _Answer) -> str | None:
        """Let a replica answer."""
        method = self._replicas.options(stream=True, method_name="respond")
        stream = method.remote(call=call, keys=keys)
        ended = False
        try:
            async for messages in stream:
                for message in messages:
                    await answer.take(message)
            ended = True
        except RayTaskError:  # a mistake of ours; the replica lives
            ended = True
            raise
        except (RayError, RayServeException) as error:
            ended = True
            if answer.complete:
                return None
            if isinstance(error, DeploymentUnavailableError) and not answer.begun:
                raise APIError(
                    503, "no replica takes requests: try again later.", headers={"Retry-After": "5"}
                ) from None
            return str(error) or type(error).__name__
        finally:
            if not (ended or answer.complete):
                stream.cancel()
        return None if answer.complete else "the answer has no end"


class _Answer:
    """The client's answer.

    The head waits for the first piece of the body, so that a lost request can begin again.

    Attributes:
        cut: whether it is to be told that the server shuts down.
    """

    def __init__(self, scope: Scope, send: Send, write_timeout: float) -> None:
        self._scope, self._send, self._write_timeout = scope, send, write_timeout
        self._head: Message | None = None
        self.begun = self.complete = self.cut = False

    async def take(self, message: Message) -> None:
        """Send a message of a replica, or keep it until the next one."""
        if message["type"] == LOG:
            self._note(message["log"])
        elif message["type"] == "http.response.start":
            self._head = message
        else:
            assert self._head is not None, "a head comes first"
            if not self.begun:
                self.begun = True
                await self._pass_on(self._head)
            self.complete = not message.get("more_body", False)
            await self._pass_on(message)

    async def fail(self) -> None:
        """Tell the client that its request is lost."""
        error = APIError(
            503, "the replica with this request was lost: send it again.", code="replica_lost"
        )
        if not self.begun:
            await self.refuse(error)
            return
        self._note({"error": error.code})
        assert self._head is not None
        if b"text/event-stream" not in dict(self._head["headers"]).get(b"content-type", b""):
            raise ConnectionError("the rest of an answer is lost")
        last = {"type": "http.response.body", "body": data(error.as_dict()), "more_body": False}
        await self._pass_on(last)

    async def refuse(self, error: APIError) -> None:
        """Answer a client that has got nothing with an error."""
        self.begun = self.complete = True
        self._note({"error": error.code})
        await answer_of(error)(self._scope, _nothing, self._send)

    def _note(self, log: Mapping[str, Any]) -> None:
        """Keep what the log says of the request."""
        self._scope.setdefault("state", {})["log"] = log

    async def _pass_on(self, message: Message) -> None:
        async with asyncio.timeout(self._write_timeout):
            await self._send(message)


async def _nothing() -> Message:
    raise AssertionError("the body has been read")


_log = logging.getLogger("ray.serve")


class Replica:
    """An engine, and the app of its endpoints.

    Ray makes it, and would make it again and again if that failed. So at the start of the server,
    the error is kept for callers of `problem`. A replica that starts later fails: none asks
    it, and Ray waits longer each time before it tries again.
    """

    def __init__(self, model: dict[str, Any], settings: Settings, threads: int | None) -> None:
        self._llm: AsyncLLM | None = None
        self._problem: TokenleapError | None = None
        try:
            if threads is not None:
                set_num_threads(threads)
            self._llm = AsyncLLM(**model)
            self._llm.measure_costs()
        except TokenleapError as error:
            self._problem = error
            self._late = _is_open()
            return
        name = str(serve.get_replica_context().rank.rank)
        self._app = endpoints(self._llm, settings, name)

    async def problem(self) -> TokenleapError | None:
        """Why the model could not be loaded."""
        return self._problem

    async def check_health(self) -> None:
        """Called by Ray, which replaces a replica for which this raises.

        One that could not load its model at the start of the server is well until its first
        request: Ray would try again to load it before anybody could ask for its problem.
        """
        if self._problem is None:
            self._end_if_dead()
        elif self._late:
            raise RuntimeError(f"the model cannot be loaded: {self._problem}")

    async def metrics(self) -> str:
        """The metrics of this replica, for Prometheus."""
        return self._app.state.server.metrics.exposition()[0].decode() if self._llm else ""

    async def cut_off(self) -> None:
        """Tell the clients of all requests that the server shuts down before their end.

        Those that come later are told at once.
        """
        if self._llm is not None:
            self._app.state.server.stopping = True
            self._app.state.server.cut_off()

    async def stop(self, response_id: str) -> bool:
        """End the outputs of a response where they are; False if it is not generated here."""
        try:
            self._app.state.server.stop(response_id)
        except APIError:
            return False
        return True

    async def respond(self, call: Call, keys: list[int]) -> AsyncIterator[list[Message]]:
        """The app's messages (ASGI) to the client, as they come.

        The last one waits for the end of the request, and what the log says comes before it: then
        no one reads on. Ending the iteration early ends the request.
        """
        self._end_if_dead()
        last: list[Message] = []
        sent: asyncio.Queue[Any] = asyncio.Queue()  # messages, and None at the end
        scope = call.as_scope()

        async def run() -> None:
            try:
                await self._app(scope, call.receiver(), send)
            finally:
                sent.put_nowait(None)

        async def send(message: Message) -> None:
            whole = message["type"] == "http.response.body" and not message.get("more_body", False)
            last.append(message) if whole else sent.put_nowait(message)

        task = asyncio.ensure_future(run())
        try:
            while None not in (messages := [await sent.get(), *_waiting(sent)]):
                self._end_if_dead()
                yield messages
            await task
            self._end_if_dead()  # then the answer says so, and another replica has a better one
            log = {"type": LOG, "log": scope["state"].get("log", {})}
            yield [*messages[:-1], log, *last]
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            self._end_if_dead()

    def _end_if_dead(self) -> None:
        """End this process if its engine has ended: waiting callers learn of it at once.

        Ray would replace it only after three checks that fail, and every request until then would.
        """
        if self._llm is None or not self._llm.alive:
            _log.error("the replica is replaced: %s", self._problem or "the engine has ended")
            logging.shutdown()
            os._exit(1)

    def __del__(self) -> None:
        """Called by Ray when the replica is stopped."""
        if self._llm is not None:
            self._llm.close(LAST_STEP)


def _is_open() -> bool:
    """Whether the server of this replica has started, with other replicas."""
    try:
        name = serve.get_replica_context().app_name
        return str(serve.status().applications[name].status.value) != "DEPLOYING"
    except (KeyError, RayError, RayServeException):
        return False


def _waiting(queue: asyncio.Queue[Any]) -> Iterator[Any]:
    """Take from a queue what is there at once."""
    while not queue.empty():
        yield queue.get_nowait()
