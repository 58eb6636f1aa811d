"""`/v1/responses`: text in, text out. Nothing is stored, so no response can be continued by id."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from functools import partial
from itertools import count
from typing import Any

from fastapi import APIRouter, Request, Response

from tokenleap.core.params import SamplingParams
from tokenleap.engine.job_spec import JobSpec
from tokenleap.outputs import CompletionOutput, RequestOutput
from tokenleap.serve.answers import responded
from tokenleap.serve.body import read
from tokenleap.serve.chat_prompt import chat_ids
from tokenleap.serve.errors import APIError, invalid
from tokenleap.serve.events import event
from tokenleap.serve.fields import ResponseBody, SamplingBody
from tokenleap.serve.messages import Message
from tokenleap.serve.rendering import new_id, usage_of
from tokenleap.serve.running import Run, started
from tokenleap.serve.sampling import form_of, params_of
from tokenleap.serve.schema import takes
from tokenleap.serve.state import ServerState, state_of

__all__ = ["router"]

router = APIRouter()

_CUT = {"length": "max_output_tokens", "abort": "cancelled"}
"""Why an output is not complete, by its finish reason."""


@router.post("/v1/responses", **takes(ResponseBody))
async def create_response(request: Request) -> Response:
    """Answer a text or a conversation."""
    state = state_of(request)
    body = await read(request, ResponseBody, state.settings)
    run = await started(request, state, body, 1, partial(_prepared, body, state), "input")
    answer = _Answer(body, run, state)
    return await responded(request, state, run, answer, stream=body.stream)


def _messages(body: ResponseBody) -> list[Message]:
    given: list[Message] = []
    if body.instructions is not None:
        given.append(Message(role="system", content=body.instructions))
    if isinstance(body.input, str):
        return [*given, Message(role="user", content=body.input)]
    return [*given, *(Message(role=each.role, content=each.content) for each in body.input)]


def _prepared(body: ResponseBody, state: ServerState) -> list[JobSpec]:
    text = dict(body.text or {})
    response_format = text.pop("format", None)
    if text.pop("verbosity", None) is not None or text:
        raise invalid("text", "text: only 'format' is supported.")
    if response_format is not None and not isinstance(response_format, dict):
        raise invalid("text", "text: format must be an object.")
    same = ("model", "temperature", "top_p", "seed", "top_k")
    fields = SamplingBody(**{name: getattr(body, name) for name in same})
    params: SamplingParams = params_of(
        fields,
        state.settings,
        state.llm.llm.engine.sampling_defaults,
        max_tokens=body.max_output_tokens,
        logprobs=None,
        form=form_of(fields, response_format, "text"),
    )
    ids = chat_ids(_messages(body), state.llm.llm.tokenizer, limit=state.text_limit)
    return [JobSpec(ids, params, body.speculative_config)]


class _Answer:
    """The response to a request, whole or as events."""

    def __init__(self, body: ResponseBody, run: Run, state: ServerState) -> None:
        self._body, self._run = body, run
        self._item = new_id("msg_")
        self._head = {
            "id": run.named("resp_"),
            "object": "response",
            "created_at": int(time.time()),
            "model": state.settings.model,
            "instructions": body.instructions,
            "metadata": {},
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "store": False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": body.text or {"format": {"type": "text"}},
            "tool_choice": "none",
            "tools": [],
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "max_output_tokens": body.max_output_tokens,
        }

    def whole(self, results: Sequence[RequestOutput]) -> dict[str, Any]:
        """The response when it has ended."""
        return self._ended(results[0].outputs[0])

    def _ended(self, output: CompletionOutput) -> dict[str, Any]:
        usage, cut = usage_of(self._run, [output]), _CUT.get(output.finish_reason or "")
        return {
            **self._head,
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": cut} if cut else None,
            "error": None,
            "output": [self._message(output.text, "incomplete" if cut else "completed")],
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": usage["prompt_tokens_details"],
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
            },
        }

    def _begun(self) -> dict[str, Any]:
        return {
            **self._head,
            "status": "in_progress",
            "incomplete_details": None,
            "error": None,
            "output": [],
            "usage": None,
        }

    def _message(self, text: str | None, status: str) -> dict[str, Any]:
        content = [] if text is None else [_part(text)]
        return {
            "id": self._item,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": content,
        }

    async def events(self) -> AsyncIterator[bytes]:
        """The events of the response."""
        numbers = count()

        def made(kind: str, **fields: Any) -> bytes:
            return event({"type": kind, "sequence_number": next(numbers), **fields})

        place = {"item_id": self._item, "output_index": 0, "content_index": 0}
        yield made("response.created", response=self._begun())
        yield made("response.in_progress", response=self._begun())
        item = self._message(None, "in_progress")
        yield made("response.output_item.added", output_index=0, item=item)
        yield made("response.content_part.added", **place, part=_part(""))
        output: CompletionOutput | None = None
        try:
            async for _, chunk in self._run.chunks():
                output = chunk.output
                if chunk.text:
                    yield made("response.output_text.delta", **place, delta=chunk.text, logprobs=[])
        except APIError as error:
            failure = {"code": "server_error", "message": error.message}
            failed = {**self._begun(), "status": "failed", "error": failure}
            yield made("response.failed", response=failed)
            return
        assert output is not None, "the last chunk has the output"
        yield made("response.output_text.done", **place, text=output.text, logprobs=[])
        yield made("response.content_part.done", **place, part=_part(output.text))
        whole = self._ended(output)
        yield made("response.output_item.done", output_index=0, item=whole["output"][0])
        yield made(f"response.{whole['status']}", response=whole)


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
