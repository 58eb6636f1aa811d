"""`LLMEngine`: requests that come and go while others run, in the words of vLLM's `LLMEngine`.

    engine = LLM("smollm2-135m").engine
    engine.add_request("Hello", SamplingParams(temperature=0))
    while engine.has_unfinished_requests():
        for output in engine.step():
            print(output.request_id, output.text, output.finished)

It shares its steps with `LLM.generate` and with open streams of the same `LLM`: whoever runs a step
advances everyone's requests.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from foretoken.config import SamplingParams
from foretoken.engine import Engine, Speculation
from foretoken.errors import ConfigError
from foretoken.outputs import RequestOutput, StreamChunk
from foretoken.prompts import Prompt
from foretoken.request import Request
from foretoken.speculative import SpeculativeConfig

__all__ = ["LLMEngine", "Speculative", "result"]

Speculative: TypeAlias = SpeculativeConfig | Mapping[str, Any] | None
"""How one request guesses; None takes the `LLM`'s own way."""


@dataclass
class _Group:
    """The requests of one prompt, and what has been reported of them."""

    prompt: Prompt
    requests: list[Request]
    reported: tuple[tuple[int, bool], ...] = ()

    def progress(self) -> tuple[tuple[int, bool], ...]:
        """Tokens of each output, and whether it has ended."""
        return tuple((len(r.token_ids) - len(r.prompt_ids), r.finished) for r in self.requests)

    @property
    def finished(self) -> bool:
        return all(request.finished for request in self.requests)


class LLMEngine:
    """Continuous batching by hand; made by `LLM`, as `LLM.engine`.

    Args:
        engine: runs the requests.
        make_requests: from a prompt, its parameters and whether to trace everything.
        make_speculation: from a configuration.
    """

    def __init__(
        self,
        engine: Engine,
        make_requests: Callable[[Prompt, SamplingParams, bool], list[Request]],
        make_speculation: Callable[[Speculative], Speculation | None],
    ) -> None:
        self._engine = engine
        self._make_requests = make_requests
        self._make_speculation = make_speculation
        self._groups: dict[int, _Group] = {}
        self._next_id = 0

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        speculative_config: Speculative = None,
        *,
        trace: bool = False,
    ) -> int:
        """Queue a prompt; it joins the others in one of the next steps.

        Args:
            prompt: text, token ids or a conversation.
            params: sampling parameters; None takes the defaults.
            speculative_config: how this request guesses; None as the `LLM` does. Its acceptance
                rule is the `LLM`'s.
            trace: see `LLM.generate`.

        Returns:
            The request's id, for `abort` and in `RequestOutput.request_id`.

        Raises:
            PromptError: the prompt is empty, too long, or has ids outside the vocabulary.
            ConfigError: parameters or configuration are out of range.
            CompatibilityError: the drafter does not fit the model or the rule.
        """
        requests = self._make_requests(prompt, params or SamplingParams(), trace)
        speculation = self._make_speculation(speculative_config)
        for request in requests:
            self._engine.add(request, speculation)
        request_id, self._next_id = self._next_id, self._next_id + 1
        self._groups[request_id] = _Group(prompt, requests)
        return request_id

    def step(self) -> list[RequestOutput]:
        """Advance everything by one step.

        Returns:
            The requests that have new tokens or have ended, as far as they have come; each appears
            with `finished` once, and is then forgotten.

        Raises:
            ForetokenError: a request does not fit into memory all by itself; it has been ended and
                will be in the next step's list, and the others can go on.
        """
        if self._engine.busy:
            self._engine.step()
        changed = []
        for request_id, group in list(self._groups.items()):
            progress = group.progress()
            if progress != group.reported and any(any(state) for state in progress):
                group.reported = progress
                changed.append(result(group.prompt, group.requests, request_id))
            if group.finished:
                del self._groups[request_id]
        return changed

    def has_unfinished_requests(self) -> bool:
        """Whether a further `step` has something to do or to report."""
        return bool(self._groups)

    def abort(self, request_ids: int | Iterable[int]) -> None:
        """Give these requests up, wherever they are: they free their place and are not reported.

        Those that have ended already stay as they are.

        Raises:
            ConfigError: no request ever had this id.
        """
        for request_id in [request_ids] if isinstance(request_ids, int) else list(request_ids):
            if not 0 <= request_id < self._next_id:
                raise ConfigError(f"request_id: no request has the id {request_id}.")
            group = self._groups.pop(request_id, None)
            if group is not None:
                self._engine.abort(group.requests)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        speculative_config: Speculative = None,
        *,
        trace: bool = False,
    ) -> Generator[StreamChunk, None, None]:
        """See `LLM.stream`; any number of streams may be open at once."""
        params = params or SamplingParams()
        if params.n != 1:
            raise ConfigError(f"n: a stream has one output, got {params.n}.")
        (request,) = self._make_requests(prompt, params, trace)
        return self._stream(request, self._make_speculation(speculative_config))

    def _stream(
        self, request: Request, speculation: Speculation | None
    ) -> Generator[StreamChunk, None, None]:
        try:
            self._engine.add(request, speculation)
            # Another stream's step, or a call of `generate`, may have advanced this request.
            while (tokens := request.take()) or not request.finished:
                if tokens:
                    yield StreamChunk(tokens, request.output() if request.finished else None)
                else:
                    self._engine.step()
        finally:
            self._engine.abort([request])


def result(prompt: Prompt, requests: list[Request], request_id: int | None = None) -> RequestOutput:
    """All outputs of a prompt, as far as they have come."""
    return RequestOutput(
        prompt if isinstance(prompt, str) else None,
        requests[0].prompt_ids,
        [request.output() for request in requests],
        request_id,
    )
