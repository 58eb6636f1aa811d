"""`cost_model`: draft as much as maximizes expected tokens per second; the default controller.

Three classes share the name. `CostModel`, here, chooses how deep to draft before it is drafted.
`lookup_models.py` has `LookupModel`, which cuts lookups after they were made, and `HybridModel`,
which chooses between a lookup and a trained draft. What the steps teach is in `estimates.py`, and
`planner.py` finds the best step.

The model is that of Leviathan et al., theorem 3.8, with refinements. The cost of a pass is a
measured curve and not a constant. Each request has its own running estimate of the acceptance rate
alpha, and of d, the probability that its drafter has a draft at all. A request that may draft to
depth l yields

    1 + d (E(l) - 1) tokens,   E(l) = 1 + p_1 + p_1 p_2 + ... + p_1 ... p_l

for 1 + d n(l) nodes and l levels of drafting. A chain has n(l) = l nodes and passes each level with
probability alpha, which gives equation 1. For a tree, n(l) is learnt from the drafter's drafts, and
each level has its own p_j: the probability that one of its nodes is accepted, given that one of the
level above was. So level j of request r adds d p_1 ... p_j expected tokens to the batch.

If no draft raises the batch's expected tokens per second, the step is plain decoding.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, ClassVar

from annotated_types import Ge

from tokenleap.control.base import NO_BUDGET, Budget, Controller, fitted, within
from tokenleap.control.estimates import (
    PRICE,
    SERVED,
    SOONEST,
    Estimates,
    History,
    Probing,
)
from tokenleap.control.features import (
    AcceptanceRates,
    path_probs,
    with_claims,
)
from tokenleap.control.planner import (
    Expected,
    Offer,
    Plan,
    Rest,
    best_plan,
    can_be_cut,
    offers_of,
    without_losses,
)
from tokenleap.core import clock
from tokenleap.core.config import Config
from tokenleap.core.per_request import PerRequest

if TYPE_CHECKING:
    from tokenleap.core.tree import Draft
    from tokenleap.decode import Outcome
    from tokenleap.request import Request

_PLANNED_AGAIN = 8
"""Fewest steps after which a plan is made again although nothing was learnt: costs may have
changed. Planning takes one percent of the time, or less. As long as nothing pays, the steps in
between are not even asked."""

_PLANNING = 0.03
"""Share of the time that plans may take in steps with drafts: if a pass takes less than one or two
milliseconds, several steps have the same budgets."""

LONGEST_REST = 15
"""Most steps in a row in which nothing is looked up, or no trained draft considered, because none
paid in the step before: that takes a few percent of a pass."""

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
        gain: its tokens per second over those without drafts; 1 if there are drafts from elsewhere.
        lasts: steps after which it is made again although nothing was learnt.
    """

    plan: Plan
    made_for: object
    gain: float
    lasts: int
    steps: int = 0

    def holds(self, made_for: object) -> bool:
        """Whether it says enough about a step with these arguments.

        Requests come and go. If drafts were far from paying, they will not pay a few steps later.
        """
        return not self.is_old and (self.made_for == made_for or self.gain < _HOPELESS)

    @property
    def is_old(self) -> bool:
        return self.steps >= self.lasts


class ByCosts(Controller):
    """Base of the three."""

    class Options(Config):
        """Options of `cost_model`.

        Args:
            probe_every: a request tries again after this many steps without drafts.
        """

        probe_every: Annotated[int, Ge(2)] = 64

    options: Options
    name: ClassVar[str] = "cost_model"
    summary: ClassVar[str] = "drafts as much as gives the most expected tokens per second"
    needs_costs: ClassVar[bool] = True
    plain_stretch: ClassVar[int] = 1
    """Steps without drafts in a row whenever such a step is due."""
    _drafted_steps = 0  # since the last step without drafts
    _plain_left = 0  # further steps of such a stretch

    def _plain_step_is_due(self, gain: float) -> bool:
        """Whether it costs at most one percent of what drafts gained since the last plain step.

        Args:
            gain: tokens per second over those without drafts.
        """
        if self._plain_left:
            self._plain_left -= 1
            return True
        steps, stretch = self._drafted_steps, self.plain_stretch
        due = steps >= SOONEST and PRICE * steps >= stretch * (gain - 1)
        if due:
            self._plain_left = stretch - 1
        return due

    def _count_drafted(self, outcomes: Sequence[Outcome]) -> None:
        drafted = any(outcome.draft.tree.num_drafted for outcome in outcomes)
        self._drafted_steps = self._drafted_steps + 1 if drafted else 0


class Resting(ByCosts, ABC):
    """One that rests: a plan takes time, and where nothing pays, nothing will a step later."""

    def setup(self) -> None:
        self._rest = Rest()

    def rests_on(self, batch: Sequence[Request], rows: int) -> bool:
        """Whether the step of this batch was planned with an earlier one; else the rest ends."""
        ahead = self._rest.goes_on(batch, rows)
        if not ahead:
            self.wake()
        return ahead

    def rest_for(self, steps: int, batch: Sequence[Request], rows: int) -> None:
        """Rest in that many steps that follow, at most `LONGEST_REST`."""
        if steps:
            self._rest = Rest.of(batch, rows, min(steps, LONGEST_REST))

    def wake(self) -> None:
        """End the rest."""
        if self._rest.taken:
            self.rest(self._rest.waiting, self._rest.taken)
        self._rest = Rest()

    def _planned_ahead(self, batch: Sequence[Request], rows: int) -> list[Budget] | None:
        """The budgets of a step that was planned with an earlier one."""
        ahead, budgets = self.rests_on(batch, rows), self._rest.budgets
        self.resting = ahead and not budgets
        if self.resting:
            return [NO_BUDGET] * len(batch)
        return [fitted(*each) for each in zip(budgets, batch, strict=True)] if ahead else None

    @abstractmethod
    def rest(self, waiting: Sequence[int], steps: int) -> None:
        """Record steps in which these requests, by their keys, had no drafts and were not asked."""


class CostModel(Resting):
    """Drafts to a depth from 0 to `num_speculative_tokens`, or to a tree's deepest level.

    Of a tree of most probable tokens, only the nodes that pay are verified: how often nodes of such
    a probability were right is known after drafting, and learnt from all of them.

    A request's first draft takes longer, because the drafter reads the whole text, and the source
    of an encoder-decoder. Drafts begin only if they are expected to save that time in what is left
    of the output, judged by the outputs that have ended. The first few requests of a draft model
    expect more of drafts than is known, and may pay a small share of their time. Until a later
    draft has been timed, the step after a first draft drafts for the same requests again and for no
    others.

    Estimates go stale while nothing is drafted, so requests without drafts probe. About one percent
    of the time goes into plain steps, three in a row, to keep the cost of a plain pass up to date.
    """

    plain_stretch: ClassVar[int] = 3

    def setup(self) -> None:
        super().setup()
        self.trees = self.levels is not None
        sizes = [1] * self.num_speculative_tokens if self.levels is None else self.levels
        self._levels = len(sizes)
        self._estimates = Estimates(
            sizes,
            self.costs,
            trees=self.trees,
            level_share=self.level_share,
            stops_early=self.stops_early,
        )
        self._probing = Probing(self.options.probe_every, self._estimates)
        self._rates = AcceptanceRates()  # of the tokens of trees, by their claims
        self._proposals: PerRequest[Draft] = PerRequest()  # this step's trees, before they were cut
        self._gain = 1.0  # tokens per second as last planned, over those without drafts
        self._planning = self._learning = 0.0  # seconds of planning this step, of the last learning
        self._chosen: Sequence[int] = ()  # depths in the step's plan, without probes
        self._price = 0.0  # of a drafted token in the last plan, in tokens; see `Stopping`
        self._plan: _Planned | None = None  # None if something was learnt since
        self.planned = Expected.plain(1)  # the last step of which depths were chosen
        self.beside = self.planned  # the same without these drafts
        self.idle = False  # whether the last step had no drafts because none pays

    def be_patient(self) -> None:
        """Wait until drafts are clearly worth it, as beside lookups."""
        self._probing.patient = True

    # Before a step

    def budgets(self, batch: Sequence[Request], rows: int) -> list[Budget]:
        self._planning = 0.0
        if (ahead := self._planned_ahead(batch, rows)) is not None:
            if not self.resting:
                for request, budget in zip(batch, ahead, strict=True):
                    history = self._estimates.history(request)
                    history.allow(budget.depth, wanted=budget.depth > 0)
            return ahead
        plain, began = Expected.plain(rows), clock.now()
        budgets = self.budgets_beside(batch, rows, plain, plain, [False] * len(batch))
        self._planning = clock.now() - began
        if steps := self.idle_steps(batch):
            longest = _PLANNED_AGAIN if self._plan is None else self._plan.lasts
            self._rest = Rest.of(batch, rows, min(steps, longest - 1))
        elif steps := self._steps_alike(rows):
            chosen = zip(self._chosen, budgets, strict=True)
            self._rest = Rest.of(batch, rows, steps, [b if c else NO_BUDGET for c, b in chosen])
        return budgets

    def _steps_alike(self, rows: int) -> int:
        """How many further steps have the budgets of the plan, because planning takes too long."""
        if not any(self._chosen) or self._estimates.drafting.bound:
            return 0
        planned = self.planned
        seconds = planned.seconds + planned.verifying(self.costs, rows)
        steps = math.ceil(self.costs.agreed(self._planning) / seconds / _PLANNING)
        return min(max(0, steps - 1), LONGEST_REST)

    def budgets_beside(
        self,
        batch: Sequence[Request],
        rows: int,
        beside: Expected,
        instead: Expected,
        served: Sequence[bool],
    ) -> list[Budget]:
        """The budgets of some requests of a step in which others have drafts from elsewhere."""
        histories = [self._estimates.history(request) for request in batch]
        depths = [0] * len(batch)
        self.idle, self._chosen, self.beside = not batch, (), beside
        if batch and self._levels and self.costs and not self._plain_step_is_due(self._gain):
            measuring = self._estimates.drafting.bound and any(h.just_started for h in histories)
            self._chosen = self._best_depths(batch, rows, beside, instead, measuring)
            depths = [
                depth or int(self._probing.probes(request, rows, len(batch)))
                for request, depth in zip(batch, self._chosen, strict=True)
            ]
            self.idle &= not any(depths)
            if measuring:
                depths = [
                    depth if history.depth else 0
                    for history, depth in zip(histories, depths, strict=True)
                ]
        counts = [SERVED if has else 1.0 for has in served]
        self._probing.wait(max(counts, default=0.0))
        chosen = zip(batch, histories, depths, counts, strict=True)
        return [self._budget(*each) for each in chosen]

    def skip(self, batch: Sequence[Request]) -> None:
        for request in batch:
            self._estimates.history(request).skip()
        if self._plan is not None:
            self._plan.steps += 1

    def may_exceed(self, gain: float) -> bool:
        """Whether drafts for one request could be better: by the last plan, if it is not old."""
        return self._plan is None or self._plan.is_old or self._gain > gain

    def idle_steps(self, batch: Sequence[Request]) -> int:
        """How many steps follow without any draft or probe; only valid after one."""
        if not self.idle:
            return 0
        return self._probing.idle_steps(batch)

    def rest(self, waiting: Sequence[int], steps: int) -> None:
        self._probing.wait(steps)
        self._estimates.rest(waiting, steps)
        if self._plan is not None:
            self._plan.steps += steps

    def _budget(self, request: Request, history: History, depth: int, counts: float) -> Budget:
        budget = within(request, depth)
        history.allow(budget.depth, wanted=depth > 0, counts=counts)
        if self.trees and depth:
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
        history = self._estimates.history  # those that have not drafted are all alike
        keys = tuple(request.key if history(request).tried else None for request in batch)
        made_for = keys, rows, beside, measuring
        rate, planned = instead.rate(self.costs, rows), self._plan
        if planned is None or not planned.holds(made_for):
            began = clock.now()
            plan = self._best_plan(batch, rows, beside, measuring)
            seconds = self.costs.agreed(clock.now() - began)
            lasts = max(_PLANNED_AGAIN, int(seconds / self.costs(rows, rows) / PRICE))
            # Beside drafts from elsewhere, which may be gone in the next step, nothing is hopeless.
            gain = 1.0 if self._probing.patient else plan.rate / rate
            planned = self._plan = _Planned(plan, made_for, gain, lasts)
        planned.steps += 1
        plan = planned.plan
        self.planned = instead
        margin = _MARGIN if self._probing.patient else 1
        if planned.gain < _HOPELESS or plan.rate <= rate * margin:
            self.idle = True
            return [0] * len(batch)
        saved = plan.expected.tokens * (1 / rate - 1 / plan.rate) / len(batch)
        per_token = (1 / rate - 1 / plan.rate) * rows / len(batch)
        depths = [
            depth if depth and self._worth_reading(request, rows, saved, per_token) else 0
            for request, depth in zip(batch, plan.depths(len(batch)), strict=True)
        ]
        if any(depths):
            self.planned = plan.expected
        else:
            self.idle = not self._probing.patient  # else `missed` has to grow
        return depths

    def _worth_reading(self, request: Request, rows: int, saved: float, per_token: float) -> bool:
        """Whether drafts are expected to save more time than reading the text takes.

        A text may end soon. If it is patient, drafts would have to have saved that time already:
        waiting so long loses at most twice as much as with foresight. Otherwise the lengths
        of earlier outputs say how much is left to save; early requests may lose a little to learn.
        """
        history = self._estimates.history(request)
        price = self._estimates.reading_seconds(request)
        if history.tried or price is None:
            return True
        if self._probing.patient:
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
            measuring: whether to leave out the cost of drafting, because only an upper bound of it
                is known and this step measures it.
        """
        costs, estimates = self.costs, self._estimates
        per_level = 0.0 if measuring else estimates.level_seconds
        offers = estimates.chances(batch).offers()
        plan = best_plan(offers, beside, costs, rows, per_level=per_level)
        self._gain = plan.rate * costs(rows, rows) / rows
        if self.stops_early:
            self._price = estimates.price_of_a_token(plan, len(batch), rows, per_level)
        return plan

    def gains(self, batch: Sequence[Request], rows: int, node_cost: float) -> list[float]:
        level_cost = self._estimates.level_seconds / self.costs(rows, rows)
        chances = self._estimates.chances(batch)
        return chances.gains(rows, node_cost, level_cost)

    def trim(self, batch: Sequence[Request], drafts: Sequence[Draft], rows: int) -> list[Draft]:
        if not self.trees:
            return list(drafts)
        began = clock.now()
        offers = list[Offer]()
        for row, (request, draft) in enumerate(zip(batch, drafts, strict=True)):
            if can_be_cut(draft):
                self._proposals[request.key] = proposal = with_claims(draft)
                offers += offers_of(path_probs(proposal, self._rates.of), row)
        beside = replace(self.beside, seconds=self.planned.seconds)
        trimmed = without_losses(drafts, offers, beside, self.costs, rows)
        self._planning += clock.now() - began
        return trimmed

    # After a step

    def observe(self, outcomes: Sequence[Outcome], draft_seconds: float) -> None:
        for outcome in outcomes:
            proposal = self._proposals.get(outcome.request.key)
            if proposal is not None:
                self._rates.learn(proposal, outcome)
        self.learn(outcomes, draft_seconds, self._proposals)
        self._proposals.clear()

    def learn(
        self, outcomes: Sequence[Outcome], draft_seconds: float, proposals: Mapping[int, Draft]
    ) -> None:
        """Learn from a step what drafts bring and cost; see `Estimates.observe`."""
        self._count_drafted(outcomes)
        began = clock.now()
        seconds = draft_seconds + self._planning + self._learning
        if self._estimates.observe(outcomes, seconds, proposals):
            self._plan = None
            self._learning = clock.now() - began

    def release(self, request: Request) -> None:
        self._estimates.release(request)
