"""`cost_model`: draft as much as maximizes expected tokens per second; the default controller.

Drafters that look tokens up draft first and are cut afterwards: see `lookup_model.py`. What the
steps teach is in `estimates.py`. `planning.py` finds the best step, and `probing.py` says when
requests that do not draft try again.

The model is that of Leviathan et al., theorem 3.8, with refinements. The cost of a pass is a
measured curve and not a constant. Each request has its own running estimate of the acceptance rate
alpha, and of d, the probability that its drafter has a draft at all. A request that may draft to
depth l yields

    1 + d (E(l) - 1) tokens,   E(l) = 1 + p_1 + p_1 p_2 + ... + p_1 ... p_l

for 1 + d n(l) nodes and l levels of drafting. A chain has n(l) = l nodes and passes each level with
probability alpha, which gives equation 1. For a tree, n(l) is learnt from the drafter's drafts, and
each level has its own p_j: the probability that one of its nodes is accepted, given that one of the
level above was.

The nodes of a step go where they add most. Level j of request r adds d p_1 ... p_j expected tokens.
Levels are taken in descending order of expected tokens per node, as many as maximize the batch's
expected tokens per second. If no draft raises that rate, the step is plain decoding.

A request's first draft takes longer, because the drafter reads the whole text, and the source of an
encoder-decoder. Drafts begin only if they are expected to save that time in what is left of the
output; `lengths.py` judges by the outputs that have ended. The first few requests of a draft model
expect more of drafts than is known, and may pay a small share of their time. Until a later draft
has been timed, the step after a first draft drafts for the same requests again and for no others.

Estimates go stale while nothing is drafted, so requests without drafts probe. About one percent of
the time goes into plain steps, which keep the cost of a plain pass up to date.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, ClassVar

from annotated_types import Ge

from tokenleap.control.base import NO_BUDGET, Budget, Controller, Expected, within
from tokenleap.control.estimates import Estimates
from tokenleap.control.history import History
from tokenleap.control.planning import Plan, best_plan
from tokenleap.control.probing import PRICE, SOONEST, Probing
from tokenleap.control.rest import Rest
from tokenleap.core.config import Config

if TYPE_CHECKING:
    from tokenleap.decode import Outcome
    from tokenleap.request import Request

__all__ = ["CostModel"]

_PLANNED_AGAIN = 8
"""Steps after which a plan is made again although nothing was learnt: costs may have changed. As
long as nothing pays, the steps in between are not even asked."""

_MARGIN = 1.04
"""If it is patient, drafts have to promise this many times the tokens per second of a step without
them. Estimates are noisy, and the best of several is often one that is too high."""

_HOPELESS = 0.9
"""A plan that promises less than this part of the rate without drafts is far from paying."""

_EARLY_PRICE = 0.05
"""Share of the time left to an early request (`Estimates.is_early`) that reading may take, even if
drafts are not expected to save it."""


@dataclass
class _Planned:
    """A plan, and how long it is good for.

    Attributes:
        plan: the best step; its rate is without the time of drafting if that is to be measured.
        made_for: the arguments it was made for.
        gain: its tokens per second over those without drafts; 1 if there are drafts from elsewhere.
        steps: how many steps it was used for.
    """

    plan: Plan
    made_for: object
    gain: float
    steps: int = 0

    def holds(self, made_for: object) -> bool:
        """Whether it says enough about a step with these arguments.

        Requests come and go. If drafts were far from paying, they will not pay a few steps later.
        """
        return self.steps < _PLANNED_AGAIN and (self.made_for == made_for or self.gain < _HOPELESS)


class CostModel(Controller):
    """Drafts to a depth from 0 to `num_speculative_tokens`, or to a tree's deepest level."""

    class Options(Config):
        """Options of `cost_model`: a request tries again after this many steps without drafts."""

        probe_every: Annotated[int, Ge(2)] = 64

    name: ClassVar[str] = "cost_model"
    summary: ClassVar[str] = "drafts as much as gives the most expected tokens per second"
    needs_costs: ClassVar[bool] = True

    def setup(self) -> None:
        """See `Controller.setup`."""
        assert isinstance(self.options, self.Options)
        self._trees = self.levels is not None
        sizes = [1] * self.num_speculative_tokens if self.levels is None else self.levels
        self._levels = len(sizes)
        self._estimates = Estimates(
            sizes,
            self.costs,
            trees=self._trees,
            at_once=self.at_once,
            stops_early=self.stops_early,
        )
        self._probing = Probing(self.options.probe_every, self._estimates)
        self._gain = 1.0  # tokens per second as last planned, over those without drafts
        self._drafted_steps = 0  # since the last step without drafts
        self._price = 0.0  # of a drafted token in the last plan, in tokens; see `Stopping`
        self.patient = False  # whether to wait until drafts are clearly worth it
        self._plan: _Planned | None = None  # None if something was learnt since
        self.planned = Expected.plain(1)  # the last step of which depths were chosen
        self.idle = False  # whether the last step had no drafts because none pays
        self._rest = Rest()

    # Before a step

    def budgets(self, batch: Sequence[Request], rows: int) -> list[Budget]:
        """See `Controller.budgets`."""
        rest = self._rest
        if rest.goes_on(batch, rows):
            return [NO_BUDGET] * len(batch)
        if rest.taken:
            self.rest(rest.waiting, rest.taken)
        plain = Expected.plain(rows)
        budgets = self.budgets_beside(batch, rows, plain, plain, [False] * len(batch))
        self._rest = Rest()
        if steps := min(self.idle_steps(batch), _PLANNED_AGAIN - 1):
            self._rest = Rest(tuple(request.key for request in batch), rows, batch, steps)
        return budgets

    def budgets_beside(
        self,
        batch: Sequence[Request],
        rows: int,
        beside: Expected,
        instead: Expected,
        served: Sequence[bool],
    ) -> list[Budget]:
        """The budgets of some requests of a step in which others have drafts from elsewhere.

        Args:
            batch: these requests.
            rows: number of requests in the whole step.
            beside: the step if none of them drafts.
            instead: the step if this model drafts nothing. They draft if that is better.
            served: for each of them, whether it has a draft from elsewhere in that step.
        """
        histories = [self._estimates.history(request) for request in batch]
        depths = [0] * len(batch)
        self.idle = not batch
        if batch and self._levels and self.costs and not self._plain_step_is_due():
            measuring = self._estimates.drafting.bound and any(h.just_started for h in histories)
            depths = self._best_depths(batch, rows, beside, instead, measuring)
            depths = [
                depth or int(self._probing.probes(request, rows, len(batch)))
                for request, depth in zip(batch, depths, strict=True)
            ]
            self.idle &= not any(depths)
            if measuring:
                depths = [
                    depth if history.depth else 0
                    for history, depth in zip(histories, depths, strict=True)
                ]
        of_served = self._probing.served_steps(rows) if any(served) else 1.0
        counts = [of_served if has else 1.0 for has in served]
        self._probing.wait(max(counts, default=0.0))
        chosen = zip(batch, histories, depths, counts, strict=True)
        return [self._budget(*each) for each in chosen]

    def _plain_step_is_due(self) -> bool:
        """Whether it costs at most one percent of what drafts gained since the last plain step."""
        steps = self._drafted_steps
        return steps >= SOONEST and PRICE * steps >= self._gain - 1

    def skip(self, batch: Sequence[Request]) -> None:
        """These requests have drafts from elsewhere in this step, which cannot be beaten."""
        for request in batch:
            self._estimates.history(request).skip()

    def idle_steps(self, batch: Sequence[Request]) -> int:
        """How many steps follow without any draft or probe; only valid after one."""
        if not self.idle:
            return 0
        return self._probing.idle_steps(batch)

    def rest(self, batch: Sequence[Request], steps: int) -> None:
        """Record steps in which these requests had no drafts and it was not asked."""
        self._probing.wait(steps)
        self._estimates.rest(batch, steps)
        if self._plan is not None:
            self._plan.steps += steps

    def _budget(self, request: Request, history: History, depth: int, counts: float) -> Budget:
        budget = within(request, depth)
        history.allow(budget.depth, wanted=depth > 0, counts=counts)
        if self._trees and depth:
            budget = Budget(self.num_speculative_tokens, budget.depth)
        stopping = self._estimates.stopping
        if stopping and budget.depth > 1:
            least = stopping[request.params.greedy].least_path_prob(self._price)
            budget = replace(budget, min_path_prob=least)
        return budget

    def _best_depths(
        self,
        batch: Sequence[Request],
        rows: int,
        beside: Expected,
        instead: Expected,
        measuring: bool,
    ) -> list[int]:
        """The draft depth of each request; all are 0 if the step is better without."""
        made_for = tuple(request.key for request in batch), rows, beside, measuring
        rate, planned = instead.rate(self.costs, rows), self._plan
        if planned is None or not planned.holds(made_for):
            plan = self._best_plan(batch, rows, beside, measuring)
            # Beside drafts from elsewhere, which may be gone in the next step, nothing is hopeless.
            gain = 1.0 if self.patient else plan.rate / rate
            planned = self._plan = _Planned(plan, made_for, gain)
        planned.steps += 1
        plan = planned.plan
        self.planned = instead
        if planned.gain < _HOPELESS or plan.rate <= rate * (_MARGIN if self.patient else 1):
            self.idle = True
            return [0] * len(batch)
        saved = plan.expected.tokens * (1 / rate - 1 / plan.rate) / len(batch)
        per_token = (1 / rate - 1 / plan.rate) * rows / len(batch)
        depths = [
            depth if depth and self._worth_reading(request, rows, saved, per_token) else 0
            for request, depth in zip(batch, plan.depths, strict=True)
        ]
        if any(depths):
            self.planned = plan.expected
        return depths

    def _worth_reading(self, request: Request, rows: int, saved: float, per_token: float) -> bool:
        """Whether drafts are expected to save more time than reading the text takes.

        A text may end soon. If it is patient, drafts would have to have saved that time already:
        whoever waits so long loses at most twice as much as with foresight. Otherwise the lengths
        of earlier outputs say how much is left to save; early requests may lose a little to learn.

        Args:
            request: a request that may draft in this step.
            rows: number of requests in the whole step.
            saved: seconds that this would save.
            per_token: seconds that drafts save for each token of its output.
        """
        history = self._estimates.history(request)
        price = self._estimates.reading_seconds(request)
        if history.tried or price is None:
            return True
        if self.patient:
            history.missed += saved
            return history.missed >= price
        if self._estimates.is_early(history):
            per_token = max(per_token, _EARLY_PRICE * self.costs(rows, rows))
        generated = len(request.token_ids) - len(request.prompt_ids)
        return per_token * self._estimates.lengths.left(generated, request.remaining) > price

    def _best_plan(
        self, batch: Sequence[Request], rows: int, beside: Expected, measuring: bool
    ) -> Plan:
        """The best step with drafts.

        Args:
            batch: the R requests.
            rows: number of requests in the whole step.
            beside: see `budgets_beside`.
            measuring: whether to leave out the cost of drafting, because only an upper bound of it
                is known and this step measures it.
        """
        costs, estimates = self.costs, self._estimates
        per_level = 0.0 if measuring else estimates.level_seconds
        plan = best_plan(
            estimates.chances(batch),
            beside,
            lambda n: costs(n, rows),
            per_level,
            estimates.deeper,
        )
        self._gain = plan.rate * costs(rows, rows) / rows
        if self.stops_early:
            self._price = estimates.price_of_a_token(plan, rows, per_level)
        return plan

    def gains(self, batch: Sequence[Request], rows: int, node_cost: float) -> list[float]:
        """For each request the saving of its best draft: see `Chances.gains`."""
        level_cost = self._estimates.level_seconds / self.costs(rows, rows)
        chances = self._estimates.chances(batch)
        return chances.gains(rows, node_cost, level_cost, self._estimates.deeper)

    # After a step

    def observe(self, outcomes: Sequence[Outcome], draft_seconds: float) -> None:
        """Learn acceptance rates, the sizes of drafts, and the cost of drafting."""
        has_drafts = any(outcome.draft.tree.num_drafted for outcome in outcomes)
        self._drafted_steps = self._drafted_steps + 1 if has_drafts else 0
        if self._estimates.observe(outcomes, draft_seconds):
            self._plan = None

    def release(self, request: Request) -> None:
        """Forget the request; the estimates over all requests stay."""
        if request.key in self._rest.keys:
            rest, self._rest = self._rest, Rest()
            self.rest(rest.waiting, rest.taken)
        self._estimates.release(request)
