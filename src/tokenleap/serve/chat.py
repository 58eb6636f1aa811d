"""`/v1/chat/completions`: the next message of a conversation."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response

from tokenleap.engine.job_spec import JobSpec
from tokenleap.outputs import CompletionOutput, RequestOutput, StreamChunk
from tokenleap.serve.answers import responded
from tokenleap.serve.body import read
from tokenleap.serve.chat_prompt import chat_ids, refuse_special_tokens
from tokenleap.serve.errors import invalid
from tokenleap.serve.events import data
from tokenleap.serve.fields import ChatBody
from tokenleap.serve.messages import Tool
from tokenleap.serve.rendering import (
    all_outputs,
    chat_logprobs,
    details_of,
    prompt_logprobs,
    stop_fields,
    usage_of,
)
from tokenleap.serve.running import Run, started
from tokenleap.serve.sampling import form_field, form_of, params_of
from tokenleap.serve.schema import takes
from tokenleap.serve.state import ServerState, state_of
from tokenleap.serve.stream_end import chunk_usage, last_events, refuse_stream_options
from tokenleap.serve.tools import Call, CallFinder, forced_form, forced_name, tools_of

__all__ = ["router"]

router = APIRouter()


@router.post("/v1/chat/completions", **takes(ChatBody))
async def create_chat_completion(request: Request) -> Response:
    """Answer a conversation."""
    state = state_of(request)
    body = await read(request, ChatBody, state.settings)
    tools = tools_of(body)
    _check(body)
    run = await started(
        request,
        state,
        body,
        body.n or 1,
        partial(_prepared, body, tools, state),
        "messages",
    )
    answer = _Answer(body, tools, run, state)
    return await responded(request, state, run, answer, stream=body.stream)


def _check(body: ChatBody) -> None:
    """Refuse combinations that would ignore a field."""
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise invalid("max_tokens", "max_tokens and max_completion_tokens mean the same: send one.")
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("top_logprobs", 'top_logprobs need "logprobs": true.')
    refuse_stream_options(body)
    if body.parallel_tool_calls is not None and not body.tools:
        raise invalid("parallel_tool_calls", "parallel_tool_calls needs tools.")
    refuse_special_tokens(given=body.add_special_tokens)


def _prepared(body: ChatBody, tools: Sequence[Tool], state: ServerState) -> list[JobSpec]:
    tokenizer = state.llm.llm.tokenizer
    form, forced = form_of(body, body.response_format), forced_form(body)
    if form is not None and tools:
        field = form_field(body)
        raise invalid(field, f"{field} and tools contradict each other: send one of them.")
    params = params_of(
        body,
        state.settings,
        state.llm.llm.engine.sampling_defaults,
        max_tokens=body.max_tokens
        if body.max_completion_tokens is None
        else body.max_completion_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        form=forced or form,
    )
    ids = chat_ids(
        body.messages,
        tokenizer,
        tools=tools,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        chat_template_kwargs=body.chat_template_kwargs,
        limit=state.limit_of(body),
    )
    if body.prediction is not None:
        state.text_limit.check(body.prediction.text, "prediction")
    spec = JobSpec(
        ids,
        params,
        body.speculative_config,
        prediction=None if body.prediction is None else body.prediction.text,
        trace=body.wants_trace,
    )
    return [spec]


class _Answer:
    """The response to a request, whole or in pieces."""

    def __init__(self, body: ChatBody, tools: Sequence[Tool], run: Run, state: ServerState) -> None:
        self._body, self._tools, self._run, self._state = body, tools, run, state
        self._forced = forced_name(body)
        self._head = {
            "id": run.named("chatcmpl-"),
            "created": int(time.time()),
            "model": state.settings.model,
        }

    # Whole

    def whole(self, results: Sequence[RequestOutput]) -> dict[str, Any]:
        """The response, to be made off the loop."""
        outputs = all_outputs(results)
        response = {
            **self._head,
            "object": "chat.completion",
            "choices": [self._choice(output) for output in outputs],
            "usage": usage_of(self._run, outputs),
        }
        if self._body.prompt_logprobs is not None:
            response["prompt_logprobs"] = prompt_logprobs(results[0].prompt_logprobs)
        return response | self._prompt_tokens(results[0].prompt_token_ids)

    def _prompt_tokens(self, ids: Sequence[int]) -> dict[str, Any]:
        """The prompt's tokens, if the request wants them."""
        return {"prompt_token_ids": list(ids)} if self._body.return_token_ids else {}

    def _choice(self, output: CompletionOutput) -> dict[str, Any]:
        writer = self._writer()
        text, calls = writer.add(output.text, ends=True)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if calls:  # the text of a forced call is its arguments
            message["content"] = None if self._forced else text.strip() or None
            message["tool_calls"] = [call.as_dict() for call in calls]
        choice = {
            "index": output.index,
            "message": message,
            "logprobs": self._logprobs(output.logprobs),
            **stop_fields(output, "tool_calls" if calls and self._forced is None else None),
            **details_of(self._body.tokenleap, output.tokens, output, self._run.scope),
        }
        return choice | ({"token_ids": output.token_ids} if self._body.return_token_ids else {})

    def _writer(self) -> _Writer:
        one = self._body.parallel_tool_calls is False
        return _Writer(self._tools, self._forced, most=1 if one else None)

    def _logprobs(self, found: Any) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        return chat_logprobs(found or (), self._body.top_logprobs or 0, self._state.pieces)

    # In pieces

    async def events(self) -> AsyncIterator[bytes]:
        """The chunks of the response."""
        body = self._body
        head = {**self._head, "object": "chat.completion.chunk"}
        writers = [self._writer() for _ in range(body.n or 1)]
        prompt = self._prompt_tokens(self._run.requests[0].job.requests[0].prompt_ids)
        for index in range(len(writers)):
            delta = {"role": "assistant", "content": ""}
            choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            yield data({**head, "choices": [choice], **({} if index else prompt)})
        async for _, chunk in self._run.chunks():
            more = chunk_usage(body, self._run)
            make = partial(self._chunk_data, head, writers[chunk.index], chunk, more)
            traced = chunk.finished and body.tokenleap is not None
            large = traced or chunk.prompt_logprobs is not None
            yield await self._state.llm.off_loop(make) if large else make()
        for each in last_events(body, self._run, head):
            yield each

    def _chunk_data(
        self, head: dict[str, Any], writer: _Writer, chunk: StreamChunk, more: dict[str, Any]
    ) -> bytes:
        if chunk.prompt_logprobs is not None:
            more = {**more, "prompt_logprobs": prompt_logprobs(chunk.prompt_logprobs)}
        return data({**head, "choices": [self._chunk_choice(writer, chunk)], **more})

    def _chunk_choice(self, writer: _Writer, chunk: StreamChunk) -> dict[str, Any]:
        text, calls = writer.add(chunk.text, ends=chunk.finished)
        delta: dict[str, Any] = {"content": text} if text or not calls else {}
        if self._forced is not None:
            delta = {"tool_calls": [writer.forced_delta(text)]}
        elif calls:
            first = writer.num_calls - len(calls)
            numbered = enumerate(calls, first)
            delta["tool_calls"] = [{"index": i, **call.as_dict()} for i, call in numbered]
        made = writer.num_calls and self._forced is None
        choice = {
            "index": chunk.index,
            "delta": delta,
            "logprobs": self._logprobs(chunk.logprobs),
            **stop_fields(chunk.output, "tool_calls" if made else None),
            **details_of(self._body.tokenleap, chunk.tokens, chunk.output, self._run.scope),
        }
        if self._body.return_token_ids:
            choice["token_ids"] = [token.token_id for token in chunk.tokens]
        return choice


class _Writer:
    """One output's text, as text and calls.

    Args:
        tools: the functions that may be called.
        forced: the function whose arguments the whole text is; None if it is text or calls.
        most: most calls; more are left out.
    """

    def __init__(self, tools: Sequence[Tool], forced: str | None, most: int | None) -> None:
        self._most = most
        self._finder = CallFinder(tools)
        self._call = None if forced is None else Call(forced, "")
        self._told = False
        self.num_calls = 0

    def add(self, text: str, *, ends: bool) -> tuple[str, list[Call]]:
        """New text and calls.

        A forced call is complete at the end of a whole output; in pieces, see `forced_delta`.
        """
        if self._call is not None:
            calls = [Call(self._call.name, text, self._call.id)] if ends else []
            return text, calls
        given, calls = self._finder.add(text)
        if ends:
            rest, more = self._finder.finish()
            given, calls = given + rest, calls + more
        if self._most is not None:
            calls = calls[: self._most - self.num_calls]
        self.num_calls += len(calls)
        return given, calls

    def forced_delta(self, arguments: str) -> dict[str, Any]:
        """The next piece of a forced call's arguments; the first one has its name and id."""
        assert self._call is not None
        if self._told:
            return {"index": 0, "function": {"arguments": arguments}}
        self._told = True
        first = self._call.as_dict()
        return {"index": 0, **first, "function": {"name": self._call.name, "arguments": arguments}}
