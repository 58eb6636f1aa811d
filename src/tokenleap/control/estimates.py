"""`Estimates`: what `cost_model` learns from the steps: what drafts bring and what they cost."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from typing import TYPE_CHECKING

from tokenleap.control.draft_sizes import DraftSizes
from tokenleap.control.drafting_costs import (
    DeeperLevels,
    DraftingCosts,
    levels_of_one,
    reading,
)
from tokenleap.control.history import UNKNOWN, History
from tokenleap.control.lengths import OutputLengths
from tokenleap.control.planning import Chances, Plan
from tokenleap.control.stopping import Stopping

if TYPE_CHECKING:
    from tokenleap.decode import Outcome
    from tokenleap.request import Request
    from tokenleap.runtime.costs import CostCurve

__all__ = ["Estimates"]

_MEMORY_OF_ONE, _MEMORY_OF_ALL = 0.9, 0.96
"""Weight of the past after each draft, in the estimates of one request and of all requests."""

_EARLY = 4
"""So many requests of a draft model try before the drafts of others can discourage them."""

_PRIOR_OF_STOPPING = 4.0
"""Weight of the prior acceptance rates of chains that may end early, in drafts. A request's first
drafts are often wrong: answers begin with phrases of which there are many."""


class Estimates:
    """What one drafter's drafts bring and cost.

    Args:
        levels: number of nodes at each level of a full draft.
        costs: of a pass.
        trees: whether drafts are trees.
        at_once: whether one pass of the drafter makes all levels.
        stops_early: whether its chains can end below improbable tokens.

    Attributes:
        drafting: what a level of drafting costs, and reading a text.
        stopping: by whether requests are greedy, where chains should end; empty unless they can. It
            learns from products of probabilities for greedy requests, and with the rule `coupled`
            from products of clarity for the others.
        lengths: of the outputs that have ended.
        requests_tried: how many requests have drafted.
    """

    def __init__(
        self,
        levels: Sequence[int],
        costs: CostCurve,
        *,
        trees: bool,
        at_once: bool,
        stops_early: bool,
    ) -> None:
        self.costs = costs
        self._trees, self._at_once = trees, at_once
        self._sizes = DraftSizes(levels)
        self._num_levels = len(levels)
        self.drafting = DraftingCosts()
        self._deeper_levels = DeeperLevels()
        self.stopping = {True: Stopping(), False: Stopping()} if stops_early else {}
        self.lengths = OutputLengths()
        self.requests_tried = 0
        self._histories: dict[int, History] = {}
        self._overall = self._new(_MEMORY_OF_ALL)

    def _new(self, memory: float) -> History:
        if self.stopping:
            return History(memory, self._num_levels, alike=False, prior_weight=_PRIOR_OF_STOPPING)
        return History(memory, self._num_levels, alike=not self._trees)

    @property
    def first_nodes(self) -> float:
        """Number of nodes at a draft's first level."""
        return self._sizes.of_levels[0]

    @property
    def acceptance_rates(self) -> list[float]:
        """Of each level, over all requests."""
        return self._overall.acceptance_rates()

    @property
    def level_seconds(self) -> float:
        """Seconds of drafting one level of one request."""
        return self.drafting.level * self.costs(1, 1)

    @property
    def deeper(self) -> float | None:
        """See `best_plan`."""
        return self._deeper_levels.share if self._at_once else None

    def reading_seconds(self, request: Request) -> float | None:
        """Seconds that the first draft of a request takes longer; None if not known yet."""
        token = self.drafting.token
        return None if token is None else token * reading(request) * self.costs(1, 1)

    def history(self, request: Request) -> History:
        """What is known of a request."""
        history = self._histories.get(request.key)
        if history is None:
            history = self._histories[request.key] = self._new(_MEMORY_OF_ONE)
        return history

    def chances(self, batch: Sequence[Request]) -> Chances:
        """What drafts for these requests may bring, by their depth."""
        nodes = self._sizes.of_levels
        prior, prior_drafts = self.acceptance_rates, self._overall.draft_rate()
        hoped = [max(rate, UNKNOWN) for rate in prior]
        histories = [self.history(request) for request in batch]
        drafts = [history.draft_rate(prior_drafts) for history in histories]
        rates = [h.acceptance_rates(hoped if self.is_early(h) else prior) for h in histories]
        passed = [list(accumulate(each, mul)) for each in rates]
        drafted = nodes if self.stopping else [1.0] * len(nodes)
        return Chances(drafts, passed, nodes, drafted)

    def is_early(self, history: History) -> bool:
        """Whether the request has not drafted yet, and would be one of the first few that do.

        It expects at least what is expected before anything is known. Otherwise a few bad drafts
        at the beginning of one output would keep all that follow from trying. Only requests of
        models are early. Other drafters try at hardly any price.
        """
        return bool(self.stopping) and not history.tried and self.requests_tried < _EARLY

    def price_of_a_token(self, plan: Plan, rows: int, per_level: float) -> float:
        """What drafting and verifying one more token of a draft takes, in tokens of the plan.

        Args:
            plan: a step.
            rows: number of its requests.
            per_level: seconds of drafting one level of one request.
        """
        deepest, drafting = max(plan.depths), sum(depth > 0 for depth in plan.depths)
        if deepest < 2:
            return 0.0
        fewest, most = rows + drafting, rows + sum(plan.depths)
        node = (self.costs(most, rows) - self.costs(fewest, rows)) / (most - fewest)
        shared = levels_of_one(1.0, float(drafting)) / drafting
        return plan.rate * (
            node + per_level * shared * (1.0 if self.deeper is None else self.deeper)
        )

    def rest(self, batch: Sequence[Request], steps: int) -> None:
        """Record steps in which these requests had no drafts and nobody asked."""
        for request in batch:
            if history := self._histories.get(request.key):
                history.rest(steps)

    def observe(self, outcomes: Sequence[Outcome], draft_seconds: float) -> bool:
        """Learn from a step; whether there was anything to learn."""
        may_draft, caught_up, read = False, True, 0
        depths: list[int] = []  # of what drafting took time for
        for outcome in outcomes:
            tree, history = outcome.draft.tree, self.history(outcome.request)
            depth = max(tree.depths) if self._trees else tree.num_drafted
            allowed = max(depth, history.depth)
            if allowed:
                if depth and not history.tried:
                    read += reading(outcome.request)
                    self.requests_tried += 1
                history.add(outcome, allowed)
                self._overall.add(outcome, allowed)
                may_draft, caught_up = True, caught_up and history.caught_up
            if depth and (self.stopping or self._trees):
                self._sizes.learn(tree, allowed)
            if depth and self.stopping:
                self.stopping[outcome.request.params.greedy].learn(outcome)
            if depth:
                depths.append(allowed if self._at_once else depth)
        if may_draft:
            cost = self.costs.agreed(draft_seconds) / self.costs(1, 1)
            levels = self._levels_of(depths, cost if caught_up else None)
            self.drafting.add(cost, levels, caught_up=caught_up, read=read)
        return may_draft

    def _levels_of(self, depths: Sequence[int], cost: float | None) -> float:
        """What drafts so deep cost, in levels of one request.

        Args:
            depths: those of the step.
            cost: what they cost, to learn from; None if that is not known.
        """
        levels: list[float] = list(depths)
        if self._at_once:
            if depths and cost is not None:
                rows = levels_of_one(1.0, float(len(depths)))
                self._deeper_levels.add(sum(depths) / len(depths), cost / rows)
            levels = [self._deeper_levels.levels(depth) for depth in depths]
        return levels_of_one(max(levels, default=0.0), sum(levels))

    def release(self, request: Request) -> None:
        """Forget the request; the estimates over all requests stay."""
        if self._histories.pop(request.key, None) is not None:
            self.lengths.add(len(request.token_ids) - len(request.prompt_ids))
