"""`Job`: one prompt in the engine, its requests, and which outputs were reported to the end."""

from __future__ import annotations

from dataclasses import dataclass, field

from tokenleap.core.logprobs import PromptLogprobs
from tokenleap.engine.prompts import Prompt
from tokenleap.engine.sources import SourcePrompt
from tokenleap.outputs import RequestOutput, StreamChunk
from tokenleap.request import Request
from tokenleap.speculation import Strategy

__all__ = ["Job"]


@dataclass
class Job:
    """A prompt and its requests, one per output.

    Args:
        prompt: the prompt as the user gave it.
        requests: one request per output (`SamplingParams.n`).
        strategy: how these requests speculate; None is the `LLM`'s default.
        request_id: the id of a prompt that came through `LLMEngine.add_request`, else None.
        prompt_index: place of a prompt among those of its call.
    """

    prompt: Prompt
    requests: list[Request]
    strategy: Strategy | None
    request_id: str | None = None
    prompt_index: int = 0
    _told_prompt: bool = False
    _reported: set[int] = field(default_factory=set)  # indices of outputs taken to the end

    @property
    def finished(self) -> bool:
        """Whether all outputs have ended and will not change any more."""
        return all(request.closed for request in self.requests)

    @property
    def all_taken(self) -> bool:
        """Whether the last chunk of every output was taken."""
        return not self._unreported()

    def take(self) -> list[StreamChunk]:
        """The new tokens of each output since the last call.

        Another thread may run a step at the same time.
        """
        chunks = []
        for request in self._unreported():
            # Read first: if it is True, no tokens follow those that are taken now.
            closed = request.closed
            tokens = request.take()
            if not tokens and not closed:
                continue
            output = request.output() if closed else None
            chunks.append(
                StreamChunk(
                    tokens,
                    output,
                    self.request_id,
                    request.index,
                    self.prompt_index,
                    self._prompt_logprobs(request),
                )
            )
            if closed:
                self._reported.add(request.index)
        return chunks

    def _prompt_logprobs(self, request: Request) -> PromptLogprobs | None:
        """Those of the prompt, for the first chunk of the request that has them."""
        if request.prompt_scores is None or self._told_prompt:
            return None
        self._told_prompt = True
        return request.prompt_logprobs

    def result(self) -> RequestOutput:
        """All outputs with the tokens generated so far."""
        request, outputs = self.requests[0], [request.output() for request in self.requests]
        if request.source is None:
            prompt = self.prompt if isinstance(self.prompt, str) else None
            return RequestOutput(
                prompt,
                request.prompt_ids,
                outputs,
                self.request_id,
                prompt_logprobs=request.prompt_logprobs,
            )
        given = SourcePrompt.of(self.prompt)
        return RequestOutput(
            given.decoder_text,
            request.prompt_ids,
            outputs,
            self.request_id,
            encoder_prompt=given.text,
            encoder_prompt_token_ids=request.source.tokens,
            prompt_logprobs=request.prompt_logprobs,
        )

    def _unreported(self) -> list[Request]:
        return [r for r in self.requests if r.index not in self._reported]
