"""The scheduler: requests join, advance together step by step, and leave.

This is continuous batching (Yu et al., "Orca"). A step admits requests while there is room,
computes some prompt tokens (`scheduler.py`), and advances the requests whose prompt is computed by
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
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from tokenleap.core import clock
from tokenleap.core.config import MIB
from tokenleap.core.distribution import TokenLogprobs, log_probs_of, token_logprobs
from tokenleap.core.sampler import check_finite
from tokenleap.decode import Outcome, step
from tokenleap.engine.prefix_cache import Beginning, PrefixCache
from tokenleap.errors import ConfigError, RequestError
from tokenleap.request import Request
from tokenleap.runtime.attention import KEY_BLOCK
from tokenleap.runtime.kv_slab import KVSlab, OverBudget, SlabFull, is_out_of_memory
from tokenleap.runtime.network import RowState
from tokenleap.runtime.passes import Rows
from tokenleap.runtime.target import Target
from tokenleap.speculation import Speculation, Strategy

_log = logging.getLogger(__name__)


class Scheduler:
    """Runs the requests of one target.

    Args:
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
            self._end(request, request.abort)

    def give_up(self, error: Exception) -> None:
        """End all requests because of an error that is not of one of them."""
        for request in [*self._waiting, *self._running]:
            self._end(request, partial(request.fail, error))

    def _end(self, request: Request, end: Callable[[], None]) -> None:
        try:
            end()
            self._leave(request)
        except Exception:  # that is no reason to keep others
            _log.exception("a request could not be ended")

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
        try:
            if request in self._waiting:
                self._waiting.remove(request)
                self._speculation.release(request)
            elif request in self._running:
                self._release(request)
        finally:
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
                with self._speculation.without_drafts():
                    return step(self._target, self._speculation, batch)
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


# What a request needs before its first step: its source, its prompt's KV and log-probabilities.
#
# The encoder of an encoder-decoder reads a request's source before the prompt, once and alone. The
# prompt is computed in chunks, from the longest prefix on that the prefix cache has. The cache has
# no logits, so the prompt of a request that wants its log-probabilities is computed in full.
# `Scheduler` says which request is next, and how many tokens are computed.


class Prefill:
    """Computes the sources and prompts of running requests.

    Args:
        speculation: how the requests speculate; drafters see the prompts' hidden states.
        prefix_cache: KV of earlier prompts; None computes every prompt in full.
    """

    def __init__(
        self,
        target: Target,
        speculation: Speculation,
        prefix_cache: PrefixCache | None,
        running: Sequence[Request],
    ) -> None:
        self._target = target
        self._reads_source = target.reads_source
        self._speculation = speculation
        self._prefixes = prefix_cache
        self._running = running
        self._hidden: dict[int, list[Mapping[int, Tensor]]] = {}  # request key -> prompt chunks

    def is_ready(self, request: Request) -> bool:
        """Whether all that the next step reads is computed."""
        return not self._num_missing(request) and self.has_source(request)

    def _num_missing(self, request: Request) -> int:
        """Tokens whose KV must still be computed. The last token needs none yet (invariant 1).

        A pooled prompt is computed to its last token, because no step follows.
        """
        unread = 1 if request.pooled is None else 0
        return len(request.token_ids) - unread - self._target.cached(request.key)

    def forget(self, request: Request) -> None:
        """Forget the chunks of a request that has lost its row."""
        self._hidden.pop(request.key, None)

    # Sources

    def has_source(self, request: Request) -> bool:
        """Whether the request's row has what its decoder reads."""
        return not self._reads_source or self._target.has_source(request.key)

    def missing_state_bytes(self, requests: Sequence[Request]) -> int:
        """Bytes of the sources that no row has yet. Requests with the same one share them."""
        if not self._reads_source:
            return 0
        read = {_beginning(r) for r in self._running if self.has_source(r)}
        missing = {_beginning(r) for r in requests} - read
        return sum(self._target.state_bytes(source) for _, source in missing)

    def _read_source(self, request: Request) -> int:
        """Give the request's row its source; returns the positions that the encoder computed."""
        source, key = request.source, request.key
        assert source is not None, "requests of an encoder-decoder have one"
        known = self._known_state(_beginning(request))
        if known is not None:
            self._target.set_state(key, known)
            if not request.metrics.preemptions:
                request.metrics.cached_source_tokens = len(source)
            return 0
        began = clock.now()
        self._target.encode(key, source)
        request.metrics.encode_seconds += clock.now() - began
        if self._prefixes is not None:
            self._prefixes.keep_state(_beginning(request), self._target.row_state(key))
        return len(source)

    def _known_state(self, beginning: Beginning) -> RowState | None:
        """The encoder's output for a source that a running or an earlier request has read."""
        for other in self._running:
            if _beginning(other) == beginning and self.has_source(other):
                return self._target.row_state(other.key)
        return None if self._prefixes is None else self._prefixes.state_of(beginning)

    # Prompts

    def compute(self, request: Request, limit: int) -> int:
        """Read a request's source, and compute at most `limit` tokens; returns how many, or 1."""
        began = clock.now()
        spent = 0 if self.has_source(request) else self._read_source(request)
        if spent < limit and self._num_missing(request):
            spent += self._prefill_tokens(request, limit - spent)
        request.metrics.prefill_seconds += clock.now() - began
        return max(1, spent)

    def _prefill_tokens(self, request: Request, limit: int) -> int:
        """Compute at most `limit` tokens of a request; returns how many."""
        pooled = request.pooled
        if pooled is None:
            layers = self._speculation.hidden_layers([request])
        else:
            layers = (self._target.network.num_layers,)
        if not self._target.cached(request.key):
            self._restore_prefix(request, layers)
        start = self._target.cached(request.key)
        tokens = request.token_ids[start:][: min(limit, self._num_missing(request))]
        reader = _ScoreReader(request, start) if request.num_unscored else None
        hidden = self._target.prefill(request.key, tokens, layers, None, reader)
        if reader is not None:
            reader.keep()
        if pooled is not None:
            pooled.add(start, hidden[layers[0]])
            return len(tokens)
        self._show_hidden(request, start, hidden)
        if not self._num_missing(request):
            self._store_prefix(request)
        self._speculation.prefilled(request)
        return len(tokens)

    def _restore_prefix(self, request: Request, layers: tuple[int, ...]) -> None:
        """Take the KV of the prompt's longest cached prefix; the last token needs none yet."""
        if self._prefixes is None or not request.reads_prefixes:
            return
        wanted = request.prompt_ids[: len(request.token_ids) - 1]
        num_tokens, hidden = self._prefixes.restore(
            request.key, wanted, layers, _beginning(request)
        )
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
        self._prefixes.store(request.key, request.prompt_ids[:stop], hidden, _beginning(request))


def _beginning(request: Request) -> Beginning:
    return request.scope.salt, request.source


class _ScoreReader:
    """Takes the log-probabilities of a prompt's tokens from the logits before them.

    Only a few numbers of each row of logits are kept. The request has them once the whole chunk is
    computed, since a chunk that fails is computed again.
    """

    def __init__(self, request: Request, start: int) -> None:
        assert request.prompt_scores is not None
        assert request.params.prompt_logprobs is not None
        self._known = request.prompt_scores
        self._tokens = request.prompt_ids[1:]  # position i predicts the token at i
        self._num_top, self._piece = request.params.prompt_logprobs, request.piece
        self._position = start
        self._found: list[TokenLogprobs] = []

    def __call__(self, logits: Tensor) -> None:
        """Read the logits [n, V] of the next positions."""
        for row in logits:
            if len(self._known) <= self._position < len(self._tokens):
                log_probs = log_probs_of(row)
                check_finite(log_probs.max())
                token = self._tokens[self._position]
                self._found.append(token_logprobs(log_probs, token, self._num_top, self._piece))
            self._position += 1

    def keep(self) -> None:
        """Give the request what was found."""
        self._known += self._found


# `kv_cache_memory`: one limit on the KV memory of the target and its draft models together.
#
# A draft model holds KV for the requests of the target, with slightly more tokens each. So every
# model gets the same number of positions. Its share of the bytes follows from that.


class KVBudget:
    """Limits the KV memory of the models added to it.

    Args:
        num_bytes: the limit for all of them together; None is no limit.
    """

    def __init__(self, num_bytes: int | None) -> None:
        self._num_bytes = num_bytes
        # Of all models, in order; a draft model may be dropped.
        self._slabs: list[weakref.ref[KVSlab]] = []
        self._models: list[Rows] = []  # waiting for `share`
        self._positions: int | None = None  # for each model, set by `share`

    def add(self, model: Rows) -> None:
        """Count a model in.

        A model that comes after `share` gets as many positions as the others, in addition to the
        limit.
        """
        assert model.cell_bytes or self._num_bytes is None, "its first pass tells the size"
        self._slabs = [each for each in self._slabs if each() is not None]
        if all(each() is not model.slab for each in self._slabs):
            self._slabs.append(weakref.ref(model.slab))
        if self._positions is not None:
            model.limit_memory(self._positions * model.cell_bytes)
        elif self._num_bytes is not None:
            self._models.append(model)

    @property
    def held_bytes(self) -> list[int]:
        """Bytes that each model's slab takes at the moment, the target's first."""
        return [slab.held_bytes for each in self._slabs if (slab := each()) is not None]

    def share(self) -> None:
        """Divide the memory among the models added so far; later calls have no effect."""
        if self._num_bytes is None or self._positions is not None:
            return
        position_bytes = sum(model.cell_bytes for model in self._models)
        self._positions = self._num_bytes // position_bytes
        if self._positions < KEY_BLOCK:
            drafting = " and its draft models" if len(self._models) > 1 else ""
            raise ConfigError(
                f"kv_cache_memory: one sequence of this model{drafting} takes at least "
                f"{KEY_BLOCK * position_bytes / MIB:.1f} MiB, got {self._num_bytes / MIB:.1f} MiB."
            )
        while self._models:
            self.add(self._models.pop())
