"""`/v1/completions`, `/v1/responses` and `/v1/embeddings`: what is made of plain prompts."""

from __future__ import annotations

import uuid
from base64 import b64encode
from collections.abc import AsyncIterator, Sequence
from itertools import count
from typing import Any

from fastapi import APIRouter, Request, Response
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from tokenleap.core.detokenizer import Detokenizer
from tokenleap.core.distribution import TokenLogprobs
from tokenleap.engine.jobs import JobSpec
from tokenleap.errors import RequestError, told
from tokenleap.models.pooling import shortened
from tokenleap.outputs import CompletionOutput, RequestOutput, StreamChunk, StreamedToken
from tokenleap.serve.body import APIError, invalid, takes
from tokenleap.serve.chat import chat_ids, text_ids
from tokenleap.serve.fields import (
    OF_RESPONSES,
    CompletionBody,
    EmbeddingBody,
    Message,
    ResponseBody,
    SamplingBody,
    TextOptions,
    form_of,
    params_of,
)
from tokenleap.serve.logprobs import completion_logprobs, prompt_logprobs
from tokenleap.serve.running import (
    Answer,
    Choices,
    Run,
    ServerState,
    answered,
    event,
    refuse_stream_options,
)
from tokenleap.serve.settings import Settings

router = APIRouter()

DEFAULT_MAX_TOKENS = 16


@router.post("/v1/completions", **takes(CompletionBody, prompt="The sky is", max_tokens=16))
async def create_completion(request: Request) -> Response:
    """Continue one prompt or several."""
    return await answered(request, CompletionBody, _Completion)


class _Completion(Choices[CompletionBody]):
    prompt_field = "prompt"
    prefix = "cmpl-"
    object = "text_completion"

    def __init__(self, body: CompletionBody, state: ServerState) -> None:
        self._prompts = listed_prompts("prompt", body.prompt, state.settings)
        _check(body)
        super().__init__(body, state, len(self._prompts) * (body.n or 1))
        self._lengths: dict[int, int] = {}  # of the text of each choice that was sent
        self._echoes: dict[str | tuple[int, ...], tuple[list[int], list[str]]] = {}

    def prepare(self) -> list[JobSpec]:
        body, defaults = self.body, self.state.llm.llm.engine.sampling_defaults
        params = params_of(
            body,
            self.state.settings,
            defaults,
            max_tokens=body.max_tokens,
            most=DEFAULT_MAX_TOKENS,
            logprobs=body.logprobs,
            form=form_of(body, body.response_format),
        )
        if body.echo and body.logprobs is not None and params.prompt_logprobs is None:
            params = params.model_copy(update={"prompt_logprobs": body.logprobs})
        config, trace = body.speculative_config, body.wants_trace
        return [JobSpec(self._ids(each), params, config, trace=trace) for each in self._prompts]

    def _ids(self, prompt: str | list[int]) -> str | list[int]:
        if isinstance(prompt, list):
            return prompt
        llm, limit = self.state.llm.llm, self.state.limit_of(self.body)
        special = self.body.add_special_tokens is not False
        if llm.engine.target.reads_source and special:
            limit.check(prompt)
            return prompt
        return text_ids(prompt, llm.tokenizer, add_special_tokens=special, limit=limit)

    @property
    def _of_prompts(self) -> bool:
        """Whether the answer has what belongs to prompts, too."""
        return bool(self.body.echo) or self.body.prompt_logprobs is not None

    def is_small(self, results: Sequence[RequestOutput]) -> bool:
        return super().is_small(results) and not self._of_prompts

    def is_large(self, prompt: int, chunk: StreamChunk) -> bool:
        begins = self._place(prompt, chunk.index) not in self._lengths
        return super().is_large(prompt, chunk) or (self._of_prompts and begins)

    def _place(self, prompt: int, index: int) -> int:
        """The number of a choice among those of all prompts."""
        return prompt * (self.body.n or 1) + index

    def choice(
        self,
        prompt: int,
        index: int,
        tokens: Sequence[StreamedToken],
        output: CompletionOutput | None,
    ) -> dict[str, Any]:
        """The first piece has what belongs to the prompt."""
        body, request = self.body, self.run.requests[prompt].job.requests[0]
        place = self._place(prompt, index)
        begins, offset = place not in self._lengths, self._lengths.get(place, 0)
        prompt_ids, prompt_texts = self._echoed(prompt) if body.echo and begins else ([], [])
        texts = [*prompt_texts, *(token.text for token in tokens)]
        logprobs = None
        if body.logprobs is not None:
            known: list[TokenLogprobs | None] = [token.logprobs for token in tokens]
            if prompt_ids:
                scores = request.prompt_scores or []  # fewer if the request was ended before
                unknown = [None] * (len(prompt_ids) - 1 - len(scores))
                known = [None, *scores, *unknown, *known]
            ids = [*prompt_ids, *(token.token_id for token in tokens)]
            logprobs = completion_logprobs(known, ids, texts, self.state.pieces, offset)
        text = "".join(texts)
        self._lengths[place] = offset + len(text)
        choice: dict[str, Any] = {
            "index": place,
            "text": text,
            "logprobs": logprobs,
            **self.end(tokens, output),
        }
        if body.return_token_ids and begins:
            choice["prompt_token_ids"] = list(request.prompt_ids)
        if body.prompt_logprobs is not None and begins:
            choice["prompt_logprobs"] = prompt_logprobs(request.prompt_logprobs)
        return choice

    def _echoed(self, prompt: int) -> tuple[list[int], list[str]]:
        """Ids of the prompt, and texts that make its text together; made once for all outputs."""
        given = self._prompts[prompt]
        key = given if isinstance(given, str) else tuple(given)  # of prompts that are alike
        if key not in self._echoes:
            self._echoes[key] = self._echo(prompt)
        return self._echoes[key]

    def _echo(self, prompt: int) -> tuple[list[int], list[str]]:
        request = self.run.requests[prompt].job.requests[0]
        given, ids = self._prompts[prompt], list(request.prompt_ids)
        tokenizer, most = self.state.llm.llm.tokenizer, self.body.truncate_prompt_tokens
        if not isinstance(given, str):
            return ids, _texts_of(ids, tokenizer, skip_special_tokens=False)
        # The text may have special tokens itself, or the tokenizer has put them in.
        without = _texts_of(ids, tokenizer, skip_special_tokens=True)
        if "".join(without) == given:
            return ids, without
        whole = _texts_of(ids, tokenizer, skip_special_tokens=False)
        if "".join(whole) == given:
            return ids, whole
        if most is not None and (most < 0 or len(ids) >= most):  # only its end was read
            return ids, without
        return ids, _cut(given, whole)


def listed_prompts(field: str, given: Any, settings: Settings) -> list[str | list[int]]:
    """The prompts of a field that may have one or several, within this server's limit."""
    listed = [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else given
    most = settings.max_prompts
    if not 1 <= len(listed) <= most:
        raise invalid(field, f"{field}: 1 to {most} prompts on this server, got {len(listed)}.")
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


@router.post("/v1/responses", **takes(ResponseBody, input="Hello", max_output_tokens=64))
async def create_response(request: Request) -> Response:
    """Answer a text or a conversation."""
    return await answered(request, ResponseBody, _Response)


def _messages(body: ResponseBody) -> list[Message]:
    given: list[Message] = []
    if body.instructions is not None:
        given.append(Message(role="system", content=body.instructions))
    if isinstance(body.input, str):
        return [*given, Message(role="user", content=body.input)]
    return [*given, *(Message(role=each.role, content=each.content) for each in body.input)]


class _Response(Answer[ResponseBody]):
    prompt_field = "input"
    prefix = "resp_"

    def prepare(self) -> list[JobSpec]:
        body, llm = self.body, self.state.llm.llm
        fields = SamplingBody(**{name: getattr(body, name) for name in ("model", *OF_RESPONSES)})
        params = params_of(
            fields,
            self.state.settings,
            llm.engine.sampling_defaults,
            max_tokens=body.max_output_tokens,
            logprobs=None,
            form=form_of(fields, (body.text or TextOptions()).format, "text"),
        )
        ids = chat_ids(_messages(body), llm.tokenizer, limit=self.state.text_limit)
        return [JobSpec(ids, params, body.speculative_config)]

    def begin(self, run: Run) -> None:
        super().begin(run)
        body, self._item = self.body, f"msg_{uuid.uuid4().hex}"
        params = run.requests[0].job.requests[0].params
        self._head: dict[str, Any] = {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "model": self.state.settings.model,
            "instructions": body.instructions,
            "metadata": body.metadata or {},
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "store": False,
            "temperature": params.temperature,
            "text": {"format": (body.text or TextOptions()).format or {"type": "text"}},
            "tool_choice": "none",
            "tools": [],
            "top_p": params.top_p,
            "max_output_tokens": body.max_output_tokens,
        }

    def whole(self, results: Sequence[RequestOutput]) -> dict[str, Any]:
        return self._ended(results[0].outputs[0])

    def _ended(self, output: CompletionOutput) -> dict[str, Any]:
        usage, cut = self.run.usage(), _CUT.get(output.finish_reason or "")
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
            async for _, chunk in self.run.chunks():
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


# `/v1/embeddings`: vectors in place of texts, if the model's folder says how they are made.


@router.post("/v1/embeddings", **takes(EmbeddingBody, input="Hello"))
async def create_embeddings(request: Request) -> Response:
    """Turn one text or several into vectors."""
    return await answered(request, EmbeddingBody, _Embeddings)


class _Embeddings(Answer[EmbeddingBody]):
    prompt_field = "input"
    prefix = "embd-"

    def __init__(self, body: EmbeddingBody, state: ServerState) -> None:
        self._inputs = listed_prompts("input", body.input, state.settings)
        super().__init__(body, state, len(self._inputs))

    def prepare(self) -> list[JobSpec]:
        pooler, most = self.state.llm.llm.engine.pooler, self.body.dimensions
        if most is not None and most > pooler.size:
            raise invalid("dimensions", f"dimensions: at most {pooler.size}, got {most}.")
        return [JobSpec.embeds(self._ids(each)) for each in self._inputs]

    def _ids(self, given: str | list[int]) -> list[int]:
        if isinstance(given, list):
            return given
        tokenizer, limit = self.state.llm.llm.tokenizer, self.state.text_limit
        return text_ids(given, tokenizer, add_special_tokens=True, limit=limit)

    def whole(self, results: Sequence[RequestOutput]) -> dict[str, Any]:
        try:
            vectors = [request.job.embedding for request in self.run.requests]
        except RequestError as error:  # the model overflows
            raise APIError(500, told(error)) from error
        given = base64_of if self.body.encoding_format == "base64" else Tensor.tolist
        usage = self.run.usage()
        return {
            "object": "list",
            "data": [
                {"object": "embedding", "index": index, "embedding": given(vector)}
                for index, vector in enumerate(shortened(vectors, self.body.dimensions))
            ],
            "model": self.state.settings.model,
            "usage": {name: usage[name] for name in ("prompt_tokens", "total_tokens")},
        }

    def events(self) -> AsyncIterator[bytes]:
        raise AssertionError("embeddings are not streamed")


def base64_of(vector: Tensor) -> str:
    """The numbers as 32-bit little-endian floats, as OpenAI's API has them."""
    return b64encode(vector.numpy().astype("<f4").tobytes()).decode()
