"""`Front`: the ASGI app that listens, and hands each request to a replica."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Callable, Mapping
from typing import Any

from prometheus_client.exposition import CONTENT_TYPE_LATEST
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import DeploymentUnavailableError, RayServeException
from starlette._utils import get_route_path
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tokenleap.ray.plan import LOG, Call, Message, joined, prompt_keys
from tokenleap.serve.body import AT_ONCE, content_of
from tokenleap.serve.errors import APIError, unknown_response
from tokenleap.serve.rendering import answer_of, data
from tokenleap.serve.running import shut_down, while_connected
from tokenleap.serve.settings import Settings

__all__ = ["NO_ANSWER", "Front"]

_log = logging.getLogger(__name__)

_CANCEL = re.compile(r"/v1/(?:chat/completions|completions|responses)/([^/]+)/cancel")

ATTEMPTS = 3
"""Replicas that a request may lose before it is given up: it may be what ends them."""
HEALTH_SECONDS = 5.0
"""Seconds in which a replica has to say that it is well."""
ASKED_SECONDS = 10.0
"""Seconds in which all replicas have to answer what all are asked."""
NO_ANSWER = (TimeoutError, RayError, RayServeException, RuntimeError)
"""What Ray raises if nobody answers."""


class Front:
    """Hands each request to a replica, chosen by the beginning of its prompt and by load.

    A request whose replica is lost before anything was sent goes to another one. A stream that had
    begun ends with an error.

    Args:
        alive: whether there is a cluster. Ray replaces replicas, but nobody replaces the cluster.
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
            _log.info("a client took nothing for %g s", self._settings.write_timeout)

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
        """What this method of each replica returns, or why it has failed."""
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
        with contextlib.suppress(*NO_ANSWER):  # then there is nobody to be cut off
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
            _log.warning("a replica was lost: %s", lost.splitlines()[0])
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
    """What the client gets.

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
