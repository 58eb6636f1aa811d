"""The scheduler: requests join, advance together step by step, and leave.

This is continuous batching (Yu et al., "Orca"). A step admits requests while there is room,
computes some prompt tokens (`prefill.py`), and advances the requests whose prompt is computed by
one `decode.step`. Prompts are computed in order of arrival, at most `max_num_batched_tokens` tokens
a step (chunked prefill), so that a long prompt does not stall the other requests. Prompts have
passes of their own. These read the weights once more, but need no padding. If the KV slab is full,
the youngest request loses its row, waits first in line, and is computed again (vLLM's preemption by
recomputation). None of this changes the output: bits do not depend on chunks, rows or the other
requests of the batch (invariant 7).

`LLMEngine` makes the requests, refuses invalid ones, and calls the scheduler.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable

from tokenleap.core import clock
from tokenleap.decode import Outcome, step
from tokenleap.engine.prefill import Prefill
from tokenleap.engine.prefix_cache import PrefixCache
from tokenleap.errors import RequestError
from tokenleap.request import Request
from tokenleap.runtime.kv_slab import OverBudget, SlabFull, is_out_of_memory
from tokenleap.runtime.target import Target
from tokenleap.speculation import Speculation, Strategy

__all__ = ["Scheduler"]

_log = logging.getLogger(__name__)


class Scheduler:
    """Runs the requests of one target.

    Args:
        target: the model being accelerated.
        speculation: how the requests speculate.
        max_num_seqs: most requests that run at the same time.
        max_num_batched_tokens: most prompt tokens computed in one step, sources included.
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
        self._running: list[Request] = []  # in order of admission, prefilling ones included
        self._prompts = Prefill(target, speculation, prefix_cache, self._running)

    def add(self, request: Request, strategy: Strategy | None = None) -> None:
        """Queue a request; with None it has the default strategy."""
        assert len(request.token_ids) < self._target.most_tokens, (
            "the caller refuses longer prompts"
        )
        if strategy is not None:
            self._speculation.assign(request, strategy)
        self._waiting.append(request)

    @property
    def busy(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self._waiting or self._running)

    @property
    def num_waiting(self) -> int:
        """Requests without a row, those that were preempted included."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests with a row, those whose prompt is being computed included."""
        return len(self._running)

    def step(self) -> list[Outcome]:
        """Admit requests, compute prompt tokens, advance the requests whose prompt is computed.

        A request that does not fit into memory even alone ends with `finish_reason` "error".
        """
        self._admit()
        self._prefill()
        try:
            return self._decode()
        finally:
            for request in [r for r in self._running if r.finished]:
                self._leave(request)

    def abort(self, requests: Iterable[Request]) -> None:
        """End these requests, whether they wait or run; those that have ended are not changed."""
        for request in requests:
            request.abort()
            self._leave(request)

    # Admission and release

    def _admit(self) -> None:
        """Give rows to waiting requests in order of arrival, while there is room."""
        while self._waiting and len(self._running) < self._max_num_seqs:
            request = self._waiting[0]
            if self._running and not self._has_room_for(request):
                return
            try:
                self._target.add(request.key)
            except SlabFull as error:
                if self._running:
                    return
                self._end_for_memory(request, error)
                continue
            self._running.append(self._waiting.popleft())
            request.admitted_at = request.admitted_at or clock.now()
            self._end_if_unwritten(request)

    def _has_room_for(self, request: Request) -> bool:
        requests = [*self._running, request]
        longest = max(self._target.longest, *(len(r.token_ids) for r in requests))
        missing = self._prompts.missing_state_bytes(requests)
        return self._target.has_room(len(requests), longest, missing)

    def _leave(self, request: Request) -> None:
        """Remove a request from the queue or from the batch."""
        if request in self._waiting:
            self._waiting.remove(request)
            self._speculation.release(request)
        elif request in self._running:
            self._release(request)
        request.close()

    def _release(self, request: Request) -> None:
        self._running.remove(request)
        if request.failure is not None:  # its KV may hold NaN
            self._target.wipe(request.key)
        self._target.remove(request.key)
        self._prompts.forget(request)
        self._speculation.release(request)

    # Prompts

    def _prefill(self) -> None:
        """Compute at most `max_num_batched_tokens` prompt tokens, the oldest requests first."""
        left = self._max_num_batched_tokens
        while left > 0:
            request = next((r for r in self._running if not self._prompts.is_ready(r)), None)
            if request is None:
                return
            try:
                left -= self._prompts.compute(request, left)
                self._end_if_unwritten(request)
            except AssertionError:
                raise
            except Exception as error:
                if is_out_of_memory(error):
                    self._make_room(error)
                else:  # the pass was for this request alone
                    request.fail(error)
                    self._leave(request)

    def _end_if_unwritten(self, request: Request) -> None:
        """End a request that wants no tokens (`max_tokens` 0) once its prompt is computed."""
        if not request.remaining and self._prompts.is_ready(request):
            request.end_unwritten()
            self._leave(request)

    # Steps

    def _decode(self) -> list[Outcome]:
        """Advance the requests whose prompt is computed, and make room if memory runs out.

        Drafts take positions, too. So a step without drafts is tried before any preemption.
        """
        while batch := [r for r in self._running if self._prompts.is_ready(r)]:
            try:
                return step(self._target, self._speculation, batch)
            except (SlabFull, MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                self._clear_prefixes(error)  # so that later drafts may fit
            try:
                return step(self._target, self._speculation.plain(), batch)
            except (SlabFull, MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                self._make_room(error)
        return []

    # Memory

    def _make_room(self, error: Exception) -> None:
        """Clear the prefix cache if that can help, else preempt the youngest request.

        A request that runs alone already has all the memory. It ends with an error.
        """
        if self._clear_prefixes(error):
            return
        if len(self._running) > 1:
            self._preempt(self._running[-1])
        else:
            self._end_for_memory(self._running[0], error)

    def _clear_prefixes(self, error: Exception) -> bool:
        """Clear the prefix cache if that can help; returns whether it was cleared.

        It cannot help against `OverBudget`: the slab's own limit does not count the cache.
        """
        if not self._prefixes or isinstance(error, OverBudget):
            return False
        self._prefixes.clear()
        return True

    def _preempt(self, request: Request) -> None:
        """Take the request's row. Its tokens do not change, so its drafter keeps its state."""
        self._running.remove(request)
        self._target.remove(request.key)
        self._prompts.forget(request)
        self._waiting.appendleft(request)
        request.metrics.preemptions += 1
        _log.debug("a request of %d tokens lost its row to others", len(request.token_ids))

    def _end_for_memory(self, request: Request, error: Exception) -> None:
        """End a request whose KV does not fit into memory."""
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        failure = RequestError(
            f"out of memory for the KV of a request of {len(request.token_ids)} tokens ({reason}), "
            "so it was ended: shorten it, or free memory."
        )
        failure.__cause__ = error
        request.fail(failure)
        self._leave(request)
