"""`cost_model`: draft where it buys most expected tokens per second, nothing included; the default.

Drafters that look their guesses up are asked first: for those see `lookup_model.py`.

Leviathan et al., theorem 3.8, with refinements: the cost of a pass is a measured curve over its
positions and not a constant, and alpha is each request's own running estimate, and so is d, how
often its drafter has a guess at all. A request that may draft to depth l yields

    1 + d (E(l) - 1) tokens,   E(l) = 1 + p_1 + p_1 p_2 + ... + p_1 ... p_l

for 1 + d n(l) positions and l levels of drafting. A chain has n(l) = l nodes and passes each level
with alpha, which is equation 1; of a tree the nodes n(l) are learnt from its drafter's drafts, and
each level's p_j, that any of its nodes is accepted below what was accepted above it, by itself.

The nodes of a step go where they are worth most: level j of request r adds d p_1 ... p_j tokens, so
the levels are taken in the order of tokens per node, as many as give the batch most tokens per
second. Where that is none the step is exactly the plain one.

What is never done is never measured. A request that has drafted nothing for `probe_every` steps
tries one level, so that a text that turns predictable is noticed; one that has never drafted does
so sooner where that costs one percent at most. And as often as costs one percent at most a step has
no drafts, as has the very first if no costs are known, so that what drafts are compared with stays
up to date. A drafter's first step for a request includes catching up with its text. Where no other
was measured yet, the next step asks for the same requests again, and for no new ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated, ClassVar

import numpy as np
from annotated_types import Ge
from numpy.typing import NDArray

from foretoken.control.base import Budget, Controller, within
from foretoken.control.drafting_costs import DraftingCosts
from foretoken.control.evidence import (
    OF_ALL,
    OF_ONE,
    Answers,
    ChainOdds,
    DraftSizes,
    Odds,
    TreeOdds,
)
from foretoken.control.plain_steps import PRICE, SOONEST, PlainSteps
from foretoken.core.config import Config
from foretoken.decode import Outcome
from foretoken.request import Request

__all__ = ["CostModel"]

_PLAN_STEPS = 4
"""For so many steps a batch's depths stay as they are: estimates do not move much faster."""

_LEAST_NODES = 0.01
"""A level adds at least so many nodes: what is learnt by noise may say that it adds none."""


@dataclass
class _Known:
    """What is known of one request, or of all.

    Attributes:
        odds: how far its drafts pass.
        answers: how often there is one.
        depth: what it may draft in the present step.
        caught_up: whether the drafter was asked in the step before, too.
        tried: whether it has drafted.
        plain_steps: since it could last draft.
    """

    odds: Odds
    answers: Answers
    depth: int = 0
    caught_up: bool = False
    tried: bool = False
    plain_steps: int = 0

    @property
    def just_started(self) -> bool:
        """Between steps: whether the last one made the drafter catch up with the text."""
        return self.depth > 0 and not self.caught_up


class CostModel(Controller):
    """Depths from 0 to `num_speculative_tokens`, or to the deepest level of a tree."""

    class Options(Config):
        """Options of `cost_model`: how rarely to try the other thing, a draft or none."""

        probe_every: Annotated[int, Ge(2)] = 64

    name: ClassVar[str] = "cost_model"
    summary: ClassVar[str] = "drafts where it buys most expected tokens per second, or nothing"
    needs_costs: ClassVar[bool] = True

    def setup(self) -> None:
        """See `Controller.setup`."""
        self._branches = self.levels is not None
        levels = [1] * self.num_speculative_tokens if self.levels is None else self.levels
        assert isinstance(self.options, self.Options)
        self._probe_every = self.options.probe_every
        self._sizes = DraftSizes(list(accumulate(levels)))
        self._requests: dict[int, _Known] = {}
        self._overall = self._nothing_known(OF_ALL)
        self._drafting = DraftingCosts()
        self._trying = False  # whether this step finds out what drafting costs without catching up
        self._gain = 1.0  # of the last step's drafts, over none
        self._plan: list[int] = []  # depths of a batch, the requests, and steps since it was made
        self._plan_keys: list[int] = []
        self._plan_age = 0
        self._plain_steps = PlainSteps()

    def _nothing_known(self, memory: float) -> _Known:
        kind = TreeOdds if self._branches else ChainOdds
        return _Known(kind(memory, len(self._sizes.nodes)), Answers(memory))

    def _of(self, request: Request) -> _Known:
        known = self._requests.get(request.key)
        if known is None:
            known = self._requests[request.key] = self._nothing_known(OF_ONE)
        return known

    # Before a step

    def budgets(self, batch: Sequence[Request], rows: int) -> list[Budget]:
        """See `Controller.budgets`."""
        known = [self._of(request) for request in batch]
        if self._without_drafts():
            depths = [0] * len(known)
        else:
            self._trying = self._drafting.bounded and any(one.just_started for one in known)
            alone = rows == 1
            best = [self._best_depth(known[0])] if alone else self._planned(batch, known, rows)
            depths = best if all(best) else self._probing(known, best, rows)
            if self._trying:
                depths = [d if one.depth else 0 for d, one in zip(depths, known, strict=True)]
        return [self._budget(*each) for each in zip(batch, known, depths, strict=True)]

    def _without_drafts(self) -> bool:
        """Whether it is time for a plain step, to know what that costs."""
        return not self.costs or self._plain_steps.due(self._gain)

    def _budget(self, request: Request, known: _Known, depth: int) -> Budget:
        budget = within(request, depth)
        known.plain_steps = 0 if depth else known.plain_steps + 1
        known.caught_up = known.depth > 0
        known.depth = budget.depth
        if self._branches and depth:
            return Budget(self.num_speculative_tokens, budget.depth)
        return budget

    def _probing(self, batch: Sequence[_Known], depths: Sequence[int], rows: int) -> list[int]:
        """These depths, and a level now and then for requests that do not draft."""
        if not self._sizes.nodes:
            return list(depths)
        first = self._before_first_probe(len(batch), rows)
        waits = [self._probe_every if known.tried else first for known in batch]
        return [
            depth or int(known.plain_steps >= wait - 1)
            for known, depth, wait in zip(batch, depths, waits, strict=True)
        ]

    def _before_first_probe(self, own: int, rows: int) -> float:
        """Steps until what a level costs these rows is worth finding out how they draft."""
        start = self._drafting.start.value
        if start is None:
            return self._probe_every
        plain, nodes = self.costs(rows, rows), own * self._sizes.nodes[0]
        price = (start + self.costs(rows + nodes, rows) - plain) / plain
        return min(self._probe_every, max(SOONEST, price / PRICE))

    def _best_depth(self, known: _Known) -> int:
        """Of one request alone, which has a draft or has none: all depths compared."""
        share, plain = self._share(known), self.costs(1)
        level_cost = self._drafting.level.believed(trying=self._trying)
        without = (1 - share) * (plain + self._drafting.asking.believed(trying=self._trying))
        tokens, passed = 1.0, share
        best, best_rate = 0, 1 / plain
        levels = zip(self._odds(known), self._sizes.nodes, strict=True)
        for depth, (odds, nodes) in enumerate(levels, 1):
            passed *= odds
            tokens += passed
            drafted = depth * level_cost + self.costs(1 + nodes)
            rate = tokens / (share * drafted + without)
            if rate > best_rate:
                best, best_rate = depth, rate
        self._gain = best_rate * plain
        return best

    def _planned(self, batch: Sequence[Request], known: Sequence[_Known], rows: int) -> list[int]:
        """`_best_depths`, of a few steps ago where the batch is the same: they cost time, too."""
        keys = [request.key for request in batch]
        if keys != self._plan_keys or self._plan_age >= _PLAN_STEPS or self._trying:
            self._plan, self._plan_keys, self._plan_age = self._best_depths(known, rows), keys, 0
        self._plan_age += 1
        return self._plan

    def _best_depths(self, batch: Sequence[_Known], rows: int) -> list[int]:
        """The first levels in order of worth, up to where the rate is highest."""
        own, levels = len(batch), len(self._sizes.nodes)
        if not levels:
            return [0] * own
        nodes = np.maximum(np.diff(self._sizes.nodes, prepend=0.0), _LEAST_NODES)  # [L]
        prior = self._overall.odds.odds(())
        share = np.array([self._share(known) for known in batch])[:, None]  # [R, 1]
        passed = np.cumprod([known.odds.odds(prior) for known in batch], axis=1)  # [R, L]
        # A level is of no use without those above: it comes after them.
        worth = passed / nodes if not self._branches else _falling(passed / nodes)
        order = np.argsort(-worth, axis=None, kind="stable")  # [R x L]
        tokens = rows + np.cumsum((share * passed).ravel()[order])
        positions = rows + np.cumsum((share * nodes).ravel()[order])
        row, level = np.divmod(order, levels)
        likely = np.maximum.accumulate(share[row, 0])  # that any of them has a draft, or more
        level_cost = self._drafting.level.believed(trying=self._trying)
        drafting = np.maximum.accumulate(level + 1) * likely * level_cost
        drafting += (1 - likely) * self._drafting.asking.believed(trying=self._trying)
        rates = tokens / (drafting + self.costs.drafting(positions, rows))
        best = int(rates.argmax())
        self._gain = float(rates[best]) * self.costs(rows, rows) / rows
        if self._gain <= 1:
            return [0] * own
        depths: list[int] = np.bincount(row[: best + 1], minlength=own).tolist()
        return depths

    def odds(self, request: Request) -> list[float]:
        """Per level the probability that a draft's is passed, if the one above it was."""
        return self._odds(self._of(request))

    def drafts(self, request: Request) -> float:
        """How likely the drafter is to have a guess for the request."""
        return self._share(self._of(request))

    def _odds(self, known: _Known) -> list[float]:
        return known.odds.odds(self._overall.odds.odds(()))

    def _share(self, known: _Known) -> float:
        return known.answers.share(prior=self._overall.answers.share())

    # After a step

    def observe(self, outcomes: Sequence[Outcome], draft_seconds: float) -> None:
        """Update the odds, d, the sizes of drafts, and the costs of drafting and of passes."""
        deepest, asked, caught_up = 0, False, True
        for outcome in outcomes:
            tree = outcome.draft.tree
            known = self._of(outcome.request)
            depth = max(tree.depths) if self._branches else tree.num_drafted
            if depth or known.depth:
                self._learn(known, outcome, max(depth, known.depth))
                asked, caught_up = True, caught_up and known.caught_up
                deepest = max(deepest, depth)
        self._plain_steps.count(drafted=deepest > 0, surprised=self.costs.surprised)
        if asked:
            self._drafting.add(draft_seconds, deepest, caught_up=caught_up)

    def _learn(self, known: _Known, outcome: Outcome, asked: int) -> None:
        drafted, accepted = outcome.draft.tree.num_drafted, outcome.accepted
        known.tried = known.tried or drafted > 0
        if drafted and self._branches:
            self._sizes.add(asked, drafted)
        for evidence in (known, self._overall):
            evidence.answers.add(drafted=drafted > 0)
            if drafted:
                evidence.odds.add(len(accepted.path), len(accepted.rejected), asked)

    def release(self, request: Request) -> None:
        """Forget the request's own estimates; what they taught about all stays."""
        self._requests.pop(request.key, None)


def _falling(worth: NDArray[np.float64]) -> NDArray[np.float64]:
    """[R, L] where no level is worth more than the one above it."""
    falling: NDArray[np.float64] = np.minimum.accumulate(worth, axis=1)
    return falling
