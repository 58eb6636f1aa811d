"""`cost_model`: draft as much as maximizes expected tokens per second; the default controller.

Drafters that look tokens up draft first and are cut afterwards: see `lookup_model.py`. What is
learnt from the steps is in `history.py` (acceptance) and `drafting_costs.py`. `planning.py` finds
the best step.

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
output; `lengths.py` judges by the outputs that have ended. Until a later draft has been timed, the
step after a first draft drafts for the same requests again and for no others.

Estimates go stale while nothing is drafted. So a request that has drafted nothing for `probe_every`
steps drafts one level; this notices a text that has become predictable. With a drafter whose chains
end early, it does so as soon as that costs one percent of the time since its last draft. Requests
that have never drafted pay for trials together: one of them tries once its first draft, reading
included, costs at most one percent of the steps since the last trial. About one percent of the time
goes into plain steps, which keep the cost of a plain pass up to date.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import mul
from typing import TYPE_CHECKING, Annotated, ClassVar

from annotated_types import Ge

from foretoken.control.base import NO_BUDGET, Budget, Controller, Expected, within
from foretoken.control.draft_sizes import DraftSizes
from foretoken.control.drafting_costs import DraftingCosts, levels_of_one, reading
from foretoken.control.history import History
from foretoken.control.lengths import OutputLengths
from foretoken.control.planning import Chances, Plan, best_plan
from foretoken.control.rest import Rest
from foretoken.control.stopping import Stopping
from foretoken.core.config import Config

if TYPE_CHECKING:
    from foretoken.decode import Outcome
    from foretoken.request import Request

__all__ = ["CostModel"]

_MEMORY_OF_ONE, _MEMORY_OF_ALL = 0.9, 0.96
"""Weight of the past after each draft, in the estimates of one request and of all requests."""

_PRIOR_OF_STOPPING = 4.0
"""Weight of the prior acceptance rates of chains that may end early, in drafts. A request's first
drafts are often wrong: answers begin with phrases of which there are many."""

_PRICE, _SOONEST = 0.01, 8
"""Share of the time that plain steps and first drafts may cost; fewest steps between two."""

_SOONEST_AGAIN = 2
"""Fewest steps until a request tries again, if its chains end early."""

_PLANNED_AGAIN = 8
"""Steps after which a plan is made again although nothing was learnt: costs may have changed. As
long as nothing pays, the steps in between are not even asked."""

_SERVED = 4.0
"""A step with a draft from elsewhere counts as at most so many plain ones until the next probe: a
model that might be better is probed sooner than one that might not pay at all."""

_MARGIN = 1.04
"""If it is patient, drafts have to promise this many times the tokens per second of a step without
them. Estimates are noisy, and the best of several is often one that is too high."""


@dataclass
class _Planned:
    """A plan, and how long it is good for.

    Attributes:
        plan: the best step; its rate is without the time of drafting if that is to be measured.
        made_for: the arguments it was made for.
        steps: how many steps it was used for.
    """

    plan: Plan
    made_for: object
    steps: int = 0


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
        self._probe_every = self.options.probe_every
        self._trees = self.levels is not None
        # By whether requests are greedy: products of probabilities for these, and with the rule
        # `coupled`, products of clarity for the others.
        self._stopping = {True: Stopping(), False: Stopping()} if self.stops_early else {}
        sizes = [1] * self.num_speculative_tokens if self.levels is None else self.levels
        self._sizes = DraftSizes(sizes)
        self._levels = len(sizes)
        self._histories: dict[int, History] = {}
        self._overall = self._new(_MEMORY_OF_ALL)
        self._drafting_costs = DraftingCosts()
        self._lengths = OutputLengths()
        self._steps_without_trial = 0.0  # since a request tried its first draft
        self._gain = 1.0  # tokens per second as last planned, over those without drafts
        self._drafted_steps = 0  # since the last step without drafts
        self._price = 0.0  # of a drafted token in the last plan, in tokens; see `Stopping`
        self.patient = False  # whether to wait until drafts are clearly worth it
        self._plan: _Planned | None = None  # None if something was learnt since
        self.planned = Expected.plain(1)  # the last step of which depths were chosen
        self.idle = False  # whether the last step had no drafts because none pays
        self._rest = Rest()

    def _new(self, memory: float) -> History:
        if self._stopping:
            return History(memory, self._levels, alike=False, prior_weight=_PRIOR_OF_STOPPING)
        return History(memory, self._levels, alike=not self._trees)

    def _history(self, request: Request) -> History:
        history = self._histories.get(request.key)
        if history is None:
            history = self._histories[request.key] = self._new(_MEMORY_OF_ONE)
        return history

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
        histories = [self._history(request) for request in batch]
        depths = [0] * len(batch)
        self.idle = not batch
        if batch and self._levels and self.costs and not self._plain_step_is_due():
            measuring = self._drafting_costs.bound and any(h.just_started for h in histories)
            depths = self._best_depths(batch, rows, beside, instead, measuring)
            depths = self._probing(batch, depths, rows)
            self.idle &= not any(depths)
            if measuring:
                depths = [
                    depth if history.depth else 0
                    for history, depth in zip(histories, depths, strict=True)
                ]
        of_served = self._served_steps(rows) if any(served) else 1.0
        counts = [of_served if has else 1.0 for has in served]
        self._steps_without_trial += max(counts, default=0.0)
        chosen = zip(batch, histories, depths, counts, strict=True)
        return [self._budget(*each) for each in chosen]

    def _served_steps(self, rows: int) -> float:
        """As how many plain steps one with drafts from elsewhere counts.

        The probes that follow cost at most one percent of the time.
        """
        level = self._level_seconds / self.costs(rows, rows)
        return min(_SERVED, self._probe_every * _PRICE / level) if level else _SERVED

    @property
    def _level_seconds(self) -> float:
        """Seconds of drafting one level of one request."""
        return self._drafting_costs.level * self.costs(1, 1)

    def _reading_seconds(self, request: Request) -> float | None:
        """Seconds that the first draft of a request takes longer; None if not known yet."""
        token = self._drafting_costs.token
        return None if token is None else token * reading(request) * self.costs(1, 1)

    def _plain_step_is_due(self) -> bool:
        """Whether it costs at most one percent of what drafts gained since the last plain step."""
        steps = self._drafted_steps
        return steps >= _SOONEST and _PRICE * steps >= self._gain - 1

    def skip(self, batch: Sequence[Request]) -> None:
        """These requests have drafts from elsewhere in this step, which cannot be beaten."""
        for request in batch:
            self._history(request).skip()

    def idle_steps(self, batch: Sequence[Request]) -> int:
        """How many steps follow without any draft or probe; only valid after one."""
        if not self.idle:
            return 0
        left = (self._steps_to_probe(request, len(batch), len(batch)) for request in batch)
        return max(0, int(min(left, default=float(self._probe_every))) - 1)

    def rest(self, batch: Sequence[Request], steps: int) -> None:
        """Record steps in which these requests had no drafts and it was not asked."""
        self._steps_without_trial += steps
        for request in batch:
            if history := self._histories.get(request.key):
                history.rest(steps)
        if self._plan is not None:
            self._plan.steps += steps

    def _budget(self, request: Request, history: History, depth: int, counts: float) -> Budget:
        budget = within(request, depth)
        history.allow(budget.depth, wanted=depth > 0, counts=counts)
        if self._trees and depth:
            budget = Budget(self.num_speculative_tokens, budget.depth)
        if self._stopping and budget.depth > 1:
            least = self._stopping[request.params.greedy].least_path_prob(self._price)
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
        planned = self._plan
        if planned is None or planned.made_for != made_for or planned.steps >= _PLANNED_AGAIN:
            planned = _Planned(self._best_plan(batch, rows, beside, measuring), made_for)
            self._plan = planned
        planned.steps += 1
        plan = planned.plan
        self.planned = instead
        rate = instead.rate(self.costs, rows)
        if plan.rate <= rate * (_MARGIN if self.patient else 1):
            self.idle = True
            return [0] * len(batch)
        saved = plan.expected.tokens * (1 / rate - 1 / plan.rate) / len(batch)
        per_token = (1 / rate - 1 / plan.rate) * rows / len(batch)
        depths = [
            depth if depth and self._worth_reading(request, saved, per_token) else 0
            for request, depth in zip(batch, plan.depths, strict=True)
        ]
        if any(depths):
            self.planned = plan.expected
        return depths

    def _worth_reading(self, request: Request, saved: float, per_token: float) -> bool:
        """Whether drafts are expected to save more time than reading the text takes.

        A text may end soon. If it is patient, drafts would have to have saved that time already:
        whoever waits so long loses at most twice as much as with foresight. Otherwise the lengths
        of earlier outputs say how much is left to save.

        Args:
            request: a request that may draft in this step.
            saved: seconds that this would save.
            per_token: seconds that drafts save for each token of its output.
        """
        history, price = self._history(request), self._reading_seconds(request)
        if history.tried or price is None:
            return True
        if self.patient:
            history.missed += saved
            return history.missed >= price
        generated = len(request.token_ids) - len(request.prompt_ids)
        return per_token * self._lengths.left(generated, request.remaining) > price

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
        costs = self.costs
        per_level = 0.0 if measuring else self._level_seconds
        plan = best_plan(
            self._chances(batch),
            beside,
            lambda n: costs(n, rows),
            per_level,
            at_once=self.at_once,
        )
        self._gain = plan.rate * costs(rows, rows) / rows
        if self._stopping:
            self._price = self._price_of_a_token(plan, rows, per_level)
        return plan

    def _price_of_a_token(self, plan: Plan, rows: int, per_level: float) -> float:
        """What drafting and verifying one more token of a draft takes, in tokens of the plan."""
        deepest, drafting = max(plan.depths), sum(depth > 0 for depth in plan.depths)
        if deepest < 2:
            return 0.0
        fewest, most = rows + drafting, rows + sum(plan.depths)
        node = (self.costs(most, rows) - self.costs(fewest, rows)) / (most - fewest)
        shared = levels_of_one(1.0, float(drafting)) / drafting
        return plan.rate * (node + per_level * shared * (not self.at_once))

    def _chances(self, batch: Sequence[Request]) -> Chances:
        nodes = self._sizes.of_levels
        prior, prior_drafts = self._overall.acceptance_rates(), self._overall.draft_rate()
        histories = [self._history(request) for request in batch]
        drafts = [history.draft_rate(prior_drafts) for history in histories]
        passed = [list(accumulate(h.acceptance_rates(prior), mul)) for h in histories]
        drafted = nodes if self._stopping else [1.0] * len(nodes)
        return Chances(drafts, passed, nodes, drafted)

    def gains(self, batch: Sequence[Request], rows: int, node_cost: float) -> list[float]:
        """For each request the saving of its best draft: see `Chances.gains`."""
        level_cost = self._level_seconds / self.costs(rows, rows)
        return self._chances(batch).gains(rows, node_cost, level_cost, at_once=self.at_once)

    def _probing(self, batch: Sequence[Request], depths: Sequence[int], rows: int) -> list[int]:
        """These depths, plus one level now and then for requests that do not draft."""
        return [
            depth or int(self._probes(request, rows, len(batch)))
            for request, depth in zip(batch, depths, strict=True)
        ]

    def _probes(self, request: Request, rows: int, num_requests: int) -> bool:
        """Whether a request without drafts tries one in this step."""
        if self._steps_to_probe(request, rows, num_requests) > 1:
            return False
        if not self._history(request).tried and self._drafting_costs.known:
            if not within(request, 1).depth:
                return False  # the trial is left to another request
            self._steps_without_trial = 0.0
        return True

    def _steps_to_probe(self, request: Request, rows: int, num_requests: int) -> float:
        """In how many steps a request without drafts tries one; up to 1, in this one.

        One that has never drafted tries as soon as a first draft costs at most one percent of all
        steps since the last such trial, in whichever requests they were. Many short requests
        thus pay for one trial together.
        """
        history = self._history(request)
        if history.tried or not self._drafting_costs.known:
            soon = self._probe_soon(history, rows) if self._stopping else self._probe_every
            return soon - history.plain_steps
        nodes, plain = num_requests * self._sizes.of_levels[0], self.costs(rows, rows)
        drafting = self._level_seconds + (self._reading_seconds(request) or 0.0)
        price = (drafting + self.costs(rows + nodes, rows)) / plain - 1
        unpaid = price / _PRICE - self._steps_without_trial
        return max(_SOONEST - history.plain_steps, unpaid + 1 if unpaid > 0 else 0.0)

    def _probe_soon(self, history: History, rows: int) -> float:
        """In how many plain steps a request tries again whose drafts may only have had bad luck.

        It need not wait for `probe_every` steps if that costs at most one percent of the time
        since its last draft.
        """
        nodes, plain = self._sizes.of_levels[0], self.costs(rows, rows)
        rates = history.acceptance_rates(self._overall.acceptance_rates())
        seconds = self._level_seconds + self.costs(rows + nodes, rows)
        lost = seconds / plain - 1 - history.draft_rate() * rates[0] / rows
        return min(self._probe_every, max(_SOONEST_AGAIN, lost / _PRICE))

    # After a step

    def observe(self, outcomes: Sequence[Outcome], draft_seconds: float) -> None:
        """Learn acceptance rates, the sizes of drafts, and the cost of drafting."""
        deepest, drafted, may_draft, caught_up, read = 0, 0, False, True, 0
        num_drafting = 0
        for outcome in outcomes:
            tree, history = outcome.draft.tree, self._history(outcome.request)
            depth = max(tree.depths) if self._trees else tree.num_drafted
            allowed = max(depth, history.depth)
            if allowed:
                if depth and not history.tried:
                    read += reading(outcome.request)
                history.add(outcome, allowed)
                self._overall.add(outcome, allowed)
                may_draft, caught_up = True, caught_up and history.caught_up
            if depth and (self._stopping or self._trees):
                self._sizes.learn(tree, allowed)
            if depth and self._stopping:
                self._stopping[outcome.request.params.greedy].learn(outcome)
            deepest, drafted = max(deepest, depth), drafted + depth
            num_drafting += depth > 0
        self._drafted_steps = self._drafted_steps + 1 if deepest else 0
        if may_draft:
            self._plan = None
            if self.at_once:
                deepest, drafted = min(deepest, 1), num_drafting
            levels = levels_of_one(deepest, drafted)
            cost = self.costs.agreed(draft_seconds) / self.costs(1, 1)
            self._drafting_costs.add(cost, levels, caught_up=caught_up, read=read)

    def release(self, request: Request) -> None:
        """Forget the request; the estimates over all requests stay."""
        if request.key in self._rest.keys:
            rest, self._rest = self._rest, Rest()
            self.rest(rest.waiting, rest.taken)
        if self._histories.pop(request.key, None) is not None:
            self._lengths.add(len(request.token_ids) - len(request.prompt_ids))
