"""`/v1/completions`: continues a prompt."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from functools import partial
from itertools import count
from typing import Any

from fastapi import APIRouter, Request, Response
from transformers import PreTrainedTokenizerBase

from tokenleap.core.detokenizer import Detokenizer
from tokenleap.core.distribution import TokenLogprobs
from tokenleap.core.params import SamplingParams
from tokenleap.engine.jobs import JobSpec
from tokenleap.outputs import CompletionOutput, RequestOutput, StreamChunk, StreamedToken
from tokenleap.serve.body import APIError, invalid, read, takes
from tokenleap.serve.chat import chat_ids, text_ids
from tokenleap.serve.fields import (
    OF_RESPONSES,
    CompletionBody,
    Message,
    ResponseBody,
    SamplingBody,
    form_of,
    params_of,
)
from tokenleap.serve.running import (
    Answer,
    Choices,
    Run,
    ServerState,
    all_outputs,
    answered,
    completion_logprobs,
    event,
    new_id,
    prompt_logprobs,
    refuse_stream_options,
    state_of,
    usage_of,
)

router = APIRouter()

DEFAULT_MAX_TOKENS = 16


@router.post("/v1/completions", **takes(CompletionBody))
async def create_completion(request: Request) -> Response:
    """Continue one prompt or several."""
    state = state_of(request)
    body = await read(request, CompletionBody, state.settings)
    prompts = _prompts(body, state)
    _check(body)
    return await answered(
        request,
        body,
        partial(_prepared, body, prompts, state),
        lambda run: _Answer(body, run, state, prompts),
        prompt_field="prompt",
        sequences=len(prompts) * (body.n or 1),
    )


def _prompts(body: CompletionBody, state: ServerState) -> list[str | list[int]]:
    given: Any = body.prompt
    listed = [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else given
    most = state.settings.max_prompts
    if not 1 <= len(listed) <= most:
        raise invalid("prompt", f"prompt: 1 to {most} prompts on this server, got {len(listed)}.")
    return list(listed)


def _check(body: CompletionBody) -> None:
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise invalid("best_of", "best_of: it must be n here: choose among the outputs yourself.")
    refuse_stream_options(body)
    first = body.prompt if isinstance(body.prompt, str) else body.prompt[0]
    if body.add_special_tokens is not None and not isinstance(first, str):
        raise invalid(
            "add_special_tokens", "add_special_tokens is for text, and these are token ids."
        )


def _prepared(
    body: CompletionBody, prompts: Sequence[str | list[int]], state: ServerState
) -> list[JobSpec]:
    llm = state.llm.llm
    special = body.add_special_tokens is not False
    limit = state.limit_of(body)

    def ids(prompt: str | list[int]) -> str | list[int]:
        if isinstance(prompt, list):
            return prompt
        if llm.engine.target.reads_source and special:
            limit.check(prompt)
            return prompt
        return text_ids(prompt, llm.tokenizer, add_special_tokens=special, limit=limit)

    params = params_of(
        body,
        state.settings,
        llm.engine.sampling_defaults,
        max_tokens=body.max_tokens,
        most=DEFAULT_MAX_TOKENS,
        logprobs=body.logprobs,
        form=form_of(body, body.response_format),
    )
    if body.echo and body.logprobs is not None and params.prompt_logprobs is None:
        params = SamplingParams.model_validate(
            {**params.model_dump(exclude_unset=True), "prompt_logprobs": body.logprobs}
        )
    config, trace = body.speculative_config, body.wants_trace
    return [JobSpec(ids(prompt), params, config, trace=trace) for prompt in prompts]


class _Answer(Choices):
    def __init__(
        self,
        body: CompletionBody,
        run: Run,
        state: ServerState,
        prompts: Sequence[str | list[int]],
    ) -> None:
        super().__init__(body, run, state)
        self._prompts = prompts
        self._head = {
            "id": run.named("cmpl-"),
            "object": "text_completion",
            "created": int(time.time()),
            "model": state.settings.model,
        }
        self._lengths: dict[int, int] = {}  # of the text of each choice that was sent
        self._echoes: dict[int, tuple[list[int], list[str]]] = {}  # of each prompt

    def whole(self, results: Sequence[RequestOutput]) -> dict[str, Any]:
        choices = [
            self._choice(index, output.index, output.tokens, output)
            for index, result in enumerate(results)
            for output in result.outputs
        ]
        return {
            **self._head,
            "choices": choices,
            "usage": usage_of(self._run, all_outputs(results)),
        }

    def _chunk_data(self, index: int, chunk: StreamChunk) -> dict[str, Any]:
        return {"choices": [self._choice(index, chunk.index, chunk.tokens, chunk.output)]}

    def _is_large(self, index: int, chunk: StreamChunk) -> bool:
        of_prompt = self._body.echo or self._body.prompt_logprobs is not None
        begins = self._place(index, chunk.index) not in self._lengths
        return super()._is_large(index, chunk) or (of_prompt and begins)

    def _place(self, prompt_index: int, index: int) -> int:
        """The number of a choice among those of all prompts."""
        return prompt_index * (self._body.n or 1) + index

    def _choice(
        self,
        prompt_index: int,
        index: int,
        tokens: Sequence[StreamedToken],
        output: CompletionOutput | None,
    ) -> dict[str, Any]:
        """A choice with these tokens; the first piece has what belongs to the prompt."""
        body, request = self._body, self._run.requests[prompt_index].job.requests[0]
        place = self._place(prompt_index, index)
        begins = place not in self._lengths
        text, logprobs = "".join(token.text for token in tokens), None
        offset = self._lengths.get(place, 0)
        echoed = self._echoed(prompt_index) if body.echo and begins else ([], [])
        prompt_ids, prompt_texts = echoed
        if body.logprobs is not None:
            known: list[TokenLogprobs | None] = [token.logprobs for token in tokens]
            if prompt_ids:
                known = [None, *(request.prompt_scores or ()), *known]
            ids = [*prompt_ids, *(token.token_id for token in tokens)]
            texts = [*prompt_texts, *(token.text for token in tokens)]
            logprobs = completion_logprobs(known, ids, texts, self._state.pieces, offset)
        text = "".join(prompt_texts) + text
        self._lengths[place] = offset + len(text)
        choice: dict[str, Any] = {
            "index": place,
            "text": text,
            "logprobs": logprobs,
            **self._end(tokens, output),
        }
        if body.return_token_ids and begins:
            choice["prompt_token_ids"] = list(request.prompt_ids)
        if body.prompt_logprobs is not None and begins:
            choice["prompt_logprobs"] = prompt_logprobs(request.prompt_logprobs)
        return choice

    def _echoed(self, prompt_index: int) -> tuple[list[int], list[str]]:
        """Ids of the prompt, and texts that make its text together; made once for all outputs."""
        if prompt_index not in self._echoes:
            self._echoes[prompt_index] = self._echo(prompt_index)
        return self._echoes[prompt_index]

    def _echo(self, prompt_index: int) -> tuple[list[int], list[str]]:
        request = self._run.requests[prompt_index].job.requests[0]
        given, ids = self._prompts[prompt_index], list(request.prompt_ids)
        tokenizer, most = self._state.llm.llm.tokenizer, self._body.truncate_prompt_tokens
        if not isinstance(given, str):
            return ids, _texts_of(ids, tokenizer, skip_special_tokens=False)
        if most is not None and len(ids) >= most:  # only its end was read
            return ids, _texts_of(ids, tokenizer, skip_special_tokens=True)
        # The text may have special tokens itself, or the tokenizer has put them in.
        for skip in (True, False):
            texts = _texts_of(ids, tokenizer, skip_special_tokens=skip)
            if "".join(texts) == given:
                return ids, texts
        return ids, _cut(given, texts)


def _texts_of(
    ids: Sequence[int], tokenizer: PreTrainedTokenizerBase | None, *, skip_special_tokens: bool
) -> list[str]:
    """The text that each token adds; a character of several tokens belongs to the last one."""
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
    texts = [detokenizer.add(token) for token in ids]
    texts[-1] += detokenizer.finish()
    return texts


def _cut(whole: str, texts: Sequence[str]) -> list[str]:
    """Cut a text into as many pieces as there are tokens, where they have it in common."""
    cut, position = [], 0
    for text in texts[:-1]:
        piece = text if whole.startswith(text, position) else ""
        cut.append(piece)
        position += len(piece)
    return [*cut, whole[position:]]


# `/v1/responses`: text in, text out. Nothing is stored, so no response can be continued by id.


_CUT = {"length": "max_output_tokens", "abort": "cancelled"}
"""Why an output is not complete, by its finish reason."""


@router.post("/v1/responses", **takes(ResponseBody))
async def create_response(request: Request) -> Response:
    """Answer a text or a conversation."""
    state = state_of(request)
    body = await read(request, ResponseBody, state.settings)
    return await answered(
        request,
        body,
        partial(_prepared_response, body, state),
        lambda run: _ResponseAnswer(body, run, state),
        prompt_field="input",
    )


def _messages(body: ResponseBody) -> list[Message]:
    given: list[Message] = []
    if body.instructions is not None:
        given.append(Message(role="system", content=body.instructions))
    if isinstance(body.input, str):
        return [*given, Message(role="user", content=body.input)]
    return [*given, *(Message(role=each.role, content=each.content) for each in body.input)]


def _prepared_response(body: ResponseBody, state: ServerState) -> list[JobSpec]:
    text = dict(body.text or {})
    response_format = text.pop("format", None)
    if text.pop("verbosity", None) is not None or text:
        raise invalid("text", "text: only 'format' is supported.")
    if response_format is not None and not isinstance(response_format, dict):
        raise invalid("text", "text: format must be an object.")
    fields = SamplingBody(**{name: getattr(body, name) for name in ("model", *OF_RESPONSES)})
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


class _ResponseAnswer(Answer):
    def __init__(self, body: ResponseBody, run: Run, state: ServerState) -> None:
        super().__init__(body, run, state)
        self._item = new_id("msg_")
        self._head: dict[str, Any] = {
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
