"""`Job`: a prompt on its way through the engine, and what has been reported of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from foretoken.engine.prompts import Prompt
from foretoken.outputs import RequestOutput, StreamChunk
from foretoken.request import Request
from foretoken.speculation import Strategy

__all__ = ["Job"]


@dataclass
class Job:
    """A prompt and the requests of its outputs.

    Args:
        prompt: as it was given.
        requests: one per output.
        strategy: of these requests; None for the default.
        request_id: of prompts that were added by hand.
    """

    prompt: Prompt
    requests: list[Request]
    strategy: Strategy | None
    request_id: str | None = None
    _reported: set[int] = field(default_factory=set)  # outputs whose last chunk has been taken

    @property
    def finished(self) -> bool:
        """Whether all outputs have ended and nothing about them changes any more."""
        return all(request.closed for request in self.requests)

    @property
    def has_news(self) -> bool:
        """Whether `take` has something to give, or never will again."""
        return self.finished or any(r.has_fresh or r.closed for r in self._open())

    @property
    def all_taken(self) -> bool:
        """Whether the last chunks of all outputs have been taken."""
        return not self._open()

    def take(self) -> list[StreamChunk]:
        """What is new of each output since the last call; another thread may be stepping."""
        chunks = []
        for request in self._open():
            closed = request.closed  # before the tokens: the last chunk has all that are left
            tokens = request.take()
            if not tokens and not closed:
                continue
            output = request.output() if closed else None
            chunks.append(StreamChunk(tokens, output, self.request_id, request.index))
            if closed:
                self._reported.add(request.index)
        return chunks

    def result(self) -> RequestOutput:
        """All outputs, as far as they have come."""
        prompt = self.prompt if isinstance(self.prompt, str) else None
        outputs = [request.output() for request in self.requests]
        return RequestOutput(prompt, self.requests[0].prompt_ids, outputs, self.request_id)

    def _open(self) -> list[Request]:
        return [r for r in self.requests if r.index not in self._reported]
