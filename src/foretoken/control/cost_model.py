"""`cost_model`: draft as much as buys most expected tokens per second, nothing included.

Leviathan et al., theorem 3.8, with two refinements: the cost of verifying n positions is a measured
curve and not a constant, and alpha is each request's own running estimate. For a batch of B rows a
pass computes B * (1 + L) positions whatever each row drafts, so one length L serves all:

    L* = argmax_L  sum_r E(alpha_r, L) / (L * c + v(B * (1 + L))),
    E(alpha, L) = (1 - alpha^(L+1)) / (1 - alpha)                               (equation 1)

with c the measured seconds per drafted position and v the curve. Where L* is 0 the step is exactly
the plain one; once in `probe_every` such steps one short draft is made, so that a text that turns
predictable is noticed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from annotated_types import Ge

from foretoken.config import Config
from foretoken.control.base import Budget, Controller, within
from foretoken.request import Request

if TYPE_CHECKING:
    from foretoken.decode import Outcome, StepTimes

__all__ = ["CostModel", "expected_tokens"]

_MEMORY = 0.9
"""Weight of the past after each draft: an estimate over about the last ten drafts."""

_PRIOR = 2.0
"""Weight, in tokens, of what is known of other requests when a new one starts."""


@dataclass
class _Evidence:
    """Decayed counts of accepted and rejected tokens."""

    accepted: float = 0.0
    rejected: float = 0.0

    def add(self, accepted: int, rejected: int) -> None:
        self.accepted = _MEMORY * self.accepted + accepted
        self.rejected = _MEMORY * self.rejected + rejected

    def alpha(self, prior: float) -> float:
        tried = self.accepted + self.rejected
        return (self.accepted + _PRIOR * prior) / (tried + _PRIOR)


class CostModel(Controller):
    """Lengths from 0 to `num_speculative_tokens`, by measurement."""

    class Options(Config):
        """Options of `cost_model`: how rarely to probe while drafting does not pay."""

        probe_every: Annotated[int, Ge(2)] = 64

    name: ClassVar[str] = "cost_model"
    summary: ClassVar[str] = "the length with most expected tokens per second, zero included"
    needs_costs: ClassVar[bool] = True

    def setup(self) -> None:
        """See `Controller.setup`."""
        self._evidence: dict[int, _Evidence] = {}
        self._overall = _Evidence(1.0, 1.0)
        self._draft_cost: float | None = None  # seconds per drafted position, once measured
        self._plain_steps = 0

    def budgets(self, batch: Sequence[Request]) -> list[Budget]:
        """See `Controller.budgets`."""
        length = self._best_length(batch)
        self._plain_steps = 0 if length else self._plain_steps + 1
        assert isinstance(self.options, self.Options)
        if self._plain_steps >= self.options.probe_every:
            self._plain_steps = 0
            length = min(1, self.num_speculative_tokens)
        return [within(request, length) for request in batch]

    def _best_length(self, batch: Sequence[Request]) -> int:
        alphas = [self.alpha(request) for request in batch]
        best, best_rate = 0, 0.0
        for length in range(self.num_speculative_tokens + 1):
            tokens = sum(expected_tokens(alpha, length) for alpha in alphas)
            seconds = length * (self._draft_cost or 0.0) + self.costs(len(batch) * (1 + length))
            if tokens / seconds > best_rate:
                best, best_rate = length, tokens / seconds
        return best

    def alpha(self, request: Request) -> float:
        """The acceptance rate expected of a request's next draft."""
        evidence = self._evidence.get(request.key, _Evidence())
        return evidence.alpha(prior=self._overall.alpha(prior=0.5))

    def observe(self, outcomes: Sequence[Outcome], times: StepTimes) -> None:
        """Update alpha, the seconds per drafted position, and the curve of verification."""
        deepest = max(max(outcome.draft.tree.depths) for outcome in outcomes)
        if deepest:
            cost = times.draft / deepest
            known = self._draft_cost
            self._draft_cost = cost if known is None else known + 0.1 * (cost - known)
        widest = max(len(outcome.draft.tree) for outcome in outcomes)
        self.costs.observe(len(outcomes) * widest, times.verify)
        for outcome in outcomes:
            if outcome.draft.tree.num_drafted:
                counts = len(outcome.accepted.path), len(outcome.accepted.rejected)
                self._evidence.setdefault(outcome.request.key, _Evidence()).add(*counts)
                self._overall.add(*counts)

    def release(self, request: Request) -> None:
        """Forget the request's own estimate; what it taught about all stays."""
        self._evidence.pop(request.key, None)


def expected_tokens(alpha: float, length: int) -> float:
    """Leviathan et al., equation 1: tokens per step of a chain of this length."""
    if alpha >= 1:
        return length + 1.0
    return float((1 - alpha ** (length + 1)) / (1 - alpha))
