"""A request in the engine, from admission to the last byte of its answer, for all endpoints."""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import (
    AsyncIterator,
    Callable,
    Coroutine,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from functools import cached_property, partial
from hashlib import sha256
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Message, Receive, Send
from starlette.types import Scope as AsgiScope

from tokenleap.async_llm import AsyncLLM, AsyncRequest
from tokenleap.core.detokenizer import Pieces
from tokenleap.core.params import SamplingParams
from tokenleap.core.sequence import Scope
from tokenleap.engine.jobs import JobSpec
from tokenleap.errors import RequestError, TokenleapError
from tokenleap.outputs import CompletionOutput, RequestOutput, StreamChunk, StreamedToken
from tokenleap.request import Request as OutputRequest
from tokenleap.serve.body import APIError, invalid, of_engine, of_output, read, unknown_response
from tokenleap.serve.fields import (
    Details,
    EmbeddingBody,
    ResponseBody,
    SamplingBody,
    StreamOptions,
    check_speculation,
    form_field,
    methods_of_requests,
    wants_form,
)
from tokenleap.serve.metrics import Registry, ServerMetrics
from tokenleap.serve.settings import Settings
from tokenleap.serve.text_limit import TextLimit

T = TypeVar("T")
AnyBody = TypeVar("AnyBody", bound=SamplingBody | ResponseBody | EmbeddingBody)
Sampled = TypeVar("Sampled", bound=SamplingBody)

GONE = Response(status_code=499)
"""Placeholder response: the client disconnected."""


class Run:
    """The prompts of one HTTP request in the engine.

    Its owner calls `close` in the end.

    Attributes:
        log: what the request's log line says of it, when it has ended.
        preparing: the task that queues the prompts, as long as it does.
        refusal: why it was cut off.
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
        self.refusal: APIError | None = None
        state.runs.add(self)

    async def chunks(self) -> AsyncIterator[tuple[int, StreamChunk]]:
        """Index of the prompt, and the chunk, as they come."""
        try:
            async for item in self._joined():
                self._watch(*item)
                yield item
        except RequestError as error:
            raise self.refusal or APIError(500, str(error)) from error

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
        async for _ in self.chunks():
            pass
        return [request.result() for request in self.requests]

    def stop(self) -> None:
        """End all outputs where they are; their last chunks still come."""
        for request in self.requests:
            request.stop()

    def cut_off(self, error: APIError) -> None:
        """End all outputs, with this error for the client."""
        self.refusal = error
        for request in self.requests:
            request.abort(error)
        if self.preparing is not None:
            self.preparing.cancel()

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
        self.log |= {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": sum(each.metrics.generated_tokens for each in self._outputs),
            "finish_reasons": [each.finish_reason or "abort" for each in self._outputs],
        }

    @property
    def ended(self) -> bool:
        """Whether the engine has ended all outputs; the client may still read them."""
        return self.entered and all(each.finished for each in self._outputs)

    def leave(self) -> None:
        """Give the places of the outputs to others; nothing happens the second time."""
        if not self._left:
            self._left = True
            self._state.leave(self._sequences)

    @property
    def _outputs(self) -> list[OutputRequest]:
        return [output for request in self.requests for output in request.job.requests]

    @property
    def prompt_tokens(self) -> int:
        return sum(len(request.prompt_token_ids) for request in self.requests)

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage object, of what was generated so far."""
        metrics = [output.metrics for output in self._outputs]
        firsts = [request.job.requests[0] for request in self.requests]
        prompt, written = self.prompt_tokens, sum(each.generated_tokens for each in metrics)
        cached = sum(
            each.metrics.cached_prompt_tokens + each.metrics.cached_source_tokens for each in firsts
        )
        usage: dict[str, Any] = {
            "prompt_tokens": prompt,
            "completion_tokens": written,
            "total_tokens": prompt + written,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        if any(each.prediction for each in firsts):
            usage["completion_tokens_details"] = {
                f"{kind}_prediction_tokens": sum(
                    getattr(each, f"{kind}_prediction_tokens") for each in metrics
                )
                for kind in ("accepted", "rejected")
            }
        return usage

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
            if chunk.output.finish_reason == "error":
                raise of_output(output.failure, str(chunk.output.error))


async def _started(request: Request, answer: Answer[Any]) -> Run:
    """Admit a request, prepare it off the loop, and queue its prompts."""
    began, state, body = time.perf_counter(), answer.state, answer.body
    check_speculation(body.speculative_config, state.llm.llm.speculative_config)
    if isinstance(body, SamplingBody) and body.wants_trace and not state.settings.traces:
        raise invalid("tokenleap", "tokenleap.trace: this server shows no traces (--no-traces).")
    scope = state.scope_of(request, body.cache_salt)
    state.enter(answer.sequences)
    requests: list[AsyncRequest] = []
    run = Run(state, requests, answer.sequences, began, scope)
    request.state.log = run.log
    run.preparing = task = asyncio.current_task()
    try:
        client = state.client_of(request)
        specs = await state.llm.prepare(answer.prepare, client=client, compiles=wants_form(body))
        _check_prompt_logprobs(specs)
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
            refused = of_engine(error, type(body).model_fields, answer.prompt_field)
            if refused.param == "structured_outputs":
                refused.param = form_field(body)
            raise refused from error
        raise
    finally:
        run.preparing = None
    run.entered = True
    return run


MAX_PROMPT_LOGPROBS = 2**20
"""Most log-probabilities of prompts in a response, which take 200 MB."""


def _check_prompt_logprobs(specs: Sequence[JobSpec]) -> None:
    found = 0
    for spec in specs:
        params = spec.params
        if isinstance(params, SamplingParams) and params.prompt_logprobs is not None:
            found += len(spec.prompt) * (params.prompt_logprobs + 1) * params.n
    if found > MAX_PROMPT_LOGPROBS:
        raise invalid(
            "prompt_logprobs",
            f"prompt_logprobs: at most {MAX_PROMPT_LOGPROBS} for all prompts together on this "
            f"server, got {found}: send fewer prompts, or ask for fewer.",
        )


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


# `ServerState`: what all endpoints of an app share; and who may begin a request.


MAX_STRATEGIES = 8
"""Most strategies of requests that are kept. Clients choose them, and each has its own memory."""


MAX_CONTEXTS = 4
"""Contexts that a text may fill if it is cut to its end, or only counted."""


class Server(Protocol):
    """What the endpoints of an app share: a `ServerState`, or the `Models` of several."""

    settings: Settings
    stopping: bool

    @property
    def metrics(self) -> Registry | ServerMetrics: ...

    @property
    def alive(self) -> bool: ...

    def using(
        self, request: Request, model: str | None, /
    ) -> AbstractAsyncContextManager[ServerState]:
        """The state of a model; it stays as long as this or a run of its requests is open."""
        ...

    def cards(self) -> list[dict[str, Any]]:
        """The models, as `/v1/models` lists them."""
        ...

    def stop(self, response_id: str) -> None:
        """End the outputs of a response that is being generated."""
        ...


class ServerState:
    """State that all endpoints of a model share.

    Args:
        engine: the engine's name in the metrics.
        registry: the metrics of several models.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        settings: Settings,
        engine: str = "0",
        registry: Registry | None = None,
    ) -> None:
        settings.check_learning(llm.llm.speculative_config)
        self.llm, self.settings = llm, settings
        self.created = int(time.time())
        self.open_sequences = 0
        self.used_at = time.monotonic()
        self.stopping = False
        self.runs: set[Run] = set()
        self.metrics = ServerMetrics(llm.llm.engine, settings.model, engine, registry)
        llm.llm.engine.strategies.most_kept = MAX_STRATEGIES
        llm.llm.engine.worker.observers.append(self.metrics.observe_step)

    @property
    def alive(self) -> bool:
        return self.llm.alive

    @property
    def capacity(self) -> int:
        """Most outputs that run and wait."""
        return self.llm.llm.engine.options.max_num_seqs + self.settings.max_waiting

    @cached_property
    def text_limit(self) -> TextLimit:
        """The longest prompt that can fit; made off the loop, for it reads the vocabulary."""
        most = self.llm.llm.max_model_len
        if (source := self.llm.llm.engine.target.source_network) is not None:
            most = source.source_limit or MAX_CONTEXTS * most
        return TextLimit.of(self.llm.llm.tokenizer, most)

    def limit_of(self, body: Any) -> TextLimit:
        """The longest prompt of a request, which may be longer if it is cut."""
        cut = body.truncate_prompt_tokens is not None
        return replace(self.text_limit, times=MAX_CONTEXTS) if cut else self.text_limit

    @property
    def pieces(self) -> Pieces:
        return self.llm.llm.engine.pieces

    @asynccontextmanager
    async def using(self, _: Request, model: str | None) -> AsyncIterator[ServerState]:
        """See `Server`."""
        check_model(self.settings, model)
        yield self

    def cards(self) -> list[dict[str, Any]]:
        """See `Server`: one for each of its names."""
        settings, about = self.settings, self.about
        names = settings.served_model_names
        return [card(settings, name, self.created, "loaded", about) for name in names]

    @property
    def about(self) -> dict[str, Any]:
        """Fields of a model's card that are known once it is loaded."""
        llm = self.llm.llm
        method = llm.speculative_config.method_name
        return {
            "max_model_len": llm.max_model_len,
            "default_sampling_params": dict(llm.engine.sampling_defaults),
            "speculation": {"method": method, "methods": methods_of_requests()},
        }

    def scope_of(self, request: Request, cache_salt: str | None) -> Scope:
        """The scope in which a request shares: requests with its API key and its salt."""
        caller = getattr(request.state, "caller", "")
        digest = sha256(f"{caller} {cache_salt or ''}".encode()).hexdigest()
        private = cache_salt is None and not self.settings.share_drafts
        return Scope(digest, private)

    @staticmethod
    def client_of(request: Request) -> tuple[str | None, str | None]:
        """The client that threads take turns for: an API key at an address, as far as known."""
        address = None if request.client is None else request.client.host
        return getattr(request.state, "caller", None), address

    def check_open(self) -> None:
        if not self.alive:
            raise shut_down()

    def enter(self, sequences: int) -> None:
        """Count outputs that are to begin; the caller counts them off with `leave`."""
        if self.stopping:
            raise shut_down()
        self.check_open()
        if sequences > self.capacity:
            raise invalid("n", f"at most {self.capacity} outputs fit into one request here.")
        if self.open_sequences + sequences > self.capacity:
            for run in self.runs:
                if run.ended:  # its client reads slowly, or not at all
                    run.leave()
        if self.open_sequences + sequences > self.capacity:
            self.metrics.refused()
            raise APIError(
                429,
                f"{self.open_sequences} outputs run or wait, and there is room for "
                f"{self.capacity}: try again later.",
                code="queue_full",
                headers={"Retry-After": "1"},
            )
        self.open_sequences += sequences

    def cut_off(self) -> None:
        """Tell the clients of all requests that the server shuts down before their end."""
        for run in list(self.runs):
            run.cut_off(shut_down())

    def stop(self, response_id: str) -> None:
        """End the outputs of a response that is being generated."""
        run = next((run for run in self.runs if run.response_id == response_id), None)
        if run is None:
            raise unknown_response(response_id)
        run.stop()

    def leave(self, sequences: int) -> None:
        self.open_sequences -= sequences
        self.used_at = time.monotonic()


def check_model(settings: Settings, name: str | None) -> None:
    """Refuse a model that is not served here."""
    known = settings.served_model_names
    if name is not None and name not in known:
        there = ", ".join(f"'{each}'" for each in known)
        message = f"the model '{name[:200]}' does not exist here; there is {there[:1000]}."
        raise APIError(404, message, param="model", code="model_not_found")


def card(
    settings: Settings, name: str, created: int, status: str, about: Mapping[str, Any] | None
) -> dict[str, Any]:
    """A model in `/v1/models`.

    Args:
        status: "loaded", "loading" or "unloaded".
        about: see `ServerState.about`; None if it was never loaded.
    """
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "tokenleap",
        "root": settings.model,
        "parent": None,
        **(about or {"max_model_len": None}),
        "status": {"value": status},
        "traces": settings.traces,
        "shares_drafts": settings.share_drafts,
    }


def shut_down() -> APIError:
    """The answer of a server that takes no more requests."""
    return APIError(503, "the server is shutting down.", headers={"Retry-After": "5"})


def server_of(request: Request) -> Server:
    """What the app shares that this request came to."""
    server: Server = request.app.state.server
    return server


# Answers: what an endpoint makes of a body, and of the outputs.


class Answer(ABC, Generic[AnyBody]):
    """The answer of an endpoint to a request, whole or in pieces.

    Making it checks what the body's fields say together.

    Args:
        sequences: outputs that the request asks for.
    """

    prompt_field: ClassVar[str]
    prefix: ClassVar[str]
    """How the id of a response begins."""

    run: Run
    """Since `begin`."""

    def __init__(self, body: AnyBody, state: ServerState, sequences: int = 1) -> None:
        self.body, self.state, self.sequences = body, state, sequences

    @abstractmethod
    def prepare(self) -> list[JobSpec]:
        """Its prompts; made off the loop."""

    def begin(self, run: Run) -> None:
        """Its prompts are queued: from now on, clients may stop the response by its id."""
        self.run, self.created = run, int(time.time())
        run.response_id = self.id = f"{self.prefix}{uuid.uuid4().hex}"

    @abstractmethod
    def whole(self, results: Sequence[RequestOutput]) -> dict[str, Any]:
        """The response when all outputs have ended; made off the loop."""

    def is_small(self, results: Sequence[RequestOutput]) -> bool:
        """Whether the response is written in no time; it need not wait for those of others."""
        return False

    @abstractmethod
    def events(self) -> AsyncIterator[bytes]:
        """The response in pieces."""


_SMALL = 512  # tokens of an answer


class Choices(Answer[Sampled]):
    """A response with a choice for each output, as completions and chats have it."""

    object: ClassVar[str]
    """The type of a response in pieces."""

    @property
    def head(self) -> dict[str, Any]:
        """The fields of every chunk besides its choices."""
        model = self.state.settings.model
        return {"id": self.id, "object": self.object, "created": self.created, "model": model}

    @abstractmethod
    def choice(
        self,
        prompt: int,
        index: int,
        tokens: Sequence[StreamedToken],
        output: CompletionOutput | None,
    ) -> dict[str, Any]:
        """A choice, or the next piece of it, with these tokens.

        Args:
            prompt: number of the prompt.
            index: number of the output among those of its prompt.
            output: the output if it has ended.
        """

    def whole(self, results: Sequence[RequestOutput]) -> dict[str, Any]:
        choices = [
            self.choice(prompt, output.index, output.tokens, output)
            for prompt, result in enumerate(results)
            for output in result.outputs
        ]
        return {**self.head, "choices": choices, "usage": self.run.usage()}

    def is_small(self, results: Sequence[RequestOutput]) -> bool:
        tokens = sum(len(output.token_ids) for result in results for output in result.outputs)
        return tokens <= _SMALL and self.body.tokenleap is None

    def begun(self) -> Iterator[bytes]:
        """Chunks before the first output's."""
        yield from ()

    def chunk(self, prompt: int, chunk: StreamChunk) -> dict[str, Any]:
        """A chunk without its usage."""
        choice = self.choice(prompt, chunk.index, chunk.tokens, chunk.output)
        return {**self.head, "choices": [choice]}

    def is_large(self, prompt: int, chunk: StreamChunk) -> bool:
        """Whether the chunk is better made off the loop: it may have a trace."""
        return chunk.finished and self.body.tokenleap is not None

    async def events(self) -> AsyncIterator[bytes]:
        """The chunks, the usage of all outputs if the request wants it, and the end."""
        options = self.body.stream_options or StreamOptions()
        for begun in self.begun():
            yield begun
        async for prompt, chunk in self.run.chunks():
            usage = {"usage": self.run.usage()} if options.continuous_usage_stats else {}
            large = self.is_large(prompt, chunk)
            make = partial(self._event, prompt, chunk, usage, large=large)
            yield await self.state.llm.off_loop(make) if large else make()
        if options.include_usage:
            yield data({**self.head, "choices": [], "usage": self.run.usage()})
        yield DONE

    def _event(
        self, prompt: int, chunk: StreamChunk, usage: Mapping[str, Any], *, large: bool
    ) -> bytes:
        return data({**self.chunk(prompt, chunk), **usage}, large=large)

    def end(
        self,
        tokens: Sequence[StreamedToken],
        output: CompletionOutput | None,
        reason: str | None = None,
    ) -> dict[str, Any]:
        """The last fields of a choice or of a piece of it.

        Args:
            reason: why an output has ended that stopped by itself, if it is another than "stop".
        """
        found: dict[str, Any] = {"finish_reason": None}
        if output is not None:
            stopped = output.finish_reason == "stop"
            finish = reason if reason and stopped else output.finish_reason
            found = {"finish_reason": finish, "stop_reason": output.stop_reason}
        if self.body.tokenleap is not None:
            found["tokenleap"] = self._details(self.body.tokenleap, tokens, output)
        if self.body.return_token_ids:
            found["token_ids"] = [token.token_id for token in tokens]
        return found

    def _details(
        self, wanted: Details, tokens: Sequence[StreamedToken], output: CompletionOutput | None
    ) -> dict[str, Any]:
        """Speculation, as far as the request asks for it.

        If others share the request's drafts, what was drafted and not accepted may be their text:
        the trace is without it.
        """
        found: dict[str, Any] = {}
        if wanted.tokens:
            found["tokens"] = [
                {"id": token.token_id, "text": token.text, "origin": str(token.origin)}
                for token in tokens
            ]
        if wanted.metrics and output is not None:
            found["metrics"] = output.metrics.as_dict()
        if wanted.trace and output is not None:
            trace = output.trace if self.run.scope.private else output.trace.withheld()
            found["trace"] = trace.as_dict()
        return found


async def answered(
    request: Request, kind: type[AnyBody], answer: Callable[[AnyBody, ServerState], Answer[AnyBody]]
) -> Response:
    """Run a request, and answer it whole or in pieces; its run ends with the answer."""
    server = server_of(request)
    body = await read(request, kind, server.settings)
    async with server.using(request, body.model) as state:
        made = answer(body, state)
        run = await _started(request, made)
    made.begin(run)
    if made.body.stream:
        return EventStream(run, made.events(), state.settings.write_timeout)

    async def whole() -> bytes:
        results = await run.results()
        if made.is_small(results):
            return as_json(made.whole(results))
        client = state.client_of(request)
        return await state.llm.off_loop(lambda: as_json(made.whole(results), large=True), client)

    try:
        content = await while_connected(request, whole())
        return GONE if content is None else Response(content, media_type="application/json")
    finally:
        run.close()


# Server-sent events: a response that ends its run however it ends.


_log = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
"""The end of a stream of completions."""


_LEVELS = 6
"""A response, its choices, a choice, its log-probabilities or trace, their items, and an item."""


def as_json(value: Any, *, large: bool = False) -> bytes:
    return _json(value, _LEVELS if large else 0).encode(errors="replace")


def _json(value: Any, levels: int = 0) -> str:
    """In pieces: what is deeper inside is written alone, and other threads run between."""
    if levels and isinstance(value, list):
        return f"[{','.join(_json(each, levels - 1) for each in value)}]"
    if levels and isinstance(value, dict):
        members = (f"{_json(k)}:{_json(each, levels - 1)}" for k, each in value.items())
        return f"{{{','.join(members)}}}"
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def data(value: Mapping[str, Any], *, large: bool = False) -> bytes:
    """An event without a name."""
    return b"data: " + as_json(value, large=large) + b"\n\n"


def event(value: Mapping[str, Any]) -> bytes:
    """An event whose name is its type."""
    return b"event: " + str(value["type"]).encode() + b"\n" + data(value)


def answer_of(error: APIError) -> Response:
    content = as_json(error.as_dict())  # may quote text that has no encoding
    return Response(content, error.status, error.headers, "application/json")


class EventStream(StreamingResponse):
    """Sends events while the client listens, and closes the run; a failure is the last one."""

    def __init__(self, run: Run, events: AsyncIterator[bytes], write_timeout: float) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(_told(events), headers=headers, media_type="text/event-stream")
        self._run = run
        self._write_timeout = write_timeout

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        async def send_in_time(message: Message) -> None:
            async with asyncio.timeout(self._write_timeout):
                await send(message)

        try:
            await super().__call__(scope, receive, send_in_time)
        except TimeoutError:
            _log.info("a client took nothing for %g s", self._write_timeout)
        finally:
            self._run.close()


async def _told(events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    try:
        async for each in events:
            yield each
    except APIError as error:
        yield data(error.as_dict())
    except TokenleapError as error:
        yield data(APIError(500, str(error)).as_dict())
    except Exception:
        _log.exception("a stream failed")
        yield data(APIError(500, "an internal error: see the server's log.").as_dict())


def refuse_stream_options(body: SamplingBody) -> None:
    """Refuse options of a stream for a response that is none."""
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", 'stream_options need "stream": true.')
