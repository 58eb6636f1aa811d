"""The scheduler: requests join, advance together step by step, and leave.

Continuous batching (Yu et al., "Orca"): a step admits what fits, computes a chunk of the prompts
that are not computed yet, and advances all others by one `decode.step`. Prompts come in order of
arrival, at most `max_num_batched_tokens` a step, so that a long one does not stall the others; they
have passes of their own, which read the weights once more and need no padding. When the KV slab is
full the youngest request gives up its row, waits first in line, and is computed again (vLLM's
preemption by recomputation). None of this is visible in the output: by invariant 7 the bits do not
depend on chunks, neighbours or rows.

`LLMEngine` makes the requests, refuses invalid ones, and calls the scheduler.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from foretoken.decode import Outcome, step
from foretoken.engine.prefix_cache import PrefixCache
from foretoken.errors import RequestError
from foretoken.request import Request
from foretoken.runtime.kv_slab import OverBudget, SlabFull, is_out_of_memory
from foretoken.runtime.target import Target
from foretoken.speculation import Speculation, Strategy

__all__ = ["Scheduler"]


class Scheduler:
    """Runs requests on one target.

    Args:
        target: the model being accelerated.
        speculation: how its requests speculate.
        max_num_seqs: most requests in one step.
        max_num_batched_tokens: most prompt tokens computed in one step.
        prefix_cache: KV of earlier prompts; None computes every prompt in full.
    """

    def __init__(
        self,
        target: Target,
        speculation: Speculation,
        max_num_seqs: int = 16,
        *,
        max_num_batched_tokens: int = 512,
        prefix_cache: PrefixCache | None = None,
    ) -> None:
        self._target = target
        self._speculation = speculation
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._prefixes = prefix_cache
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []  # in order of admission; also those being prefilled
        self._hidden: dict[int, list[Mapping[int, Tensor]]] = {}  # of prompts, chunk by chunk

    def add(self, request: Request, strategy: Strategy | None = None) -> None:
        """Queue a request, with a strategy of its own or the default one."""
        assert len(request.token_ids) < self._target.most_tokens, (
            "the caller refuses what is longer"
        )
        if strategy is not None:
            self._speculation.assign(request, strategy)
        self._waiting.append(request)

    @property
    def busy(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self._waiting or self._running)

    def step(self) -> list[Outcome]:
        """Admit what fits, compute some prompt tokens, advance every request that has its prompt.

        A request that does not fit into memory all by itself ends with `finish_reason` "error".
        """
        self._admit()
        self._prefill()
        try:
            return self._decode()
        finally:
            for request in [r for r in self._running if r.finished]:
                self._leave(request)

    def abort(self, requests: Iterable[Request]) -> None:
        """End these requests wherever they are; those that have ended stay as they are."""
        for request in requests:
            request.abort()
            self._leave(request)

    # Coming and going

    def _admit(self) -> None:
        """Open rows in order of arrival, while there is room."""
        while self._waiting and len(self._running) < self._max_num_seqs:
            request = self._waiting[0]
            if self._running and not self._has_room_for(request):
                return
            try:
                self._target.add(request.key)
            except SlabFull as error:
                if self._running:
                    return
                self._give_up(request, error)
                continue
            self._running.append(self._waiting.popleft())
            request.admitted_at = request.admitted_at or time.perf_counter()

    def _has_room_for(self, request: Request) -> bool:
        requests = [*self._running, request]
        return self._target.has_room(len(requests), max(len(r.token_ids) for r in requests))

    def _leave(self, request: Request) -> None:
        """Take a request out of wherever it is."""
        if request in self._waiting:
            self._waiting.remove(request)
            self._speculation.release(request)
        elif request in self._running:
            self._release(request)
        request.closed = True

    def _release(self, request: Request) -> None:
        self._running.remove(request)
        if request.failure is not None:  # its KV may hold NaN
            self._target.wipe(request.key)
        self._target.remove(request.key)
        self._hidden.pop(request.key, None)
        self._speculation.release(request)

    # Prompts

    def _missing(self, request: Request) -> int:
        """Tokens whose KV is still to be computed: all but the last are wanted (invariant 1)."""
        return len(request.token_ids) - 1 - self._target.cached(request.key)

    def _prefill(self) -> None:
        """Compute at most `max_num_batched_tokens`, of the oldest requests first."""
        left = self._max_num_batched_tokens
        while left > 0:
            request = next((r for r in self._running if self._missing(r)), None)
            if request is None:
                return
            try:
                left -= self._prefill_some(request, left)
            except AssertionError:
                raise
            except Exception as error:
                if is_out_of_memory(error):
                    self._make_room(error)
                else:  # a pass of this request alone
                    request.fail(error)
                    self._leave(request)

    def _prefill_some(self, request: Request, limit: int) -> int:
        """Tokens computed, at most `limit`."""
        began = time.perf_counter()
        layers = self._speculation.hidden_layers([request])
        if not self._target.cached(request.key):
            self._restore(request, layers)
        start = self._target.cached(request.key)
        tokens = request.token_ids[start:-1][:limit]
        self._show(request, start, self._target.prefill(request.key, tokens, layers))
        if not self._missing(request):
            self._store(request)
        request.metrics.prefill_seconds += time.perf_counter() - began
        return len(tokens)

    def _restore(self, request: Request, layers: tuple[int, ...]) -> None:
        """Begin with the longest cached prefix of the prompt, without its last token."""
        if self._prefixes is None:
            return
        wanted = request.prompt_ids[: len(request.token_ids) - 1]
        num_tokens, hidden = self._prefixes.restore(request.key, wanted, layers)
        self._show(request, 0, hidden)
        if not request.metrics.preemptions:
            request.metrics.cached_prompt_tokens = num_tokens

    def _show(self, request: Request, start: int, hidden: Mapping[int, Tensor]) -> None:
        """Show a drafter hidden states it asked for, and keep them until the prompt is stored."""
        if not hidden:
            return
        self._speculation.observe_prefill(request, start, hidden)
        if self._prefixes is not None:
            self._hidden.setdefault(request.key, []).append(hidden)

    def _store(self, request: Request) -> None:
        """Keep a prompt's KV, and its hidden states if some drafter asked for them."""
        chunks = self._hidden.pop(request.key, [])
        if self._prefixes is None:
            return
        layers = chunks[0] if chunks else ()
        hidden = {layer: torch.cat([chunk[layer] for chunk in chunks]) for layer in layers}
        stop = min(self._target.cached(request.key), len(request.prompt_ids))
        if any(len(states) < stop for states in hidden.values()):
            hidden = {}  # the drafter failed on the way
        self._prefixes.store(request.key, request.prompt_ids[:stop], hidden)

    # Steps

    def _decode(self) -> list[Outcome]:
        """Advance the requests that have their prompt, in spite of a slab that fills up.

        Drafts take positions, too. So a step without drafts is tried before any preemption.
        """
        while batch := [r for r in self._running if not self._missing(r)]:
            try:
                return step(self._target, self._speculation, batch)
            except (SlabFull, MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                self._drop_copies(error)  # the next drafts may find room
            try:
                return step(self._target, self._speculation.plain(), batch)
            except (SlabFull, MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                self._make_room(error)
        return []

    # Memory

    def _make_room(self, error: Exception) -> None:
        """Drop the prefix cache, else preempt the youngest request.

        A lone request already has all the memory. If that is too little, it ends with an error.
        """
        if self._drop_copies(error):
            return
        if len(self._running) > 1:
            self._preempt(self._running[-1])
        else:
            self._give_up(self._running[0], error)

    def _drop_copies(self, error: Exception) -> bool:
        """Give up the KV of earlier prompts; whether there was any, and it was in the way."""
        if not self._prefixes or isinstance(error, OverBudget):
            return False
        self._prefixes.clear()
        return True

    def _preempt(self, request: Request) -> None:
        """Take the request's row; its drafter keeps its state, as the tokens stay what they are."""
        self._running.remove(request)
        self._target.remove(request.key)
        self._hidden.pop(request.key, None)
        self._waiting.appendleft(request)
        request.metrics.preemptions += 1

    def _give_up(self, request: Request, error: Exception) -> None:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        failure = RequestError(
            f"out of memory for the KV of a request of {len(request.token_ids)} tokens, which was "
            f"ended ({reason}): shorten it, or free memory."
        )
        failure.__cause__ = error
        request.fail(failure)
        self._leave(request)
