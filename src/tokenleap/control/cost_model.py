"""`cost_model`: draft as much as maximizes expected tokens per second; the default controller.

Three classes share the name. `CostModel` chooses how deep to draft before it is drafted,
`LookupModel` cuts lookups, which cost little, after they were made, and `HybridModel` chooses
between a lookup and a trained draft. What the steps teach is in `estimates.py`, and `planner.py`
finds the best step.

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
from collections.abc import Collection, Mapping, Sequence
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
    moved,
    smoothed,
)
from tokenleap.control.features import (
    AcceptanceRates,
    Fit,
    is_graft,
    path_probs,
    trained_part,
    with_claims,
    without_grafts,
)
from tokenleap.control.planner import (
    Expected,
    LookupPlan,
    Offer,
    Plan,
    Rest,
    best_plan,
    can_be_cut,
    offers_of,
    without_losses,
    worth_verifying,
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

_LONGEST_REST = 15
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


class _ByCosts(Controller):
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


class _Resting(_ByCosts, ABC):
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
        """Rest in that many steps that follow, at most `_LONGEST_REST`."""
        if steps:
            self._rest = Rest.of(batch, rows, min(steps, _LONGEST_REST))

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


class CostModel(_Resting):
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
        return max(0, math.ceil(self.costs.agreed(self._planning) / seconds / _PLANNING) - 1)

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


_POLLING = 0.002
"""Share of the time that may go into polling requests whose lookups do not pay."""

_TURN = 16
"""Fewest steps between two turns if parts of a batch are polled in turns. Where one pays, the next
step polls all."""

_FIRST_GAIN = 0.1
"""Assumed gain of a request's lookups before any were made: high enough to try them."""


@dataclass
class _State:
    """Observations of one request."""

    gain: float  # average saving of a lookup, as a share of the time of a plain pass
    fit: Fit  # whether its text is like those of others
    proposal: Draft | None = None  # the draft of the step's lookup, before it was cut
    new: bool = True  # whether nothing was looked up yet, so that the drafter must read the prompt

    @property
    def worth(self) -> float:
        """The gain that its lookups may be expected to have."""
        return self.gain * self.fit.factor


class LookupModel(_Resting):
    """Cuts drafts of at most `num_speculative_tokens` looked-up tokens to those that pay.

    A lookup takes little time, and how it found a token tells how likely that token is right. So
    the drafter proposes all tokens it finds, and `trim` keeps those that maximize expected tokens
    per second: the choice of gamma in Leviathan et al., section 3.5, made anew in every step.
    Looked-up tokens are deterministic (q is one-hot), so any function of the text may choose among
    them.

    Each token has a feature that says how it was found (`Draft.features`), and each feature has an
    acceptance rate. The tokens generated next show which proposals were right, including those that
    were cut. So nothing has to be drafted just to learn. All requests share the rates, and `Fit`
    says whether they fit a request.
    """

    def setup(self) -> None:
        super().setup()
        self._rates = AcceptanceRates()
        self._gain = _FIRST_GAIN  # of new requests' lookups
        self._states = PerRequest(lambda: _State(self._gain, self._rates.fit()))
        self._lookup_seconds = 0.0  # of one request's lookup; 0 while unknown
        self._price = 0.0  # the same in plain passes of this step
        self._planning = 0.0  # seconds of planning in this step
        self._step = 0
        self._next_poll = 0.0  # the next step that looks up for requests whose lookups do not pay
        self._turns = 1  # parts of the batch, one of which it polls
        self._polls = 0
        self._asked = PerRequest[_State]()  # of the requests with a lookup in this step, by key

    def budgets(self, batch: Sequence[Request], rows: int) -> list[Budget]:
        if (ahead := self._planned_ahead(batch, rows)) is not None:
            return ahead
        budgets = self.ask(batch, rows)
        self.rest_for(self.idle_steps(), batch, rows)
        return budgets

    def ask(self, batch: Sequence[Request], rows: int) -> list[Budget]:
        """Choose for whom to look up in this step."""
        self._asked, self._planning = PerRequest(), 0.0
        budgets = [NO_BUDGET] * len(batch)
        if not self.costs:  # a pass has to be timed first
            return budgets
        self._step += 1
        self._price = price = self._lookup_seconds / self.costs(rows, rows)
        turns, polled = self._turns, -1
        if self._step >= self._next_poll:
            self._polls += 1
            polled = self._polls % turns
            every = min(self.options.probe_every, len(batch) * price / _POLLING)
            self._turns = max(1, min(len(batch), int(every / _TURN)))
            self._next_poll = self._step + every / self._turns
        for row, request in enumerate(batch):
            state = self._states[request.key]
            if row % turns == polled or state.worth >= price:
                budgets[row] = within(request, self.num_speculative_tokens)
                self._asked[request.key] = state
        return budgets

    def idle_steps(self) -> int:
        """How many steps follow without any lookup; only valid after one."""
        if self._asked or not self.costs:
            return 0
        return max(0, math.ceil(self._next_poll - self._step) - 1)

    def rest(self, waiting: Sequence[int], steps: int) -> None:
        self._step += steps

    def trim(self, batch: Sequence[Request], drafts: Sequence[Draft], rows: int) -> list[Draft]:
        if not self._asked:
            return list(drafts)
        plan = self.plan(batch, drafts, rows)
        self.follow(batch, plan)
        if self._plain_step_is_due(1 + sum(plan.gains.values())):
            return [draft.only([]) for draft in drafts]
        trimmed = list(drafts)
        for row, nodes in plan.nodes.items():
            trimmed[row] = drafts[row].only(nodes)
        return trimmed

    def plan(self, batch: Sequence[Request], drafts: Sequence[Draft], rows: int) -> LookupPlan:
        """Choose the most probable tokens of all drafts, as many as pay; see `trim`."""
        began = clock.now()
        asked = [row for row, request in enumerate(batch) if request.key in self._asked]
        offers: list[Offer] = []
        for row in asked:
            state, proposal = self._asked[batch[row].key], drafts[row]
            state.proposal = proposal
            if proposal.features:
                probs = path_probs(proposal, self._rates.of, state.fit.factor)
                offers += offers_of(probs, row)
        plan, cost = worth_verifying(offers, Expected.plain(rows), self.costs, rows)
        nodes: dict[int, list[int]] = {row: [] for row in asked}
        tokens, gains = dict.fromkeys(asked, 0.0), dict.fromkeys(asked, 0.0)
        for offer in plan.taken:
            nodes[offer.row].append(offer.place)
            tokens[offer.row] += offer.tokens
            gains[offer.row] += offer.tokens / rows - cost
        self._planning += clock.now() - began
        return LookupPlan(nodes, tokens, gains, cost, plan.rate * self.costs(rows, rows) / rows)

    def follow(
        self, batch: Sequence[Request], plan: LookupPlan, left_out: Collection[int] = ()
    ) -> None:
        """Record what the lookups of a plan gain; those of some rows are not verified."""
        polled: list[float] = []
        for row, planned in plan.gains.items():
            gain = 0.0 if row in left_out else planned
            state = self._asked[batch[row].key]
            if state.worth < self._price:
                polled.append(gain)
            state.gain = moved(state.gain, gain)
            self._gain = moved(self._gain, gain, share=0.05)
        if sum(polled) > self._price * len(polled):
            self._turns, self._next_poll = 1, self._step + 1

    def observe(self, outcomes: Sequence[Outcome], draft_seconds: float) -> None:
        self._count_drafted(outcomes)
        if not self._asked:
            return
        began = clock.now()
        all_have_read = not any(state.new for state in self._asked.values())
        for outcome in outcomes:
            if state := self._asked.get(outcome.request.key):
                if state.proposal:
                    self._rates.learn(state.proposal, outcome, state.fit)
                state.proposal, state.new = None, False
        seconds = draft_seconds + self._planning + clock.now() - began
        seconds = self.costs.agreed(seconds / len(self._asked))
        if all_have_read:
            self._lookup_seconds = smoothed(self._lookup_seconds or seconds, seconds)

    def release(self, request: Request) -> None:
        if state := self._states.get(request.key):
            self._rates.ended(state.fit)
        super().release(request)


_BEST_RATE = 0.8
"""No trained draft is compared with a lookup that expects more tokens than this acceptance rate
would give."""


_MOST_ROWS = 4
"""Most requests of a step in which trained drafts are considered. With 8 on two cores, a pass is
bound by computing: trained drafts then cost more than they bring (docs/results.md)."""


@dataclass
class _Clock:
    """Seconds of this step's lookups and trained drafts, from one call of a method to the next."""

    lookups: float = 0.0
    trained: float = 0.0
    since: float = 0.0

    def lap(self) -> float:
        now = clock.now()
        seconds, self.since = now - self.since, now
        return seconds


class HybridModel(_ByCosts):
    """Lookups of at most `num_speculative_tokens` tokens, or trained drafts of at most `levels`.

    In every step and for every request, one of three is verified: the lookup, a trained draft, or
    nothing. `LookupModel` estimates the worth of lookups after they were made, and `CostModel` that
    of trained drafts before they are made. Both count expected tokens per second of measured time,
    so their estimates can be compared:

    1. Look up, and plan the step without trained drafts (`LookupModel.plan`).
    2. The requests whose lookup is worth less than a trained draft are candidates. Plan the step in
       which they have trained drafts and the others keep their lookups
       (`CostModel.budgets_beside`).
    3. Take the better plan of the two.

    A trained draft may contain the beginning of the lookup. The rest of the lookup is then appended
    to it, as far as that pays. How often such tokens are right is learnt by their features.

    Where trained drafts do not even pay without a lookup, the steps that follow have lookups only:
    considering more takes several percent of a small model's step.
    """

    def setup(self) -> None:
        levels = self.levels or [1] * self.num_speculative_tokens
        self._lookups = LookupModel(self.num_speculative_tokens, self.options, self.costs)
        self._trained = CostModel(
            sum(levels),
            self.options,
            self.costs,
            levels,
            level_share=self.level_share,
            stops_early=self.stops_early,
        )
        self._trained.be_patient()  # in the meantime there are lookups
        self._best_trained = sum(_BEST_RATE**level for level in range(1, len(levels) + 1))
        self._rates = AcceptanceRates()  # of tokens of trees, and of looked-up ones in any drafts
        self._rows = 1
        self._found: PerRequest[tuple[Draft, list[int]]] = PerRequest()  # lookup, nodes that pay
        self._drafts: PerRequest[Draft] = PerRequest()  # trained draft, before grafts were cut
        self._clock = _Clock()
        self._only_looks_up = False  # in this step

    # Before a step

    def budgets(self, batch: Sequence[Request], rows: int) -> list[Budget]:
        self._rows = rows
        self._only_looks_up = rows > _MOST_ROWS or self._trained.rests_on(batch, rows)
        if self._only_looks_up:
            budgets = self._lookups.budgets(batch, rows)
        else:
            self._lookups.wake()
            self._found, self._drafts = PerRequest(), PerRequest()
            budgets = self._lookups.ask(batch, rows)
        self.resting = self._only_looks_up and self._lookups.resting
        self._clock = _Clock(since=clock.now())
        return budgets

    def choose(
        self, batch: Sequence[Request], budgets: Sequence[Budget], found: Sequence[Draft]
    ) -> list[Budget]:
        self._clock.lookups += self._clock.lap()
        if self._only_looks_up:
            return [NO_BUDGET] * len(batch)
        rows = self._rows
        plan = self._lookups.plan(batch, found, rows)
        for row, (request, draft) in enumerate(zip(batch, found, strict=True)):
            self._found[request.key] = draft, plan.nodes.get(row, [])
        candidates = self._candidates(batch, plan)
        requests = [batch[row] for row in candidates]
        others = set(range(len(batch))).difference(candidates)
        self._trained.skip([batch[row] for row in sorted(others)])
        if not candidates:
            self._lookups.follow(batch, plan)
            self._clock.lap()
            return [NO_BUDGET] * len(batch)
        chosen = self._trained.budgets_beside(
            requests,
            rows,
            plan.expected(rows, left_out=candidates),
            plan.expected(rows),
            [bool(plan.nodes.get(row)) for row in candidates],
        )
        trained = [NO_BUDGET] * len(batch)
        for row, budget in zip(candidates, chosen, strict=True):
            trained[row] = budget
        drafting = [row for row, budget in enumerate(trained) if budget.chain]
        self._lookups.follow(batch, plan, left_out=drafting)
        if not drafting and not any(plan.nodes.values()):
            self._trained.rest_for(self._trained.idle_steps(requests), batch, rows)
        self._clock.lap()
        return trained

    def _candidates(self, batch: Sequence[Request], plan: LookupPlan) -> list[int]:
        """Rows of the requests whose lookup is worth less than a trained draft."""
        if len(batch) == 1 and plan.nodes.get(0) and not self._trained.may_exceed(plan.gain):
            return []
        rows = [row for row in range(len(batch)) if plan.tokens.get(row, 0.0) < self._best_trained]
        if len(batch) == 1 or not any(plan.nodes.values()):
            return rows
        gains = self._trained.gains(batch, self._rows, plan.node_cost)
        return [row for row in rows if not plan.nodes.get(row) or gains[row] > plan.gains[row]]

    def trim(self, batch: Sequence[Request], drafts: Sequence[Draft], rows: int) -> list[Draft]:
        if self._only_looks_up:
            return self._lookups.trim(batch, drafts, rows)
        self._clock.trained += self._clock.lap()
        trimmed, trained = list(drafts), list[int]()
        for row, (request, draft) in enumerate(zip(batch, drafts, strict=True)):
            found, nodes = self._found.get(request.key, (None, []))
            if draft is found:
                trimmed[row] = draft.only(nodes)
            elif draft.tree.num_drafted:
                trained.append(row)
        if not trained:
            return trimmed
        whole = self._trained.trees and all(can_be_cut(drafts[row]) for row in trained)
        offers, planned = list[Offer](), self._trained.planned
        for row in trained:
            draft = with_claims(drafts[row]) if whole else drafts[row]
            self._drafts[batch[row].key] = draft
            if draft.features:
                of_draft = offers_of(path_probs(draft, self._rates.of), row)
                offers += [o for o in of_draft if whole or is_graft(draft.features[o.place - 1])]
        beside = replace(self._trained.beside, seconds=planned.seconds) if whole else planned
        trimmed = without_losses(trimmed, offers, beside, self.costs, rows)
        self._clock.trained += self._clock.lap()
        return trimmed

    # After a step

    def observe(self, outcomes: Sequence[Outcome], draft_seconds: float) -> None:
        self._lookups.observe(outcomes, self._clock.lookups)
        if self._only_looks_up:
            return
        self._clock.lap()
        trained: list[Outcome] = []
        proposals: dict[int, Draft] = {}
        for outcome in outcomes:
            if draft := self._drafts.get(outcome.request.key):
                told = [node for node, feature in enumerate(draft.features, 1) if feature]
                self._rates.learn(draft.only(told), outcome)
                proposals[outcome.request.key] = trained_part(draft)
                trained.append(without_grafts(outcome))
        self._clock.trained += self._clock.lap()
        # The drafter's learning is left out: it must see every step, whether it drafts or not.
        self._trained.learn(trained, self._clock.trained, proposals)

    def release(self, request: Request) -> None:
        self._lookups.release(request)
        self._trained.release(request)
        super().release(request)
