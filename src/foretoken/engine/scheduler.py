"""The scheduler: requests join, advance together step by step, and leave.

This is continuous batching (Yu et al., "Orca"). A step admits requests while there is room,
computes some prompt tokens, and advances the requests whose prompt is computed by one
`decode.step`. Prompts are computed in order of arrival, at most `max_num_batched_tokens` tokens a
step (chunked prefill), so that a long prompt does not stall the other requests. Prompts have passes
of their own. These read the weights once more, but need no padding. The encoder of an
encoder-decoder reads a request's source before the prompt, once and alone. If the KV slab is full,
the youngest request loses its row, waits first in line, and is computed again (vLLM's preemption by
recomputation). None of this changes the output: bits do not depend on chunks, rows or the other
requests of the batch (invariant 7).

`LLMEngine` makes the requests, refuses invalid ones, and calls the scheduler.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from foretoken.core.source import Source
from foretoken.decode import Outcome, step
from foretoken.engine.prefix_cache import PrefixCache
from foretoken.errors import RequestError
from foretoken.request import Request
from foretoken.runtime.kv_slab import OverBudget, SlabFull, is_out_of_memory
from foretoken.runtime.network import RowState
from foretoken.runtime.target import Target
from foretoken.speculation import Speculation, Strategy

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
        self._reads_source = target.reads_source
        self._speculation = speculation
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._prefixes = prefix_cache
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []  # in order of admission, prefilling ones included
        self._hidden: dict[int, list[Mapping[int, Tensor]]] = {}  # request key -> prompt chunks

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
            request.admitted_at = request.admitted_at or time.perf_counter()

    def _has_room_for(self, request: Request) -> bool:
        requests = [*self._running, request]
        longest = max(self._target.longest, *(len(r.token_ids) for r in requests))
        return self._target.has_room(len(requests), longest, self._missing_state_bytes(requests))

    def _leave(self, request: Request) -> None:
        """Remove a request from the queue or from the batch."""
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

    # Sources

    def _has_source(self, request: Request) -> bool:
        """Whether the request's row has what its decoder reads."""
        return not self._reads_source or self._target.has_source(request.key)

    def _missing_state_bytes(self, requests: Sequence[Request]) -> int:
        """Bytes of the sources that no row has yet. Requests with the same one share them."""
        if not self._reads_source:
            return 0
        read = {r.source for r in self._running if self._has_source(r)}
        return sum(map(self._target.state_bytes, {r.source for r in requests} - read))

    def _read_source(self, request: Request) -> int:
        """Give the request's row its source; returns the positions that the encoder computed."""
        source, key = request.source, request.key
        assert source is not None, "requests of an encoder-decoder have one"
        known = self._known_state(source)
        if known is not None:
            self._target.share_state(key, known)
            if not request.metrics.preemptions:
                request.metrics.cached_source_tokens = len(source)
            return 0
        began = time.perf_counter()
        self._target.encode(key, source)
        request.metrics.encode_seconds += time.perf_counter() - began
        if self._prefixes is not None:
            self._prefixes.keep_state(source, self._target.row_state(key))
        return len(source)

    def _known_state(self, source: Source) -> RowState | None:
        """What the encoder made of a source that a running request has read, or an earlier one."""
        for other in self._running:
            if other.source == source and self._has_source(other):
                return self._target.row_state(other.key)
        return None if self._prefixes is None else self._prefixes.state_of(source)

    # Prompts

    def _is_ready(self, request: Request) -> bool:
        """Whether all that the next step reads is computed."""
        return not self._num_missing(request) and self._has_source(request)

    def _num_missing(self, request: Request) -> int:
        """Tokens whose KV must still be computed. The last token needs none yet (invariant 1)."""
        return len(request.token_ids) - 1 - self._target.cached(request.key)

    def _prefill(self) -> None:
        """Compute at most `max_num_batched_tokens` prompt tokens, the oldest requests first."""
        left = self._max_num_batched_tokens
        while left > 0:
            request = next((r for r in self._running if not self._is_ready(r)), None)
            if request is None:
                return
            try:
                left -= self._prefill_chunk(request, left)
            except AssertionError:
                raise
            except Exception as error:
                if is_out_of_memory(error):
                    self._make_room(error)
                else:  # the pass was for this request alone
                    request.fail(error)
                    self._leave(request)

    def _prefill_chunk(self, request: Request, limit: int) -> int:
        """Read a request's source, and compute at most `limit` tokens; returns how many, or 1."""
        began = time.perf_counter()
        spent = 0 if self._has_source(request) else self._read_source(request)
        if spent < limit and self._num_missing(request):
            spent += self._prefill_tokens(request, limit - spent)
        request.metrics.prefill_seconds += time.perf_counter() - began
        return max(1, spent)

    def _prefill_tokens(self, request: Request, limit: int) -> int:
        """Compute at most `limit` tokens of a request; returns how many."""
        layers = self._speculation.hidden_layers([request])
        if not self._target.cached(request.key):
            self._restore_prefix(request, layers)
        start = self._target.cached(request.key)
        tokens = request.token_ids[start:-1][:limit]
        self._show_hidden(request, start, self._target.prefill(request.key, tokens, layers))
        if not self._num_missing(request):
            self._store_prefix(request)
        self._speculation.prefilled(request)
        return len(tokens)

    def _restore_prefix(self, request: Request, layers: tuple[int, ...]) -> None:
        """Take the KV of the prompt's longest cached prefix; the last token needs none yet."""
        if self._prefixes is None:
            return
        wanted = request.prompt_ids[: len(request.token_ids) - 1]
        num_tokens, hidden = self._prefixes.restore(request.key, wanted, layers, request.source)
        self._show_hidden(request, 0, hidden)
        if not request.metrics.preemptions:
            request.metrics.cached_prompt_tokens = num_tokens

    def _show_hidden(self, request: Request, start: int, hidden: Mapping[int, Tensor]) -> None:
        """Show a prompt's hidden states to the drafter, and keep them for the prefix cache."""
        if not hidden:
            return
        self._speculation.observe_prefill(request, start, hidden)
        if self._prefixes is not None:
            self._hidden.setdefault(request.key, []).append(hidden)

    def _store_prefix(self, request: Request) -> None:
        """Cache a prompt's KV, with its hidden states if the drafter asked for them."""
        chunks = self._hidden.pop(request.key, [])
        if self._prefixes is None:
            return
        layers = chunks[0] if chunks else ()
        hidden = {layer: torch.cat([chunk[layer] for chunk in chunks]) for layer in layers}
        stop = min(self._target.cached(request.key), len(request.prompt_ids))
        if any(len(states) < stop for states in hidden.values()):
            hidden = {}  # the drafter failed, and the later chunks have none
        self._prefixes.store(request.key, request.prompt_ids[:stop], hidden, request.source)

    # Steps

    def _decode(self) -> list[Outcome]:
        """Advance the requests whose prompt is computed, and make room if memory runs out.

        Drafts take positions, too. So a step without drafts is tried before any preemption.
        """
        while batch := [r for r in self._running if self._is_ready(r)]:
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
        self._hidden.pop(request.key, None)
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
