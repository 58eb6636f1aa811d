"""`Run`: the prompts of one HTTP request in the engine, from admission to the last chunk."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from tokenleap.async_llm import AsyncRequest
from tokenleap.core.sequence import Scope
from tokenleap.engine.job_spec import JobSpec
from tokenleap.errors import RequestError, TokenleapError
from tokenleap.outputs import CompletionOutput, RequestOutput, StreamChunk
from tokenleap.serve.errors import APIError, invalid, of_engine, of_output
from tokenleap.serve.fields import ResponseBody, SamplingBody
from tokenleap.serve.sampling import check_speculation, form_field, wants_form
from tokenleap.serve.state import ServerState

__all__ = ["GONE", "Run", "started", "while_connected"]

T = TypeVar("T")

GONE = Response(status_code=499)
"""What nobody reads: the client has gone."""


class Run:
    """The prompts of one HTTP request in the engine.

    Whoever has it calls `close` in the end.

    Args:
        state: the server's.
        requests: one per prompt.
        sequences: outputs that were counted when the request entered.
        began: when the request came in, by `time.perf_counter`.
        scope: what its requests share with others.

    Attributes:
        log: what the request's log line says of it, when it has ended.
        entered: whether all prompts are in the engine.
        preparing: the task that queues the prompts, as long as it does.
        response_id: the id of the response, once it is made.
    """

    def __init__(
        self,
        state: ServerState,
        requests: Sequence[AsyncRequest],
        sequences: int,
        began: float,
        scope: Scope,
    ) -> None:
        self.requests, self.scope = requests, scope
        self.log: dict[str, Any] = {}
        self._state = state
        self._sequences = sequences
        self._began = began
        self._last: dict[tuple[int, int], float] = {}  # when an output's last tokens came
        self._counted: set[tuple[int, int]] = set()  # outputs that the metrics have
        self._closed = False
        self._left = False
        self.entered = False
        self.response_id: str | None = None
        self.preparing: asyncio.Task[Any] | None = None
        self._refusal: APIError | None = None
        state.runs.add(self)

    async def chunks(self) -> AsyncIterator[tuple[int, StreamChunk]]:
        """Index of the prompt, and the chunk, as they come.

        Raises:
            APIError: an output has failed, or the run was cut off.
        """
        try:
            async for item in self._joined():
                self._watch(*item)
                yield item
        except RequestError as error:
            raise self._refusal or APIError(500, str(error)) from error

    async def _joined(self) -> AsyncIterator[tuple[int, StreamChunk]]:
        if len(self.requests) == 1:
            async for chunk in self.requests[0]:
                yield 0, chunk
            return
        queue: asyncio.Queue[tuple[int, StreamChunk] | BaseException | None] = asyncio.Queue()

        async def pump(index: int, request: AsyncRequest) -> None:
            try:
                async for chunk in request:
                    queue.put_nowait((index, chunk))
                queue.put_nowait(None)
            except Exception as error:
                queue.put_nowait(error)

        tasks = [asyncio.ensure_future(pump(*each)) for each in enumerate(self.requests)]
        try:
            left = len(tasks)
            while left:
                item = await queue.get()
                if isinstance(item, BaseException):
                    raise item
                if item is None:
                    left -= 1
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()

    async def results(self) -> list[RequestOutput]:
        """All outputs, when they have ended.

        Raises:
            APIError: one of them has failed.
        """
        async for _ in self.chunks():
            pass
        return [request.result() for request in self.requests]

    def stop(self) -> None:
        """End all outputs where they are; their last chunks still come."""
        for request in self.requests:
            request.stop()

    def cut_off(self, error: APIError) -> None:
        """End all outputs, with this error for the client."""
        self._refusal = error
        for request in self.requests:
            request.give_up(error)
        if self.preparing is not None:
            self.preparing.cancel()

    def named(self, kind: str) -> str:
        """A new id of the response, such as "cmpl-..."; clients may stop it by this id."""
        self.response_id = f"{kind}{uuid.uuid4().hex}"
        return self.response_id

    @property
    def refusal(self) -> APIError | None:
        """Why it was cut off; None if it was not."""
        return self._refusal

    def close(self) -> None:
        """End what still runs; nothing happens if it has ended."""
        if self._closed:
            return
        self._closed = True
        for request in self.requests:
            request.abort()
        self.leave()
        self._state.runs.discard(self)
        seconds = time.perf_counter() - self._began
        for index, request in enumerate(self.requests):
            for output in request.job.requests:
                if (index, output.index) not in self._counted:
                    self._state.metrics.finished(output, seconds)
        outputs = [r for request in self.requests for r in request.job.requests]
        self.log |= {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": sum(each.metrics.generated_tokens for each in outputs),
            "finish_reasons": [each.finish_reason or "abort" for each in outputs],
        }

    @property
    def ended(self) -> bool:
        """Whether the engine has ended all outputs; the client may still read them."""
        outputs = (each for request in self.requests for each in request.job.requests)
        return self.entered and all(each.finished for each in outputs)

    def leave(self) -> None:
        """Give the places of the outputs to others; nothing happens the second time."""
        if not self._left:
            self._left = True
            self._state.leave(self._sequences)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(len(request.prompt_token_ids) for request in self.requests)

    def _watch(self, index: int, chunk: StreamChunk) -> None:
        """Measure a chunk, and refuse a failed output."""
        now, place = time.perf_counter(), (index, chunk.index)
        if chunk.tokens:
            before = self._last.get(place)
            self._state.metrics.chunk(now - (before or self._began), first=before is None)
            self._last[place] = now
        if chunk.output is not None:
            output = self.requests[index].job.requests[chunk.index]
            self._state.metrics.finished(output, now - self._began)
            self._counted.add(place)
            _refuse_failed(chunk.output, output.failure)


def _refuse_failed(output: CompletionOutput, failure: Exception | None) -> None:
    if output.finish_reason == "error":
        raise of_output(failure, str(output.error))


async def started(
    request: Request,
    state: ServerState,
    body: SamplingBody | ResponseBody,
    sequences: int,
    prepare: Callable[[], list[JobSpec]],
    prompt_field: str,
) -> Run:
    """Admit a request, prepare it off the loop, and queue its prompts.

    Args:
        request: the HTTP request.
        state: the server's.
        body: its body.
        sequences: its outputs.
        prepare: makes of it what the engine takes; called off the loop.
        prompt_field: the body's field with the prompt, for error messages.

    Raises:
        APIError: the request cannot be served.
    """
    began = time.perf_counter()
    state.check_model(body.model)
    check_speculation(body.speculative_config, state.llm.llm.speculative_config)
    if isinstance(body, SamplingBody) and body.wants_trace and not state.settings.traces:
        raise invalid("tokenleap", "tokenleap.trace: this server shows no traces (--no-traces).")
    scope = state.scope_of(request, body.cache_salt)
    state.enter(sequences)
    requests: list[AsyncRequest] = []
    run = Run(state, requests, sequences, began, scope)
    request.state.log = run.log
    run.preparing = task = asyncio.current_task()
    try:
        client = state.client_of(request)
        specs = await state.llm.prepare(prepare, client=client, compiles=wants_form(body))
        scoped = [replace(spec, scope=scope) for spec in specs]
        requests += await state.llm.submit(scoped, client)
    except BaseException as error:
        run.close()
        if run.refusal is not None and isinstance(error, asyncio.CancelledError):
            if task is not None:
                task.uncancel()  # the client is told, and then it ends by itself
            raise run.refusal from None
        if isinstance(error, TokenleapError):
            state.check_open()  # if it was closed meanwhile, nothing is wrong with the request
            refused = of_engine(error, type(body).model_fields, prompt_field)
            if refused.param == "structured_outputs":
                refused.param = form_field(body)
            raise refused from error
        raise
    finally:
        run.preparing = None
    run.entered = True
    return run


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`; None if the client went away first, which cancels it."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
