"""The engine: requests join, advance together step by step, and leave.

Continuous batching (Yu et al., "Orca"): a step admits what fits, computes a portion of the prompts
that are not computed yet, and advances all others by one `decode.step`. Prompts come in order of
arrival, at most `max_num_batched_tokens` a step, so that a long one does not stall the others; they
have passes of their own, which read the weights once more and need no padding. When the KV slab is
full the youngest request gives up its row, waits first in line, and is computed again (vLLM's
preemption by recomputation). None of this is visible in the output: by law 7 the bits do not depend
on portions, neighbours or rows.

`LLM` and `LLMEngine` are the faces of this; requests here are made, and their errors the caller's.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from foretoken.acceptance.base import AcceptanceRule
from foretoken.cache import OverBudget, SlabFull, is_out_of_memory
from foretoken.control import Controller, Fixed
from foretoken.control.per_request import PerRequestController
from foretoken.decode import Outcome, step
from foretoken.drafters.base import Drafter
from foretoken.drafters.none import NoDrafter
from foretoken.drafters.per_request import PerRequest
from foretoken.errors import CompatibilityError, ForetokenError
from foretoken.prefix_cache import PrefixCache
from foretoken.request import Request
from foretoken.target import Target

__all__ = ["Engine", "Speculation"]

Step: TypeAlias = Callable[
    [Target, Drafter, AcceptanceRule, Controller, Sequence[Request]], list[Outcome]
]
"""`decode.step`, or what does the same by other means."""


@dataclass(frozen=True)
class Speculation:
    """How a request guesses: what proposes, and what says how much."""

    drafter: Drafter
    controller: Controller


class Engine:
    """Runs requests on one target with one rule.

    Args:
        target: the model being accelerated.
        drafter: proposes, for requests that bring no drafter of their own.
        rule: decides.
        controller: says how much to draft, for requests that bring none of their own.
        max_num_seqs: most requests in one step.
        max_num_batched_tokens: most prompt tokens computed in one step.
        prefix_cache: KV of earlier prompts; None computes every prompt in full.
        step: advances a batch.

    Raises:
        CompatibilityError: the rule does not fit the drafter (law 5).
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        rule: AcceptanceRule,
        controller: Controller,
        max_num_seqs: int = 16,
        *,
        max_num_batched_tokens: int = 512,
        prefix_cache: PrefixCache | None = None,
        step: Step = step,
    ) -> None:
        _check_fit(drafter, rule)
        self._target = target
        self._drafter = drafter
        self._rule = rule
        self._controller = controller
        self._drafters = PerRequest(drafter)
        self._controllers = PerRequestController(controller, self._drafters.seconds)
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._prefixes = prefix_cache
        self._step = step
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []  # in order of admission; also those being prefilled

    def add(self, request: Request, speculation: Speculation | None = None) -> None:
        """Queue a request, with the engine's own drafter and controller or others.

        Raises:
            CompatibilityError: the rule does not fit the drafter (law 5).
        """
        assert len(request.token_ids) < self._target.most_tokens, (
            "the caller refuses what is longer"
        )
        if speculation is not None:
            _check_fit(speculation.drafter, self._rule)
            self._drafters.assign(request, speculation.drafter)
            self._controllers.assign(request, speculation.controller)
        self._waiting.append(request)

    @property
    def busy(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self._waiting or self._running)

    def step(self) -> list[Outcome]:
        """Admit what fits, compute some prompt tokens, advance every request that has its prompt.

        Raises:
            ForetokenError: a request does not fit into memory all by itself; it has been ended.
        """
        self._admit()
        self._prefill()
        try:
            return self._decode()
        finally:  # an interrupted step may have ended some
            for request in [r for r in self._running if r.finished]:
                self._release(request)

    @property
    def drafter(self) -> Drafter:
        """That of requests which bring none of their own."""
        return self._drafter

    def abort(self, requests: Iterable[Request]) -> None:
        """End these requests wherever they are; those that have ended stay as they are."""
        for request in requests:
            if request in self._waiting:
                self._waiting.remove(request)
                self._forget(request)
            elif request in self._running:
                self._release(request)
            request.abort()

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
                if not self._running:
                    self._give_up(request, error)
                return
            self._running.append(self._waiting.popleft())
            request.admitted_at = request.admitted_at or time.perf_counter()

    def _has_room_for(self, request: Request) -> bool:
        requests = [*self._running, request]
        return self._target.has_room(len(requests), max(len(r.token_ids) for r in requests))

    def _release(self, request: Request) -> None:
        self._running.remove(request)
        self._target.remove(request.key)
        self._forget(request)

    def _forget(self, request: Request) -> None:
        self._drafters.release(request)
        self._controllers.release(request)

    # Prompts

    def _missing(self, request: Request) -> int:
        """Tokens whose KV is still to be computed: all but the last are wanted (law 1)."""
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
            except (SlabFull, MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                self._make_room(error)

    def _prefill_some(self, request: Request, limit: int) -> int:
        """Tokens computed, at most `limit`."""
        began = time.perf_counter()
        if not self._target.cached(request.key):
            self._restore(request)
        start = self._target.cached(request.key)
        tokens = request.token_ids[start:-1][:limit]
        self._target.prefill(request.key, tokens)
        stop = min(start + len(tokens), len(request.prompt_ids))
        if self._prefixes is not None and not self._missing(request):
            self._prefixes.store(request.key, request.prompt_ids[:stop])
        request.metrics.prefill_seconds += time.perf_counter() - began
        return len(tokens)

    def _restore(self, request: Request) -> None:
        """Begin with what is known of the prompt, the last token excepted."""
        if self._prefixes is None:
            return
        wanted = request.prompt_ids[: len(request.token_ids) - 1]
        known = self._prefixes.restore(request.key, wanted)
        if not request.metrics.preemptions:
            request.metrics.cached_prompt_tokens = known

    # Steps

    def _decode(self) -> list[Outcome]:
        """Advance the requests that have their prompt, in spite of a slab that fills up.

        Drafts take positions, too: before anyone is preempted for them they are left out.
        """
        target, rule = self._target, self._rule
        while batch := [r for r in self._running if not self._missing(r)]:
            try:
                return self._step(target, self._drafters, rule, self._controllers, batch)
            except SlabFull as error:
                self._drop_copies(error)  # the next drafts may find room
            try:
                return self._step(target, NoDrafter(), rule, Fixed(0), batch)
            except SlabFull as error:
                self._make_room(error)
        return []

    # Memory

    def _make_room(self, error: Exception) -> None:
        """Drop copies that may be computed again, else preempt the youngest request.

        Raises:
            ForetokenError: there was only one, which has been ended.
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
        self._waiting.appendleft(request)
        request.metrics.preemptions += 1

    def _give_up(self, request: Request, error: Exception) -> None:
        self.abort([request])
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ForetokenError(
            f"out of memory for the KV of a request of {len(request.token_ids)} tokens, which was "
            f"ended ({reason}): shorten it, or free memory."
        ) from error


def _check_fit(drafter: Drafter, rule: AcceptanceRule) -> None:
    """Law 5, for trees; chains fit every rule."""
    if not drafter.makes_branches:
        return
    if not rule.takes_branches:
        raise CompatibilityError(
            f"acceptance rule '{rule.name}' takes chains only, and {type(drafter).__name__} "
            "proposes trees."
        )
    if rule.needs_independent_siblings and not drafter.independent_siblings:
        raise CompatibilityError(
            f"acceptance rule '{rule.name}' takes siblings drawn independently only, and those of "
            f"{type(drafter).__name__} are not: draft chains, or trees with expansion "
            "'sample_with_replacement'."
        )
