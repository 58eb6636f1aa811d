"""`cost_model`: draft as much as maximizes expected tokens per second; the default controller.

Drafters that look tokens up draft first and are cut afterwards: see `lookup_model.py`.

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
expected tokens per second. If no draft raises that rate, the step is a plain one.

Estimates of costs and acceptance rates go stale while nothing is drafted. So a request that has
drafted nothing for `probe_every` steps drafts one level, which notices a text that has become
predictable. A new request does so sooner if that is cheap. About one percent of the time goes into
steps without drafts, so that the cost of a plain pass stays up to date. The first draft of a
request includes reading its text. Until a draft without that was timed, the next step drafts for
the same requests again, and for no new ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Annotated, ClassVar

import numpy as np
from annotated_types import Ge

from foretoken.control.base import Budget, Controller, within
from foretoken.control.evidence import Frequency
from foretoken.core.config import Config
from foretoken.decode import Outcome
from foretoken.request import Request

__all__ = ["CostModel", "smoothed"]

_MEMORY_OF_ONE, _MEMORY_OF_ALL = 0.9, 0.98
"""Weight of the past after each draft, in the estimates of one request and of all requests."""

_PRICE, _SOONEST = 0.01, 8
"""Share of the time that plain steps and first drafts may cost; least number of steps between."""

_LEAST_NODES = 0.01
"""A level is taken to add at least this many nodes, even if noisy averages say less."""

_UNKNOWN = 0.5
"""Acceptance rate before anything was observed: high enough to try drafts."""


def smoothed(known: float, seconds: float) -> float:
    """A running mean with one more measurement.

    A measurement counts as at most twice the mean, since it may be an outlier.
    """
    return known + 0.1 * (min(seconds, 2 * known) - known)


class _History:
    """Outcomes of the drafts of one request, or of all requests.

    Args:
        memory: weight of the past after each draft.
        levels: number of levels of the deepest draft.
        branches: whether drafts are trees. Each level of a tree has its own estimate; the levels of
            a chain share one alpha.

    Attributes:
        depth: how deep the request may draft in the current step.
        caught_up: whether it could draft in the previous step as well.
        tried: whether it has ever drafted.
        plain_steps: number of steps since it could last draft.
    """

    def __init__(self, memory: float, levels: int, *, branches: bool) -> None:
        self._levels = levels
        self._branches = branches
        # A draft counts once for each level of a tree, but once per token for alpha.
        memory_of_odds = memory**0.5 if branches else memory
        self._passed = [Frequency(memory_of_odds, 2.0) for _ in range(levels if branches else 1)]
        self._guesses = Frequency(memory, 2.0)
        self.depth = self.plain_steps = 0
        self.caught_up = self.tried = False

    @property
    def just_started(self) -> bool:
        """Whether the last draft included reading the text; to be asked between steps."""
        return self.depth > 0 and not self.caught_up

    def allow(self, depth: int, *, wanted: bool) -> None:
        """Record how deep the request may draft in the current step."""
        self.plain_steps = 0 if wanted else self.plain_steps + 1
        self.caught_up, self.depth = self.depth > 0, depth

    def add(self, outcome: Outcome, asked: int) -> None:
        """Learn from one draft, which could have had `asked` levels."""
        drafted, passed = outcome.draft.tree.num_drafted, len(outcome.accepted.path)
        self._guesses.add(drafted > 0, not drafted)
        if not drafted:
            return
        self.tried = True
        if not self._branches:
            self._passed[0].add(passed, len(outcome.accepted.rejected))
            return
        for level, frequency in enumerate(self._passed):
            reached = level <= passed and level < asked  # else its counts only decay
            frequency.add(reached and level < passed, reached and level == passed)

    def guesses(self, prior: float = 1.0) -> float:
        """Probability that the drafter has a draft."""
        return self._guesses.given(prior)

    def odds(self, prior: Sequence[float] = ()) -> list[float]:
        """Per level the probability that it is passed, given that the one above was.

        A level without observations is taken to be as likely as the one above.
        """
        if not self._branches:
            return [self._passed[0].given(prior[0] if prior else _UNKNOWN)] * self._levels
        found, above = list[float](), _UNKNOWN
        for level, frequency in enumerate(self._passed):
            above = frequency.given(prior[level] if prior else above)
            found.append(above)
        return found


class _DraftingCosts:
    """Seconds of drafting, without the target's pass.

    Attributes:
        level: seconds of one level; an upper bound while all timed drafts included reading texts.
        start: seconds of a step in which a request's text was read; None before the first one.
        bound: whether `level` is only an upper bound.
    """

    def __init__(self) -> None:
        self.level, self.bound = 0.0, True
        self.start: float | None = None

    def add(self, seconds: float, depth: int, *, caught_up: bool) -> None:
        """Learn from one more step, which drafted to this depth."""
        each = seconds / max(1, depth)
        if not caught_up:
            self.start = smoothed(self.start or seconds, seconds)
        if caught_up and self.bound:
            self.level, self.bound = each, False
        elif self.bound:
            self.level = min(each, self.level or each)
        elif caught_up or each < self.level:
            self.level = smoothed(self.level, each)


class CostModel(Controller):
    """Drafts to a depth from 0 to `num_speculative_tokens`, or to a tree's deepest level."""

    class Options(Config):
        """Options of `cost_model`: steps without drafts after which a request tries again."""

        probe_every: Annotated[int, Ge(2)] = 64

    name: ClassVar[str] = "cost_model"
    summary: ClassVar[str] = "drafts where it buys most expected tokens per second, or nothing"
    needs_costs: ClassVar[bool] = True

    def setup(self) -> None:
        """See `Controller.setup`."""
        assert isinstance(self.options, self.Options)
        self._probe_every = self.options.probe_every
        self._branches = self.levels is not None
        sizes = [1] * self.num_speculative_tokens if self.levels is None else self.levels
        self._nodes = [float(nodes) for nodes in accumulate(sizes)]  # of a draft, by depth
        self._requests: dict[int, _History] = {}
        self._overall = self._new(_MEMORY_OF_ALL)
        self._drafting_costs = _DraftingCosts()
        self._gain = 1.0  # tokens per second of the last plan, relative to no drafts
        self._drafted_steps = 0  # since the last step without drafts

    def _new(self, memory: float) -> _History:
        return _History(memory, len(self._nodes), branches=self._branches)

    def _of(self, request: Request) -> _History:
        known = self._requests.get(request.key)
        if known is None:
            known = self._requests[request.key] = self._new(_MEMORY_OF_ONE)
        return known

    # Before a step

    def budgets(self, batch: Sequence[Request], rows: int) -> list[Budget]:
        """See `Controller.budgets`."""
        known = [self._of(request) for request in batch]
        depths = [0] * len(batch)
        if self._nodes and self.costs and not self._plain_step_is_due():
            measuring = self._drafting_costs.bound and any(one.just_started for one in known)
            depths = self._probing(known, self._best_depths(known, rows, measuring), rows)
            if measuring:
                depths = [
                    depth if one.depth else 0 for one, depth in zip(known, depths, strict=True)
                ]
        return [self._budget(*each) for each in zip(batch, known, depths, strict=True)]

    def _plain_step_is_due(self) -> bool:
        """Whether a plain step costs at most a percent of what drafts gained since the last one."""
        steps = self._drafted_steps
        return steps >= _SOONEST and _PRICE * steps >= self._gain - 1

    def _budget(self, request: Request, known: _History, depth: int) -> Budget:
        budget = within(request, depth)
        known.allow(budget.depth, wanted=depth > 0)
        if self._branches and depth:
            return Budget(self.num_speculative_tokens, budget.depth)
        return budget

    def _best_depths(self, batch: Sequence[_History], rows: int, measuring: bool) -> list[int]:
        """Depths per request: levels in order of worth, up to where the rate is highest.

        Args:
            batch: the requests.
            rows: number of requests in the whole step.
            measuring: whether to ignore drafting's cost, of which only an upper bound is known.
        """
        levels = len(self._nodes)
        nodes = np.maximum(np.diff(self._nodes, prepend=0.0), _LEAST_NODES)  # [L]
        prior, guesses = self._overall.odds(), self._overall.guesses()
        share = np.array([known.guesses(guesses) for known in batch])[:, None]  # [R, 1]
        passed = np.cumprod([known.odds(prior) for known in batch], axis=1)  # [R, L]
        # A level needs those above it, so it is worth no more than they are.
        worth = np.minimum.accumulate(passed / nodes, axis=1)
        order = np.argsort(-worth, axis=None, kind="stable")  # [R x L]
        tokens = rows + np.cumsum((share * passed).ravel()[order])
        positions = rows + np.cumsum((share * nodes).ravel()[order])
        row, level = np.divmod(order, levels)
        likely = np.maximum.accumulate(share[row, 0])  # lower bound of P(any has a draft)
        each = 0.0 if measuring else self._drafting_costs.level
        drafting = each * likely * np.maximum.accumulate(level + 1)
        rates = tokens / (drafting + self.costs.drafting(positions, rows))
        best = int(rates.argmax())
        self._gain = float(rates[best]) * self.costs(rows, rows) / rows
        if self._gain <= 1:
            return [0] * len(batch)
        depths: list[int] = np.bincount(row[: best + 1], minlength=len(batch)).tolist()
        return depths

    def _probing(self, batch: Sequence[_History], depths: Sequence[int], rows: int) -> list[int]:
        """These depths, plus one level now and then for requests that do not draft."""
        plain, nodes = self.costs(rows, rows), len(batch) * self._nodes[0]
        # A request that never drafted tries once a first draft, if its cost is known, costs at most
        # a percent of the steps so far.
        first = self._probe_every
        if self._drafting_costs.start is not None:
            price = (self._drafting_costs.start + self.costs(rows + nodes, rows)) / plain - 1
            first = min(first, round(max(_SOONEST, price / _PRICE)))
        return [
            depth or int(known.plain_steps + 1 >= (self._probe_every if known.tried else first))
            for known, depth in zip(batch, depths, strict=True)
        ]

    def odds(self, request: Request) -> list[float]:
        """Per level the probability that a draft passes it, given that it passed the one above."""
        return self._of(request).odds(self._overall.odds())

    # After a step

    def observe(self, outcomes: Sequence[Outcome], draft_seconds: float) -> None:
        """Learn the odds, the sizes of drafts, and the cost of drafting."""
        deepest, asked, caught_up = 0, False, True
        for outcome in outcomes:
            tree, known = outcome.draft.tree, self._of(outcome.request)
            depth = max(tree.depths) if self._branches else tree.num_drafted
            allowed = max(depth, known.depth)
            if allowed:
                known.add(outcome, allowed)
                self._overall.add(outcome, allowed)
                asked, caught_up = True, caught_up and known.caught_up
            if depth and self._branches:
                index = min(allowed, len(self._nodes)) - 1
                self._nodes[index] += 0.1 * (tree.num_drafted - self._nodes[index])
            deepest = max(deepest, depth)
        self._drafted_steps = self._drafted_steps + 1 if deepest else 0
        if asked:
            self._drafting_costs.add(draft_seconds, deepest, caught_up=caught_up)

    def release(self, request: Request) -> None:
        """Forget the request; the estimates over all requests stay."""
        self._requests.pop(request.key, None)
