"""`Replica`: a process of a Ray cluster with an engine, behind the endpoints of the server."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Iterator
from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from tokenleap.async_llm import AsyncLLM
from tokenleap.errors import TokenleapError
from tokenleap.ray.plan import LOG, Call, Message
from tokenleap.runtime.native.network import set_num_threads
from tokenleap.serve.app import endpoints
from tokenleap.serve.errors import APIError
from tokenleap.serve.run import LAST_STEP
from tokenleap.serve.settings import Settings

__all__ = ["Replica"]

_log = logging.getLogger("ray.serve")


class Replica:
    """An engine, and the app of its endpoints.

    Ray makes it, and would make it again and again if that failed. So at the start of the server,
    the error is kept for whoever asks (`problem`). A replica that starts later fails: nobody asks
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
        """What Prometheus reads of this replica."""
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
        nobody reads on. Ending the iteration early ends the request.
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
        """End this process if its engine has ended: whoever waits learns of it at once.

        Ray would replace it only after three checks that fail, and every request until then would.
        """
        if self._llm is None or not self._llm.worker.alive:
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
    """What can be taken of a queue at once."""
    while not queue.empty():
        yield queue.get_nowait()
