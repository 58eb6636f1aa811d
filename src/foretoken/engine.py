"""The engine: requests join, advance together step by step, and leave.

`LLM` is a thin face over it. Requests wait in order of arrival, are admitted while there is room,
prefilled, and take part in every step until they end; a request that leaves makes room at once.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable

from foretoken.acceptance.base import AcceptanceRule
from foretoken.control import Controller
from foretoken.decode import Outcome, step
from foretoken.drafters.base import Drafter
from foretoken.errors import CompatibilityError
from foretoken.request import Request
from foretoken.target import Target

__all__ = ["Engine"]


class Engine:
    """Runs requests on one target with one drafter, rule and controller.

    Args:
        target: the model being accelerated.
        drafter: proposes.
        rule: decides.
        controller: says how much to draft.
        max_num_seqs: most requests in one step.

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
    ) -> None:
        _check_fit(drafter, rule)
        self._target = target
        self._drafter = drafter
        self._rule = rule
        self._controller = controller
        self._max_num_seqs = max_num_seqs
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []

    def add(self, request: Request) -> None:
        """Queue a request."""
        self._waiting.append(request)

    @property
    def busy(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self._waiting or self._running)

    def step(self) -> list[Outcome]:
        """Admit what fits, advance every running request, let finished ones go."""
        while self._waiting and len(self._running) < self._max_num_seqs:
            self._admit(self._waiting.popleft())
        if not self._running:
            return []
        outcomes = step(self._target, self._drafter, self._rule, self._controller, self._running)
        for request in [r for r in self._running if r.finished]:
            self._release(request)
        return outcomes

    def abort(self, requests: Iterable[Request]) -> None:
        """End these requests wherever they are; those that have ended stay as they are."""
        for request in requests:
            if request in self._waiting:
                self._waiting.remove(request)
            elif request in self._running:
                self._release(request)
            request.abort()

    def _admit(self, request: Request) -> None:
        """Compute the KV of all prompt tokens but the last (law 1)."""
        request.admitted_at = time.perf_counter()
        self._target.add(request.key)
        try:
            self._target.prefill(request.key, request.token_ids[:-1])
        except BaseException:  # whoever interrupted this may not be whose request it is
            self._target.remove(request.key)
            self._waiting.appendleft(request)
            raise
        self._running.append(request)
        request.metrics.prefill_seconds = time.perf_counter() - request.admitted_at

    def _release(self, request: Request) -> None:
        self._running.remove(request)
        self._drafter.release(request)
        self._controller.release(request)
        self._target.remove(request.key)


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
