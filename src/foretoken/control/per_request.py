"""Every request with a controller of its own, in one batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from foretoken.control.base import Budget, Controller
from foretoken.request import Request
from foretoken.tree import Draft

if TYPE_CHECKING:
    from foretoken.decode import Outcome, StepTimes

__all__ = ["PerRequestController"]


class PerRequestController(Controller):
    """Sends each request to its controller, which sees only the requests that are its own.

    It is told what else there is: how many requests of others, and what the whole pass was like.
    The seconds of drafting are those of its own requests: what others draft is not its cost.

    Args:
        default: the controller of requests that none was assigned to.
        seconds: how long the drafts of these requests took in the present step.
    """

    name: ClassVar[str] = "per_request"
    summary: ClassVar[str] = "each request's own controller"

    def __init__(self, default: Controller, seconds: Callable[[Sequence[Request]], float]) -> None:
        self._default = default
        self._seconds = seconds
        self._assigned: dict[int, Controller] = {}
        super().__init__(default.num_speculative_tokens)

    def assign(self, request: Request, controller: Controller) -> None:
        """Let this controller serve the request until it is released."""
        if controller is not self._default:
            self._assigned[request.key] = controller

    def budgets(self, batch: Sequence[Request]) -> list[Budget]:
        """See `Controller.budgets`."""
        if not self._assigned:
            return self._default.budgets(batch)
        budgets: dict[int, Budget] = {}
        for controller, requests in self._parts(batch):
            controller.others = len(batch) - len(requests)
            own = controller.budgets(requests)
            budgets.update((r.key, budget) for r, budget in zip(requests, own, strict=True))
        return [budgets[request.key] for request in batch]

    def trim(self, batch: Sequence[Request], drafts: Sequence[Draft]) -> list[Draft]:
        """See `Controller.trim`."""
        if not self._assigned:
            return self._default.trim(batch, drafts)
        by_key = {request.key: draft for request, draft in zip(batch, drafts, strict=True)}
        for controller, requests in self._parts(batch):
            own = controller.trim(requests, [by_key[request.key] for request in requests])
            by_key.update((r.key, draft) for r, draft in zip(requests, own, strict=True))
        return [by_key[request.key] for request in batch]

    def observe(self, outcomes: Sequence[Outcome], times: StepTimes) -> None:
        """Each controller sees what came of its requests."""
        if not self._assigned:
            self._default.observe(outcomes, times)
            return
        by_key = {outcome.request.key: outcome for outcome in outcomes}
        positions = sum(len(outcome.draft.tree) for outcome in outcomes)
        whole = replace(times, rows=len(outcomes), positions=positions)
        noted: set[int] = set()  # the curves that have the pass already
        for controller, requests in self._parts([outcome.request for outcome in outcomes]):
            own = [by_key[request.key] for request in requests]
            # A step whose parts could not be told apart has no seconds of drafting.
            draft = self._seconds(requests) if times.draft else 0.0
            known = id(controller.costs) in noted
            controller.observe(own, replace(whole, draft=draft, noted=known))
            if controller.needs_costs:
                noted.add(id(controller.costs))

    def release(self, request: Request) -> None:
        """Forget the request."""
        self._assigned.pop(request.key, self._default).release(request)
        if not self._assigned:
            self._default.others = 0

    def _parts(self, batch: Sequence[Request]) -> list[tuple[Controller, list[Request]]]:
        parts: dict[int, tuple[Controller, list[Request]]] = {}
        for request in batch:
            controller = self._assigned.get(request.key, self._default)
            parts.setdefault(id(controller), (controller, []))[1].append(request)
        return list(parts.values())
