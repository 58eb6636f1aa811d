"""`Probing`: when requests that do not draft try one, so that `cost_model` learns what it brings.

A request that has drafted nothing for `probe_every` steps drafts one level; this notices a text
that has become predictable. With a drafter whose chains end early, it does so as soon as that costs
one percent of the time since its last draft. Requests that have never drafted pay for trials
together: one of them tries once its first draft, reading included, costs at most one percent of the
steps since the last trial.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tokenleap.control.base import within
from tokenleap.control.estimates import Estimates
from tokenleap.control.history import History

if TYPE_CHECKING:
    from tokenleap.request import Request

__all__ = ["PRICE", "SOONEST", "Probing"]

PRICE, SOONEST = 0.01, 8
"""Share of the time that plain steps and first drafts may cost; fewest steps between two."""

_SOONEST_AGAIN = 2
"""Fewest steps until a request tries again, if its chains end early."""

_SERVED = 4.0
"""A step with a draft from elsewhere counts as at most so many plain ones until the next probe: a
model that might be better is probed sooner than one that might not pay at all."""


class Probing:
    """Says in which steps a request without drafts tries one.

    Args:
        every: steps without drafts after which a request tries again.
        estimates: what is known of the drafter.
    """

    def __init__(self, every: int, estimates: Estimates) -> None:
        self._every = every
        self._estimates = estimates
        self._costs = estimates.costs
        self._since_trial = 0.0  # steps since a request tried its first draft

    def wait(self, steps: float) -> None:
        """Record steps, in whichever requests they are."""
        self._since_trial += steps

    def served_steps(self, rows: int) -> float:
        """As how many plain steps one with drafts from elsewhere counts.

        The probes that follow cost at most one percent of the time.
        """
        level = self._estimates.level_seconds / self._costs(rows, rows)
        return min(_SERVED, self._every * PRICE / level) if level else _SERVED

    def idle_steps(self, batch: Sequence[Request]) -> int:
        """How many steps follow in which none of these requests probes, if none drafts."""
        left = (self._steps_left(request, len(batch), len(batch)) for request in batch)
        return max(0, int(min(left, default=float(self._every))) - 1)

    def probes(self, request: Request, rows: int, num_requests: int) -> bool:
        """Whether a request without drafts tries one in this step.

        Args:
            request: the request.
            rows: number of requests in the whole step.
            num_requests: number of those that may draft.
        """
        if self._steps_left(request, rows, num_requests) > 1:
            return False
        if self._is_trial(self._estimates.history(request)):
            if not within(request, 1).depth:
                return False  # the trial is left to another request
            self._since_trial = 0.0
        return True

    def _is_trial(self, history: History) -> bool:
        """Whether its next draft is its first one, of a price that is known."""
        return not history.tried and self._estimates.drafting.known

    def _steps_left(self, request: Request, rows: int, num_requests: int) -> float:
        """In how many steps a request without drafts tries one; up to 1, in this one."""
        estimates = self._estimates
        history = estimates.history(request)
        if not self._is_trial(history):
            soon = self._soon(history, rows) if estimates.stopping else self._every
            return soon - history.plain_steps
        nodes, plain = num_requests * estimates.first_nodes, self._costs(rows, rows)
        drafting = estimates.level_seconds + (estimates.reading_seconds(request) or 0.0)
        price = (drafting + self._costs(rows + nodes, rows)) / plain - 1
        unpaid = price / PRICE - self._since_trial
        return max(SOONEST - history.plain_steps, unpaid + 1 if unpaid > 0 else 0.0)

    def _soon(self, history: History, rows: int) -> float:
        """In how many plain steps a request tries again whose drafts may only have had bad luck.

        It need not wait for `probe_every` steps if that costs at most one percent of the time
        since its last draft.
        """
        estimates, plain = self._estimates, self._costs(rows, rows)
        rates = history.acceptance_rates(estimates.acceptance_rates)
        seconds = estimates.level_seconds + self._costs(rows + estimates.first_nodes, rows)
        lost = seconds / plain - 1 - history.draft_rate() * rates[0] / rows
        return min(self._every, max(_SOONEST_AGAIN, lost / PRICE))
