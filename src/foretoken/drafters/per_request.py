"""Every request with a drafter of its own in one batch, and a drafter's faults kept to its request.

Drafters cannot change the output, only how soon it comes; so a drafter that fails is no reason to
fail a request, let alone its neighbours: the request goes on without drafts (law 3), and
`Metrics.drafter_failure` says why.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from foretoken.cache import SlabFull
from foretoken.control import Budget
from foretoken.drafters.base import Drafter
from foretoken.request import Request
from foretoken.tree import Draft

if TYPE_CHECKING:
    from foretoken.decode import Outcome, StepTimes

__all__ = ["PerRequest"]

_NOT_FAULTS = (AssertionError, SlabFull)
"""Our own mistakes must come to light; and where drafting fills the slab, the engine makes room."""


class PerRequest(Drafter):
    """Sends each request to its drafter.

    Args:
        default: the drafter of requests that none was assigned to.
    """

    def __init__(self, default: Drafter) -> None:
        self._default = default
        self._assigned: dict[int, Drafter] = {}
        self._failed: set[int] = set()
        self._seconds: dict[int, float] = {}  # of each draft; where there are several drafters
        self._each = 0.0  # the same where there is one

    def assign(self, request: Request, drafter: Drafter) -> None:
        """Let this drafter serve the request until it is released."""
        if drafter is not self._default:
            self._assigned[request.key] = drafter

    def propose(self, batch: Sequence[Request], budgets: Sequence[Budget]) -> list[Draft]:
        """Each drafter proposes for its requests together; failed ones draft nothing."""
        began = time.perf_counter()
        self._seconds.clear()
        if not self._assigned and not self._failed:  # as a rule, and soon done
            found = self._propose(self._default, batch, budgets)
            self._each = (time.perf_counter() - began) / max(1, len(batch))
            return found
        drafts = {request.key: Draft.empty(request.root) for request in batch}
        limits = {r.key: budget for r, budget in zip(batch, budgets, strict=True)}
        for drafter, requests in self._parts(batch):
            began = time.perf_counter()
            own = self._propose(drafter, requests, [limits[r.key] for r in requests])
            drafts.update((r.key, draft) for r, draft in zip(requests, own, strict=True))
            each = (time.perf_counter() - began) / len(requests)
            self._seconds.update((request.key, each) for request in requests)
        self._each = 0.0
        return [drafts[request.key] for request in batch]

    def seconds(self, requests: Sequence[Request]) -> float:
        """How long the last drafts of these took; requests of one drafter share its time."""
        return sum(self._seconds.get(request.key, self._each) for request in requests)

    def observe(self, outcomes: Sequence[Outcome], times: StepTimes) -> None:
        """Each drafter sees what came of its requests."""
        if not self._assigned and not self._failed:
            self._observe(self._default, outcomes, times)
            return
        by_key = {outcome.request.key: outcome for outcome in outcomes}
        for drafter, requests in self._parts([outcome.request for outcome in outcomes]):
            self._observe(drafter, [by_key[request.key] for request in requests], times)

    def rewind(self, request: Request) -> None:
        """The request's drafter takes the tokens back."""
        self._of(request).rewind(request)

    def release(self, request: Request) -> None:
        """Forget the request."""
        drafter = self._of(request)
        self._assigned.pop(request.key, None)
        if request.key not in self._failed:
            self._forget(drafter, request)
        self._failed.discard(request.key)

    def sole(self, batch: Sequence[Request]) -> Drafter | None:
        """The drafter of all these requests; None where they have several, or one has none left."""
        parts = self._parts(batch)
        return parts[0][0] if [len(own) for _, own in parts] == [len(batch)] else None

    def _of(self, request: Request) -> Drafter:
        return self._assigned.get(request.key, self._default)

    def _parts(self, batch: Sequence[Request]) -> list[tuple[Drafter, list[Request]]]:
        """The requests of each drafter that can still draft, in order."""
        parts: dict[int, tuple[Drafter, list[Request]]] = {}
        for request in batch:
            if request.key not in self._failed:
                drafter = self._of(request)
                parts.setdefault(id(drafter), (drafter, []))[1].append(request)
        return list(parts.values())

    def _propose(
        self, drafter: Drafter, requests: Sequence[Request], budgets: Sequence[Budget]
    ) -> list[Draft]:
        """Their drafts; after a failure one by one, to find whose it was: that one has none."""
        if drafter.looks_up and not any(budget.nodes for budget in budgets):
            return [Draft.empty(request.root) for request in requests]
        try:
            drafts = drafter.propose(requests, budgets)
            if len(drafts) != len(requests):
                raise ValueError(f"{len(drafts)} drafts for {len(requests)} requests")
            return drafts
        except _NOT_FAULTS:
            raise
        except Exception as error:
            if len(requests) == 1:
                self._fail(drafter, requests[0], error)
                return [Draft.empty(requests[0].root)]
        found: list[Draft] = []
        for request, budget in zip(requests, budgets, strict=True):
            found += self._propose(drafter, [request], [budget])
        return found

    def _observe(self, drafter: Drafter, outcomes: Sequence[Outcome], times: StepTimes) -> None:
        """After a failure one by one: a drafter may then see an outcome twice, and learn badly."""
        try:
            drafter.observe(outcomes, times)
            return
        except _NOT_FAULTS:
            raise
        except Exception as error:
            if len(outcomes) == 1:
                self._fail(drafter, outcomes[0].request, error)
                return
        for outcome in outcomes:
            self._observe(drafter, [outcome], times)

    def _fail(self, drafter: Drafter, request: Request, error: Exception) -> None:
        """No more drafts for this request."""
        self._failed.add(request.key)
        request.metrics.drafter_failure = _in_one_line(error)
        self._forget(drafter, request)

    def _forget(self, drafter: Drafter, request: Request) -> None:
        try:
            drafter.release(request)
        except AssertionError:
            raise
        except Exception as error:
            if request.metrics.drafter_failure is None:
                request.metrics.drafter_failure = _in_one_line(error)


def _in_one_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
