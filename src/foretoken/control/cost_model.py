"""`cost_model`: draft where it buys most expected tokens per second, or nothing; the default.

Drafters that look tokens up draft first and are cut afterwards: see `lookup_model.py`.

Leviathan et al., theorem 3.8, with refinements: the cost of a pass is a measured curve and not a
constant; the acceptance rate alpha is each request's own running estimate, and so is d, how often
its drafter has a guess at all. A request that may draft to depth l yields

    1 + d (E(l) - 1) tokens,   E(l) = 1 + p_1 + p_1 p_2 + ... + p_1 ... p_l

for 1 + d n(l) nodes and l levels of drafting. A chain has n(l) = l nodes and passes each level with
alpha, which is equation 1. A tree's nodes n(l) are learnt from its drafter's drafts, and each level
has its own p_j: that one of its nodes is accepted, given that one above it was.

The nodes of a step go where they are worth most: level j of request r adds d p_1 ... p_j tokens, so
levels are taken in the order of expected tokens per node, as many as give the batch most expected
tokens per second. Where that is none the step is a plain one.

Costs and acceptance rates go stale if nothing is drafted. So a request that has drafted nothing
for `probe_every` steps drafts one level, so that a text that turns predictable is noticed; a new
one does so sooner if that is cheap. And about one percent of the time goes into steps without
drafts, so that the cost of a plain pass stays known. The first draft of a request includes reading
its text. As long as no draft without that was timed, the next step drafts for the same requests
again, and for no new ones.
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
"""Weight of the past after each draft, in the estimates of one request and of all."""

_PRICE, _SOONEST = 0.01, 8
"""Share of the time that plain steps, and first drafts, may cost; and steps between them at least.
"""

_LEAST_NODES = 0.01
"""A level adds at least this many nodes, whatever noisy averages say."""

_UNKNOWN = 0.5
"""Acceptance rate where nothing is known: enough to try drafts."""


def smoothed(known: float, seconds: float) -> float:
    """A running mean with one more measurement, cut where it is far above the mean: a hiccup."""
    return known + 0.1 * (min(seconds, 2 * known) - known)


class _History:
    """What came of the drafts of one request, or of all.

    Args:
        memory: weight of the past after each draft.
        levels: of the deepest draft.
        branches: whether drafts are trees, whose levels are estimated one by one; the levels of a
            chain share one alpha.

    Attributes:
        depth: what the request may draft in the present step.
        caught_up: whether it could draft in the step before as well.
        tried: whether it has drafted.
        plain_steps: since it could last draft.
    """

    def __init__(self, memory: float, levels: int, *, branches: bool) -> None:
        self._levels = levels
        self._branches = branches
        # A draft tells something of each level of a tree once, but of alpha once a token.
        memory_of_odds = memory**0.5 if branches else memory
        self._passed = [Frequency(memory_of_odds, 2.0) for _ in range(levels if branches else 1)]
        self._guesses = Frequency(memory, 2.0)
        self.depth = self.plain_steps = 0
        self.caught_up = self.tried = False

    @property
    def just_started(self) -> bool:
        """Between steps: whether the last draft included catching up with the text."""
        return self.depth > 0 and not self.caught_up

    def allow(self, depth: int, *, wanted: bool) -> None:
        """Note what the request may draft in the present step."""
        self.plain_steps = 0 if wanted else self.plain_steps + 1
        self.caught_up, self.depth = self.depth > 0, depth

    def add(self, outcome: Outcome, asked: int) -> None:
        """Learn from one draft, which might have had `asked` levels."""
        drafted, passed = outcome.draft.tree.num_drafted, len(outcome.accepted.path)
        self._guesses.add(drafted > 0, not drafted)
        if not drafted:
            return
        self.tried = True
        if not self._branches:
            self._passed[0].add(passed, len(outcome.accepted.rejected))
            return
        for level, frequency in enumerate(self._passed):
            reached = level <= passed and level < asked  # else it is forgotten a little
            frequency.add(reached and level < passed, reached and level == passed)

    def guesses(self, prior: float = 1.0) -> float:
        """How likely the drafter has a guess."""
        return self._guesses.given(prior)

    def odds(self, prior: Sequence[float] = ()) -> list[float]:
        """Per level how likely it is passed, given that the one above was.

        A level that nothing is known of is taken to be as good as the one above.
        """
        if not self._branches:
            return [self._passed[0].given(prior[0] if prior else _UNKNOWN)] * self._levels
        found, above = list[float](), _UNKNOWN
        for level, frequency in enumerate(self._passed):
            above = frequency.given(prior[level] if prior else above)
            found.append(above)
        return found


class _DraftingCosts:
    """Seconds of drafting besides the target's pass.

    Attributes:
        level: of one level; of drafts that included catching up only an upper bound.
        start: of a step in which a request was caught up with.
        bound: whether `level` is such a bound.
    """

    def __init__(self) -> None:
        self.level, self.bound = 0.0, True
        self.start: float | None = None

    def add(self, seconds: float, depth: int, *, caught_up: bool) -> None:
        """One more step that drafted so deep."""
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
    """Depths from 0 to `num_speculative_tokens`, or to the deepest level of a tree."""

    class Options(Config):
        """Options of `cost_model`: after how many steps without drafts a request tries again."""

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
        self._costs = _DraftingCosts()
        self._gain = 1.0  # of the last plan's drafts, over none
        self._drafted_steps = 0  # since the last one without drafts

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
            measuring = self._costs.bound and any(one.just_started for one in known)
            depths = self._probing(known, self._best_depths(known, rows, measuring), rows)
            if measuring:
                depths = [
                    depth if one.depth else 0 for one, depth in zip(known, depths, strict=True)
                ]
        return [self._budget(*each) for each in zip(batch, known, depths, strict=True)]

    def _plain_step_is_due(self) -> bool:
        """Whether a plain step costs at most a percent of what was gained since the last one."""
        steps = self._drafted_steps
        return steps >= _SOONEST and _PRICE * steps >= self._gain - 1

    def _budget(self, request: Request, known: _History, depth: int) -> Budget:
        budget = within(request, depth)
        known.allow(budget.depth, wanted=depth > 0)
        if self._branches and depth:
            return Budget(self.num_speculative_tokens, budget.depth)
        return budget

    def _best_depths(self, batch: Sequence[_History], rows: int, measuring: bool) -> list[int]:
        """The first levels in order of worth, up to where the rate is highest.

        Args:
            batch: the requests.
            rows: of the whole step.
            measuring: whether to ignore what is only an upper bound of drafting's cost.
        """
        levels = len(self._nodes)
        nodes = np.maximum(np.diff(self._nodes, prepend=0.0), _LEAST_NODES)  # [L]
        prior, guesses = self._overall.odds(), self._overall.guesses()
        share = np.array([known.guesses(guesses) for known in batch])[:, None]  # [R, 1]
        passed = np.cumprod([known.odds(prior) for known in batch], axis=1)  # [R, L]
        # A level is of no use without those above it: it is worth no more than they are.
        worth = np.minimum.accumulate(passed / nodes, axis=1)
        order = np.argsort(-worth, axis=None, kind="stable")  # [R x L]
        tokens = rows + np.cumsum((share * passed).ravel()[order])
        positions = rows + np.cumsum((share * nodes).ravel()[order])
        row, level = np.divmod(order, levels)
        likely = np.maximum.accumulate(share[row, 0])  # that any of them has a guess, or more
        each = 0.0 if measuring else self._costs.level
        drafting = each * likely * np.maximum.accumulate(level + 1)
        rates = tokens / (drafting + self.costs.drafting(positions, rows))
        best = int(rates.argmax())
        self._gain = float(rates[best]) * self.costs(rows, rows) / rows
        if self._gain <= 1:
            return [0] * len(batch)
        depths: list[int] = np.bincount(row[: best + 1], minlength=len(batch)).tolist()
        return depths

    def _probing(self, batch: Sequence[_History], depths: Sequence[int], rows: int) -> list[int]:
        """These depths, and one level now and then for requests that do not draft."""
        plain, nodes = self.costs(rows, rows), len(batch) * self._nodes[0]
        # One that never drafted tries as soon as that costs a percent, if there is experience.
        first = self._probe_every
        if self._costs.start is not None:
            price = (self._costs.start + self.costs(rows + nodes, rows)) / plain - 1
            first = min(first, round(max(_SOONEST, price / _PRICE)))
        return [
            depth or int(known.plain_steps + 1 >= (self._probe_every if known.tried else first))
            for known, depth in zip(batch, depths, strict=True)
        ]

    def odds(self, request: Request) -> list[float]:
        """Per level how likely a draft passes it, given that it passed the one above."""
        return self._of(request).odds(self._overall.odds())

    # After a step

    def observe(self, outcomes: Sequence[Outcome], draft_seconds: float) -> None:
        """Learn the odds, the sizes of drafts, and what drafting costs."""
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
            self._costs.add(draft_seconds, deepest, caught_up=caught_up)

    def release(self, request: Request) -> None:
        """Forget the request; what it taught about all stays."""
        self._requests.pop(request.key, None)
