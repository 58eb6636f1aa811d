"""`cost_model`: draft where it buys most expected tokens per second, nothing included.

Leviathan et al., theorem 3.8, with three refinements: the cost of a pass is a measured curve over
its positions and not a constant, alpha is each request's own running estimate, and so is d, how
often its drafter has a guess at all. A request that may draft l tokens yields

    1 + d (E(alpha, l) - 1) tokens,   E(alpha, l) = (1 - alpha^(l+1)) / (1 - alpha)    (equation 1)

for 1 + d l positions. The nodes of a step go where they are worth most: the j-th token of request r
is accepted with alpha_r^j, so they are taken in this order, as many as give the batch most tokens
per second. Where that is none the step is exactly the plain one; a request that has drafted nothing
for `probe_every` steps tries one token, so that a text that turns predictable is noticed.
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

__all__ = ["CostModel"]

_MEMORY = 0.9
"""Weight of the past after each draft: an estimate over about the last ten drafts."""

_PRIOR = 2.0
"""Weight, in tokens, of what is known of other requests when a new one starts."""


@dataclass
class _Evidence:
    """Decayed counts: of accepted and rejected tokens, of steps that could draft and that did."""

    accepted: float = 0.0
    rejected: float = 0.0
    asked: float = 0.0
    answered: float = 0.0

    def add_draft(self, accepted: int, rejected: int) -> None:
        self.accepted = _MEMORY * self.accepted + accepted
        self.rejected = _MEMORY * self.rejected + rejected

    def add_answer(self, *, drafted: bool) -> None:
        self.asked = _MEMORY * self.asked + 1
        self.answered = _MEMORY * self.answered + drafted

    def alpha(self, prior: float) -> float:
        return (self.accepted + _PRIOR * prior) / (self.accepted + self.rejected + _PRIOR)

    def drafts(self, prior: float) -> float:
        return (self.answered + _PRIOR * prior) / (self.asked + _PRIOR)


class CostModel(Controller):
    """Lengths from 0 to `num_speculative_tokens`, by measurement."""

    class Options(Config):
        """Options of `cost_model`: how rarely to probe while drafting does not pay."""

        probe_every: Annotated[int, Ge(2)] = 64

    name: ClassVar[str] = "cost_model"
    summary: ClassVar[str] = "drafts where it buys most expected tokens per second, or nothing"
    needs_costs: ClassVar[bool] = True

    def setup(self) -> None:
        """See `Controller.setup`."""
        self._evidence: dict[int, _Evidence] = {}
        self._overall = _Evidence(accepted=1.0, rejected=1.0, asked=1.0, answered=1.0)
        self._draft_cost: float | None = None  # seconds per drafted position, once measured
        self._plain_steps: dict[int, int] = {}  # of each request since it could last draft

    def budgets(self, batch: Sequence[Request]) -> list[Budget]:
        """See `Controller.budgets`."""
        lengths = [
            length or self._probe(request)
            for request, length in zip(batch, self._best_lengths(batch), strict=True)
        ]
        for request, length in zip(batch, lengths, strict=True):
            plain = self._plain_steps.get(request.key, 0)
            self._plain_steps[request.key] = 0 if length else plain + 1
        return [within(request, length) for request, length in zip(batch, lengths, strict=True)]

    def _probe(self, request: Request) -> int:
        """A token now and then for a request that does not draft."""
        assert isinstance(self.options, self.Options)
        due = self._plain_steps.get(request.key, 0) >= self.options.probe_every - 1
        return min(1, self.num_speculative_tokens) if due else 0

    def _best_lengths(self, batch: Sequence[Request]) -> list[int]:
        """The first nodes in order of worth, up to where the rate is highest."""
        alphas = [self.alpha(request) for request in batch]
        drafts = [self.drafts(request) for request in batch]
        worth = sorted(
            (
                (alpha**depth, -depth, index)
                for index, alpha in enumerate(alphas)
                for depth in range(1, self.num_speculative_tokens + 1)
            ),
            reverse=True,
        )
        rows = len(batch)
        lengths, best = [0] * rows, [0] * rows
        tokens, nodes, expected = float(rows), 0, 0.0
        best_rate = tokens / self.costs(rows, rows)
        for accepted, minus_depth, index in worth:
            lengths[index] = -minus_depth
            tokens += drafts[index] * accepted
            nodes, expected = nodes + 1, expected + drafts[index]
            drafting = max(lengths) * (self._draft_cost or 0.0)
            rate = tokens / (drafting + self._seconds(rows, nodes, expected))
            if rate > best_rate:
                best, best_rate = list(lengths), rate
        return best

    def _seconds(self, rows: int, nodes: int, expected: float) -> float:
        """What a pass costs when this many nodes may be drafted, of which some are expected."""
        if rows == 1:  # all of them or none
            share = expected / nodes
            return (1 - share) * self.costs(1) + share * self.costs(1 + nodes)
        low = int(expected)
        below, above = (self.costs(rows + low + more, rows) for more in (0, 1))
        return below + (expected - low) * (above - below)

    def alpha(self, request: Request) -> float:
        """The acceptance rate expected of a request's next draft."""
        evidence = self._evidence.get(request.key, _Evidence())
        return evidence.alpha(prior=self._overall.alpha(prior=0.5))

    def drafts(self, request: Request) -> float:
        """How likely the drafter is to have a guess for the request."""
        evidence = self._evidence.get(request.key, _Evidence())
        return evidence.drafts(prior=self._overall.drafts(prior=0.5))

    def observe(self, outcomes: Sequence[Outcome], times: StepTimes) -> None:
        """Update alpha, d, the seconds per drafted position, and the cost of passes."""
        deepest = max(max(outcome.draft.tree.depths) for outcome in outcomes)
        if deepest:
            cost = times.draft / deepest
            known = self._draft_cost
            self._draft_cost = cost if known is None else known + 0.1 * (cost - known)
        positions = sum(len(outcome.draft.tree) for outcome in outcomes)
        self.costs.observe(positions, times.verify, len(outcomes))
        for outcome in outcomes:
            drafted = outcome.draft.tree.num_drafted > 0
            own = self._evidence.setdefault(outcome.request.key, _Evidence())
            for evidence in (own, self._overall):
                if not self._plain_steps.get(outcome.request.key):
                    evidence.add_answer(drafted=drafted)
                if drafted:
                    counts = len(outcome.accepted.path), len(outcome.accepted.rejected)
                    evidence.add_draft(*counts)

    def release(self, request: Request) -> None:
        """Forget the request's own estimates; what they taught about all stays."""
        self._evidence.pop(request.key, None)
        self._plain_steps.pop(request.key, None)
