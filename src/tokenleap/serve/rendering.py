"""Parts of responses that several endpoints share: usage, log-probabilities, details."""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Message, Receive, Send
from starlette.types import Scope as AsgiScope

from tokenleap.core.distribution import PromptLogprobs, TokenLogprobs
from tokenleap.core.sequence import Scope
from tokenleap.errors import TokenleapError
from tokenleap.outputs import CompletionOutput, RequestOutput, StreamedToken
from tokenleap.serve.body import APIError, invalid
from tokenleap.serve.fields import Details, SamplingBody
from tokenleap.serve.running import GONE, Pieces, Run, ServerState, while_connected

__all__ = [
    "DONE",
    "Answer",
    "EventStream",
    "all_outputs",
    "answer_of",
    "as_json",
    "chat_logprobs",
    "chunk_usage",
    "completion_logprobs",
    "data",
    "details_of",
    "event",
    "last_events",
    "new_id",
    "prompt_logprobs",
    "refuse_stream_options",
    "responded",
    "stop_fields",
    "usage_of",
]


_LEAST = -9999.0
"""Stands for minus infinity, which JSON does not have; OpenAI's API does the same."""


def new_id(kind: str) -> str:
    """An id such as "cmpl-..."."""
    return f"{kind}{uuid.uuid4().hex}"


def usage_of(run: Run, outputs: Sequence[CompletionOutput] | None = None) -> dict[str, Any]:
    """OpenAI's usage object, of what was generated so far."""
    if outputs is None:
        metrics = [r.metrics for request in run.requests for r in request.job.requests]
    else:
        metrics = [output.metrics for output in outputs]
    firsts = [request.job.requests[0].metrics for request in run.requests]
    prompt, written = run.prompt_tokens, sum(each.generated_tokens for each in metrics)
    cached = sum(each.cached_prompt_tokens + each.cached_source_tokens for each in firsts)
    usage: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": written,
        "total_tokens": prompt + written,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    if any(request.job.requests[0].prediction for request in run.requests):
        usage["completion_tokens_details"] = {
            "accepted_prediction_tokens": sum(each.accepted_prediction_tokens for each in metrics),
            "rejected_prediction_tokens": sum(each.rejected_prediction_tokens for each in metrics),
        }
    return usage


def stop_fields(output: CompletionOutput | None, reason: str | None = None) -> dict[str, Any]:
    """Why an output has ended, with vLLM's `stop_reason`; None while it runs."""
    if output is None:
        return {"finish_reason": None}
    finish = output.finish_reason
    finish = reason if reason is not None and finish == "stop" else finish
    return {"finish_reason": finish, "stop_reason": output.stop_reason}


# Log-probabilities


def completion_logprobs(
    tokens: Iterable[TokenLogprobs | None],
    ids: Sequence[int],
    texts: Sequence[str],
    pieces: Pieces,
    offset: int = 0,
) -> dict[str, Any]:
    """Those of `/v1/completions`."""
    listed = list(tokens)
    return {
        "tokens": pieces.all_of(ids),
        "token_logprobs": [None if each is None else _finite(each.logprob) for each in listed],
        "top_logprobs": [None if each is None else _by_text(each, pieces) for each in listed],
        "text_offset": list(accumulate(map(len, texts), initial=offset))[:-1],
    }


def _by_text(token: TokenLogprobs, pieces: Pieces) -> dict[str, float]:
    """Log-probabilities by text, the token's own among them; the best of equal texts counts."""
    found: dict[str, float] = {}
    for each, value in (*token.top, (token.token_id, token.logprob)):
        found.setdefault(pieces.of(each), _finite(value))
    return found


def chat_logprobs(tokens: Iterable[TokenLogprobs], num_top: int, pieces: Pieces) -> dict[str, Any]:
    """Those of `/v1/chat/completions`."""

    def entry(token: int, value: float) -> dict[str, Any]:
        text = pieces.of(token)
        known = None if "\ufffd" in text else list(text.encode(errors="replace"))
        return {"token": text, "logprob": _finite(value), "bytes": known}

    return {
        "content": [
            {
                **entry(each.token_id, each.logprob),
                "top_logprobs": [entry(*best) for best in each.top[:num_top]],
            }
            for each in tokens
        ]
    }


def prompt_logprobs(found: PromptLogprobs | None) -> list[Any] | None:
    """Those of the prompt, as vLLM's API has them."""
    if found is None:
        return None
    return [
        None
        if position is None
        else {
            str(token): {
                "logprob": _finite(each.logprob),
                "rank": each.rank,
                "decoded_token": each.decoded_token,
            }
            for token, each in position.items()
        }
        for position in found
    ]


def _finite(value: float) -> float:
    return max(value, _LEAST)


# Speculation


def details_of(
    wanted: Details | None,
    tokens: Sequence[StreamedToken],
    output: CompletionOutput | None,
    scope: Scope,
) -> Mapping[str, Any]:
    """The field `tokenleap` of a choice, if the request asks for it.

    Args:
        scope: of its request. If others share its drafts, what was drafted for it and not accepted
            may be their text: the trace is without it.
    """
    if wanted is None:
        return {}
    found: dict[str, Any] = {}
    if wanted.tokens:
        found["tokens"] = [
            {"id": token.token_id, "text": token.text, "origin": str(token.origin)}
            for token in tokens
        ]
    if wanted.metrics and output is not None:
        found["metrics"] = output.metrics.as_dict()
    if wanted.trace and output is not None:
        trace = output.trace if scope.private else output.trace.withheld()
        found["trace"] = trace.as_dict()
    return {"tokenleap": found}


def all_outputs(results: Sequence[RequestOutput]) -> list[CompletionOutput]:
    """The outputs of all prompts, in order."""
    return [output for result in results for output in result.outputs]


# `responded`: sends a run's answer, in pieces or whole, and closes the run however that ends.


class Answer(Protocol):
    """The answer that an endpoint makes of a run."""

    def whole(self, results: Sequence[RequestOutput]) -> dict[str, Any]:
        """The response when all outputs have ended; made off the loop."""
        ...

    def events(self) -> AsyncIterator[bytes]:
        """The response in pieces."""
        ...


async def responded(
    request: Request, state: ServerState, run: Run, answer: Answer, *, stream: bool | None
) -> Response:
    """The response to a request."""
    if stream:
        return EventStream(run, answer.events(), state.settings.write_timeout)
    try:
        results = await while_connected(request, run.results())
        if results is None:
            return GONE
        content = await state.llm.off_loop(lambda: as_json(answer.whole(results)))
        return Response(content, media_type="application/json")
    finally:
        run.close()


# Server-sent events: a response that ends its run however it ends.


_log = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
"""The end of a stream of completions."""


def as_json(value: Any) -> bytes:
    """JSON without spaces."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode(
        errors="replace"
    )


def data(value: Mapping[str, Any]) -> bytes:
    """An event without a name."""
    return b"data: " + as_json(value) + b"\n\n"


def event(value: Mapping[str, Any]) -> bytes:
    """An event whose name is its type."""
    return b"event: " + str(value["type"]).encode() + b"\n" + data(value)


def answer_of(error: APIError) -> Response:
    """An error as a response."""
    content = as_json(error.as_dict())  # may quote text that has no encoding
    return Response(content, error.status, error.headers, "application/json")


class EventStream(StreamingResponse):
    """Sends events while the client listens, and closes the run in the end.

    A failure becomes a last event with OpenAI's error object.

    Args:
        events: the events; they are not begun if the client has gone already.
    """

    def __init__(self, run: Run, events: AsyncIterator[bytes], write_timeout: float) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(_told(events), headers=headers, media_type="text/event-stream")
        self._run = run
        self._write_timeout = write_timeout

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        """Send the response."""

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


# The usage in the chunks of a stream of completions, and the stream's last events.


def refuse_stream_options(body: SamplingBody) -> None:
    """Refuse options of a stream for a response that is none."""
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", 'stream_options need "stream": true.')


def chunk_usage(body: SamplingBody, run: Run) -> dict[str, Any]:
    """A chunk's fields besides its choices: the usage so far, if the request wants it."""
    options = body.stream_options
    if options is None or not options.continuous_usage_stats:
        return {}
    return {"usage": usage_of(run)}


def last_events(body: SamplingBody, run: Run, head: Mapping[str, Any]) -> Iterator[bytes]:
    """The usage of all outputs, if the request wants it, and the end of the stream."""
    if body.stream_options is not None and body.stream_options.include_usage:
        yield data({**head, "choices": [], "usage": usage_of(run)})
    yield DONE
