"""`AsyncLLM`: the same engine for asyncio. One thread computes, and the event loop never does.

    llm = AsyncLLM("smollm2-135m")
    async for chunk in llm.generate("Hello", SamplingParams(temperature=0, max_tokens=64)):
        print(chunk.text, end="")

Cancelling the task, or closing the generator, ends the request at once and frees its memory.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias, TypeVar, Unpack

from tokenleap.arguments import REQUIRED, known_options
from tokenleap.core.params import Sampling, SamplingParams
from tokenleap.engine.jobs import Job, JobSpec, Outbox, RequestOptions
from tokenleap.engine.llm_engine import LLMEngine
from tokenleap.engine.prompts import Prompt
from tokenleap.engine.worker import SameProcess
from tokenleap.errors import ConfigError, RequestError, TokenleapError, in_one_line
from tokenleap.llm import LLM
from tokenleap.outputs import RequestOutput, StreamChunk

_log = logging.getLogger(__name__)

T = TypeVar("T")

_PREPARING = 2
"""Threads that read prompts, so that a long one does not hold up all."""
_COMPILING = 2
"""Threads for requests whose outputs have a form: other prompts do not wait for its grammar."""
_RENDERING = 1
"""Threads that write large answers: these do not wait for the prompts of others."""


class AsyncRequest:
    """A prompt in the engine, as an asynchronous iterator over its chunks.

    It belongs to the event loop in which it was submitted.

    Attributes:
        job: the engine's job.
    """

    def __init__(self, job: Job, thread: WorkerThread) -> None:
        self.job = job
        self._thread = thread
        self._loop = asyncio.get_running_loop()
        self._chunks: deque[StreamChunk] = deque()
        self._failure: Exception | None = None
        self._news = asyncio.Event()
        self._open = len(job.requests)
        thread.start(job, self._from_thread)

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        """The prompt; of an encoder-decoder, the source."""
        return tuple(self.job.requests[0].input_ids)

    def __aiter__(self) -> AsyncRequest:
        """The request itself."""
        return self

    async def __anext__(self) -> StreamChunk:
        """The next chunk.

        Raises:
            RequestError: the engine was closed, or failed by a mistake of its own.
        """
        while not self._chunks:
            if not self._open:
                raise StopAsyncIteration
            if self._failure is not None:
                raise RequestError(str(self._failure) or repr(self._failure)) from self._failure
            self._news.clear()
            await self._news.wait()
        chunk = self._chunks.popleft()
        self._open -= chunk.finished
        return chunk

    def abort(self, error: Exception | None = None) -> None:
        """End the request and free its memory, if it has not ended; returns at once.

        Args:
            error: for a caller that waits for the next chunk; None tells it that there is none.
        """
        if self._open and self._failure is None:
            self._failure = error
            self._open = 0 if error is None else self._open
            self._chunks.clear()
            self._news.set()
            self._thread.end(self.job)

    def stop(self) -> None:
        """End the outputs where they are, with the reason "abort"; their last chunks still come."""
        if self._open and self._failure is None:
            self._thread.stop(self.job)

    def result(self) -> RequestOutput:
        """All outputs with the tokens generated so far."""
        return self.job.result()

    def _from_thread(self, chunks: Sequence[StreamChunk], error: Exception | None) -> None:
        try:
            self._loop.call_soon_threadsafe(self._take, chunks, error)
        except RuntimeError:  # the loop is closed: no one waits
            self._thread.end(self.job)

    def _take(self, chunks: Sequence[StreamChunk], error: Exception | None) -> None:
        if self._open:
            self._chunks.extend(chunks)
        self._failure = self._failure or error
        self._news.set()


class AsyncLLM:
    """An `LLM` for asyncio: many requests at once, each a stream of chunks.

    Args:
        model: as `LLM` takes it; or an `LLM`, which other threads may go on using.
        **engine: the other arguments of `LLM`.

    Attributes:
        llm: the `LLM`.
        thread: runs the steps.

    Raises:
        ModelError, ConfigError, CompatibilityError: as `LLM`.
    """

    def __init__(self, model: Any, **engine: Any) -> None:
        if isinstance(model, LLM) and engine:
            raise TokenleapError(f"{next(iter(engine))}: give it to the LLM.")
        self.llm = model if isinstance(model, LLM) else LLM(model, **engine)
        if (processes := self.llm.tensor_parallel_size) > 1:
            raise ConfigError(
                "tensor_parallel_size: AsyncLLM runs a model in one process, because requests "
                f"would arrive in another order in each of {processes}: use LLM."
            )
        self.thread = WorkerThread(self.llm.engine)
        self._preparing = Pool(_PREPARING, "tokenleap-prepare")
        self._compiling = Pool(_COMPILING, "tokenleap-compile")
        self._rendering = Pool(_RENDERING, "tokenleap-render")
        self._pools = (self._preparing, self._compiling, self._rendering)
        # The threads of one that is dropped would keep the model in memory.
        weakref.finalize(self, _close, self._pools, self.thread, 0).atexit = False

    @property
    def alive(self) -> bool:
        """Whether it takes requests."""
        return self.thread.alive

    async def generate(
        self,
        prompt: Prompt = REQUIRED,
        sampling_params: Sampling = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncGenerator[StreamChunk, None]:
        """Yield the tokens of one prompt as they are committed.

        Arguments, chunks and errors are those of `LLM.stream` for one prompt.

        Closing the generator, or cancelling the task that reads it, ends the request and frees its
        memory at once.
        """
        known = known_options("generate", options, prompt, RequestOptions.__annotations__)
        (request,) = await self.submit([JobSpec(prompt, sampling_params, **known)])
        try:
            async for chunk in request:
                yield chunk
            for each in request.job.requests:
                if each.failure is not None:
                    raise RequestError(str(each.error), [request.result()]) from each.failure
        finally:
            request.abort()

    async def submit(self, specs: Sequence[JobSpec], client: Hashable = None) -> list[AsyncRequest]:
        """Check prompts and queue them together.

        Args:
            specs: the prompts.
            client: whose they are: prompts of others do not wait for all of these to be prepared.

        The caller reads each request to its end, or aborts it. An output that failed while it ran
        has `finish_reason` "error", and nothing is raised for it. However many prompts there are,
        and however they speculate, they wait for one turn of the engine at most before they are
        queued.

        Raises:
            PromptError, ConfigError, CompatibilityError: as `LLM.generate`; nothing is queued.
        """
        compiles = any(_has_form(spec.params) for spec in specs)
        make = partial(self.llm.engine.jobs, specs)
        jobs = await self.prepare(make, client=client, compiles=compiles)
        return [AsyncRequest(job, self.thread) for job in jobs]

    def measure_costs(self) -> None:
        """Measure what passes cost, if that was put off; returns when it is done.

        Any request may speculate. The first one that does would hold up the others.
        """
        self.llm.engine.measure_costs()

    async def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt, as `LLM.encode` has them."""
        return await self.prepare(partial(self.llm.encode, prompt))

    async def prepare(
        self, act: Callable[[], T], *, client: Hashable = None, compiles: bool = False
    ) -> T:
        """Run this in a thread that prepares requests.

        Args:
            act: what to run.
            client: as `submit` has it.
            compiles: whether a grammar may be compiled.
        """
        pool = self._compiling if compiles else self._preparing
        return await asyncio.wrap_future(pool.submit(act, client))

    async def off_loop(self, act: Callable[[], T], client: Hashable = None) -> T:
        """Run this in a thread that requests are not prepared in; `client` as `submit` has it."""
        return await asyncio.wrap_future(self._rendering.submit(act, client))

    def close(self, timeout: float | None = None) -> bool:
        """End all requests and the threads; those who wait for a chunk get a RequestError.

        Args:
            timeout: seconds to wait for the step that runs; None waits for its end.

        Returns:
            Whether the engine's thread has ended. If not, it ends after the step.
        """
        return _close(self._pools, self.thread, timeout)

    async def __aenter__(self) -> AsyncLLM:
        """The `AsyncLLM` itself."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close it, off the loop."""
        await asyncio.to_thread(self.close)


def _close(pools: Sequence[Pool], thread: WorkerThread, timeout: float | None) -> bool:
    for pool in pools:
        pool.close()
    return thread.close(timeout)


def _has_form(params: Sampling) -> bool:
    if isinstance(params, Mapping):
        return params.get("structured_outputs") is not None
    return isinstance(params, SamplingParams) and params.form is not None


# `WorkerThread`: drives an engine, so that the event loop does not.


Deliver: TypeAlias = Callable[[Sequence[StreamChunk], Exception | None], object]
"""Takes the chunks of a job after a step, in the worker's thread; with an error there are no more.

It must return at once and not raise.
"""


class WorkerThread:
    """A thread that drives an engine until it is closed."""

    def __init__(self, engine: LLMEngine) -> None:
        self._engine, self._worker = engine, engine.worker
        self._outbox = Outbox()
        self._jobs: dict[int, tuple[Job, Deliver]] = {}  # by the job's id
        self._lock = threading.RLock()  # no command comes after the one that closes
        self._closed = False
        self._running = True
        self._process = SameProcess()
        self._thread = threading.Thread(target=self._run, name="tokenleap-engine", daemon=True)
        self._worker.enter(self._thread)
        self._worker.listeners.append(self._report)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether it takes jobs."""
        return self._thread.is_alive() and not self._closed

    def start(self, job: Job, deliver: Deliver) -> None:
        """Queue a job."""
        self._process.check()
        with self._lock:
            if self._closed:
                raise closed_error()
            self._jobs[id(job)] = job, deliver
            self._outbox.watch([job])
            self._engine.start([job])

    def end(self, job: Job) -> None:
        """Abort a job and deliver no more of it, if it has not ended; returns at once."""
        with self._lock:
            if self._jobs.pop(id(job), None) is not None:
                self._engine.end([job], wait=False)

    def stop(self, job: Job) -> None:
        """End the outputs of a job where they are; their last chunks still come."""
        with self._lock:
            if id(job) in self._jobs:
                self._engine.stop([job])

    def close(self, timeout: float | None = None) -> bool:
        """End all jobs and the thread; returns whether it has ended."""
        if not self._process.here:
            return True
        self._close()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                self._worker.post(self._stop)

    # In the thread

    def _run(self) -> None:
        try:
            while self._running:
                self._go_on()
        finally:
            self._worker.listeners.remove(self._report)
            self._worker.leave(self._thread)
            with self._lock:  # no job is left; who keeps the `AsyncLLM` does not keep the model
                del self._engine

    def _go_on(self) -> None:
        try:
            try:
                self._worker.serve(lambda: not self._running)
            except Exception as error:  # our own mistake: it ends the jobs, and not the thread
                _log.exception("a step failed, and its requests were ended")
                self._worker.call(partial(self._engine.give_up, error))
        except BaseException as error:  # a panic of native code: nothing is certain any more
            _log.critical("the engine failed and was closed", exc_info=True)
            failure = TokenleapError(f"the engine failed: {in_one_line(error)}")
            self._close()
            self._tell_all(failure)
            with suppress(BaseException):  # it may panic again, and others wait
                self._worker.call(partial(self._engine.give_up, failure))

    def _report(self) -> None:
        """Deliver what the last step has brought."""
        for job in self._outbox.take():
            _, deliver = self._jobs.get(id(job), (job, None))
            if deliver is None:  # it was aborted
                continue
            try:
                chunks = job.take()
            except Exception as error:  # its text or trace cannot be made
                self.end(job)
                deliver((), error)
                continue
            if job.all_taken:
                self._jobs.pop(id(job), None)
            deliver(chunks, None)

    def _stop(self) -> None:
        self._running = False
        jobs = self._tell_all(TokenleapError("the engine was closed."))
        self._engine.end(jobs, wait=False)

    def _tell_all(self, error: Exception) -> list[Job]:
        """Deliver an error to all jobs, and forget them; they are still in the engine."""
        jobs, self._jobs = list(self._jobs.values()), {}
        for _, deliver in jobs:
            deliver((), error)
        return [job for job, _ in jobs]


# `Pool`: threads that the process does not wait for when it ends.
#
# Python joins the threads of a `ThreadPoolExecutor` at exit. One that compiles a large grammar
# would outlast a server's time to shut down.


class Pool:
    """Daemon threads that run what is submitted: one call of each client in turn."""

    def __init__(self, threads: int, name: str) -> None:
        self._waiting: dict[Hashable, deque[Callable[[], None]]] = {}  # the next client first
        self._news = threading.Condition()
        self._process = SameProcess()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{index}", daemon=True)
            for index in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, act: Callable[[], T], client: Hashable = None) -> Future[T]:
        """Queue a call; those of a client run in order, and do not wait for all of another one."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            if self._closed:
                future.set_exception(closed_error())
                return
            try:
                future.set_result(act())
            except BaseException as error:  # the caller that waits for it decides
                future.set_exception(error)

        self._process.check()
        with self._news:
            if self._closed:
                raise closed_error()
            self._waiting.setdefault(client, deque()).append(run)
            self._news.notify()
        return future

    def close(self) -> None:
        """Refuse all that has not begun, and return without waiting for what runs."""
        if not self._process.here:  # another thread may have held the lock when it was forked
            return
        with self._news:
            self._closed = True
            waiting = [run for queue in self._waiting.values() for run in queue]
            self._waiting.clear()
            self._news.notify_all()
        for run in waiting:
            run()

    def _run(self) -> None:
        while (act := self._next()) is not None:
            act()
            del act  # and what it holds, while this waits for the next

    def _next(self) -> Callable[[], None] | None:
        """The next client's first call; None after the end."""
        with self._news:
            while not self._waiting:
                if self._closed:
                    return None
                self._news.wait()
            client = next(iter(self._waiting))
            queue = self._waiting.pop(client)
            act = queue.popleft()
            if queue:
                self._waiting[client] = queue  # after the others
            return act


def closed_error() -> TokenleapError:
    """The error for calls after the end."""
    return TokenleapError("the engine was closed: make a new AsyncLLM.")
