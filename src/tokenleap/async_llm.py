"""`AsyncLLM`: the same engine for asyncio. One thread computes, and the event loop never does.

    llm = AsyncLLM("smollm2-135m")
    async for chunk in llm.generate("Hello", SamplingParams(temperature=0, max_tokens=64)):
        print(chunk.text, end="")

Cancelling the task, or closing the generator, ends the request at once and frees its memory.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from tokenleap.core.params import Sampling, SamplingParams
from tokenleap.engine.jobs import Job, JobSpec, ReadSpec
from tokenleap.engine.loaded_llm import REQUIRED, refuse_unknown
from tokenleap.engine.prompts import GivenPrediction, GivenReferences, Prompt
from tokenleap.engine.strategies import Speculative
from tokenleap.engine.worker import Pool, Worker
from tokenleap.errors import ConfigError, RequestError, TokenleapError
from tokenleap.llm import LLM
from tokenleap.outputs import RequestOutput, StreamChunk

__all__ = ["AsyncLLM", "AsyncRequest"]

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

    def __init__(self, job: Job, worker: Worker) -> None:
        self.job = job
        self._worker = worker
        self._loop = asyncio.get_running_loop()
        self._chunks: deque[StreamChunk] = deque()
        self._failure: Exception | None = None
        self._news = asyncio.Event()
        self._open = len(job.requests)
        worker.start(job, self._from_worker)

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

    def abort(self) -> None:
        """End the request and free its memory, if it has not ended; returns at once."""
        if self._open and self._failure is None:
            self._open = 0
            self._chunks.clear()
            self._news.set()
            self._worker.end(self.job)

    def stop(self) -> None:
        """End the outputs where they are, with the reason "abort"; their last chunks still come."""
        if self._open and self._failure is None:
            self._worker.stop(self.job)

    def give_up(self, error: Exception) -> None:
        """End the request at once, with this error for a caller that waits for its next chunk."""
        if self._open and self._failure is None:
            self._failure = error
            self._chunks.clear()
            self._news.set()
            self._worker.end(self.job)

    def result(self) -> RequestOutput:
        """All outputs with the tokens generated so far."""
        return self.job.result()

    def _from_worker(self, chunks: Sequence[StreamChunk], error: Exception | None) -> None:
        try:
            self._loop.call_soon_threadsafe(self._take, chunks, error)
        except RuntimeError:  # the loop is closed: no one waits
            self._worker.end(self.job)

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
        worker: the thread that runs the steps.

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
        self.worker = Worker(self.llm.engine)
        self._preparing = Pool(_PREPARING, "tokenleap-prepare")
        self._compiling = Pool(_COMPILING, "tokenleap-compile")
        self._rendering = Pool(_RENDERING, "tokenleap-render")

    async def generate(
        self,
        prompt: Prompt = REQUIRED,
        sampling_params: Sampling = None,
        *,
        speculative_config: Speculative = None,
        references: GivenReferences = None,
        prediction: GivenPrediction = None,
        trace: bool = False,
        **unknown: Any,
    ) -> AsyncGenerator[StreamChunk, None]:
        """Yield the tokens of one prompt as they are committed.

        Arguments, chunks and errors are those of `LLM.stream` for one prompt.

        Closing the generator, or cancelling the task that reads it, ends the request and frees its
        memory at once.
        """
        refuse_unknown("generate", unknown, prompt)
        spec = JobSpec(prompt, sampling_params, speculative_config, references, prediction, trace)
        (request,) = await self.submit([spec])
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
        engine = self.llm.engine

        def begun() -> tuple[list[ReadSpec], list[Job] | None]:
            read = engine.read_specs(specs)
            default = not any(spec.needs_strategy for spec in read)
            return read, engine.made_jobs(read, [None] * len(read)) if default else None

        prepare = partial(
            self.prepare, client=client, compiles=any(_has_form(spec.params) for spec in specs)
        )
        read, jobs = await prepare(begun)
        if jobs is None:
            # Building may load models and time passes.
            strategies = await self.in_engine(partial(engine.strategies_of, read))
            jobs = await prepare(partial(engine.made_jobs, read, strategies))
        return [AsyncRequest(job, self.worker) for job in jobs]

    def measure_costs(self) -> None:
        """Measure what passes cost, if that was put off; returns when it is done.

        Any request may speculate. The first one that does would hold up the others.
        """
        self.worker.call(self.llm.engine.measure_costs).result()

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

    async def off_loop(self, act: Callable[[], T]) -> T:
        """Run this in a thread that requests are not prepared in."""
        return await asyncio.wrap_future(self._rendering.submit(act))

    async def in_engine(self, act: Callable[[], T]) -> T:
        """Run this in the engine's thread, between two steps."""
        return await asyncio.wrap_future(self.worker.call(act))

    def close(self, timeout: float | None = None) -> bool:
        """End all requests and the threads; those who wait for a chunk get a RequestError.

        Args:
            timeout: seconds to wait for the step that runs; None waits for its end.

        Returns:
            Whether the engine's thread has ended. If not, it ends after the step.
        """
        self._preparing.close()
        self._compiling.close()
        self._rendering.close()
        return self.worker.close(timeout)

    async def __aenter__(self) -> AsyncLLM:
        """The `AsyncLLM` itself."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close it, off the loop."""
        await asyncio.to_thread(self.close)


def _has_form(params: Sampling) -> bool:
    if isinstance(params, Mapping):
        return params.get("structured_outputs") is not None
    return isinstance(params, SamplingParams) and params.form is not None
