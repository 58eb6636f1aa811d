"""The best step, given what is expected of every level of every draft; for `cost_model`.

Everything here is a function of numbers. What they are estimated from is in `estimates.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import itemgetter, mul, truediv
from typing import TYPE_CHECKING

from tokenleap.control.base import Expected

if TYPE_CHECKING:
    from tokenleap.core.tree import TokenTree
    from tokenleap.request import Request

__all__ = [
    "Chances",
    "DeeperLevels",
    "DraftSizes",
    "DraftingCosts",
    "Plan",
    "Rest",
    "best_plan",
    "levels_of_one",
    "reading",
    "smoothed",
]


@dataclass(frozen=True)
class Chances:
    """Expectations of the drafts of R requests with L levels.

    Args:
        passed: [R, L] the probability that a level of a draft is accepted.
        drafted: [L] the share of drafts that get so deep, if their budgets do.
    """

    drafts: Sequence[float]
    passed: Sequence[Sequence[float]]
    nodes: Sequence[float]
    drafted: Sequence[float]

    def ranked(self) -> list[tuple[float, int, int]]:
        """Expected tokens per node, request and level, the best first."""
        ranked: list[tuple[float, int, int]] = []
        for row, of_row in enumerate(self.passed):
            # A level needs those above it, so it is worth no more than they are.
            worth = accumulate(map(truediv, of_row, self.nodes), min)
            ranked += [(each, row, level) for level, each in enumerate(worth)]
        ranked.sort(key=itemgetter(0), reverse=True)  # stable
        return ranked

    def times(self, deeper: float | None) -> Sequence[float]:
        """[L] what each level of a draft costs, in first levels; `deeper` as in `best_plan`."""
        if deeper is None:
            return self.drafted
        return [1.0, *[deeper] * (len(self.drafted) - 1)]

    def gains(
        self, rows: int, node_cost: float, level_cost: float, deeper: float | None = None
    ) -> list[float]:
        """For each request the saving of its best draft, if all of them share the drafting.

        Args:
            node_cost: what a node adds to a pass, as a share of the time of a plain pass.
        """
        requests = len(self.drafts)
        per_level = level_cost * levels_of_one(1.0, float(requests)) / requests
        gains = []
        times = [per_level * each for each in self.times(deeper)]
        for has, of_row in zip(self.drafts, self.passed, strict=True):
            levels = [
                has * (reached / rows - each * node_cost) - seconds
                for reached, each, seconds in zip(of_row, self.nodes, times, strict=True)
            ]
            gains.append(max(accumulate(levels)))
        return gains


@dataclass(frozen=True)
class Plan:
    """The best step with drafts."""

    depths: list[int]
    rate: float
    expected: Expected


def best_plan(
    chances: Chances,
    beside: Expected,
    seconds: Callable[[float], float],
    per_level: float,
    deeper: float | None = None,
) -> Plan:
    """The draft depth of each request that maximizes the batch's tokens per second.

    Levels are taken in order of their expected tokens per node, as many as raise the rate.

    Args:
        deeper: of drafts that are made at once, what a further level costs as a share of the first
            one; None if levels are drafted one by one.
    """
    ranked = chances.ranked()
    drafts, passed, nodes = chances.drafts, chances.passed, chances.nodes
    tokens, positions = beside.tokens, beside.positions
    times = chances.times(deeper)
    upto = list(accumulate(times))  # levels of a draft, by the depth of its budget
    likely, deepest, levels_of_all = 0.0, 0.0, 0.0  # lower bound of P(any has a draft); levels
    rate, length, expected = 0.0, 0, beside
    # Not by NumPy: for a few levels, its calls take several times as long.
    for count, (_, row, level) in enumerate(ranked, 1):
        tokens += drafts[row] * passed[row][level]
        positions += drafts[row] * nodes[level]
        likely, deepest = max(likely, drafts[row]), max(deepest, upto[level])
        levels_of_all += times[level]
        drafting = per_level * likely * levels_of_one(deepest, levels_of_all)
        of_count = tokens / (drafting + seconds(positions))
        if of_count > rate:
            rate, length, expected = of_count, count, Expected(tokens, positions, drafting)
    depths = [0] * len(drafts)
    for _, row, _ in ranked[:length]:
        depths[row] += 1
    return Plan(depths, rate, expected)


# `DraftSizes`: how many nodes drafts have by the depth of their budgets, for `cost_model`.
#
# Trees may be smaller than their shape, and chains may end early. So each level has a ratio: its
# nodes over those of the level above. It is learnt from the drafts that had nodes above and whose
# budgets had the level. A level that no budget had keeps the ratio that was expected. So however
# early drafts end, deeper ones do not seem larger than they would be, and may be tried again.


_MEMORY, _PRIOR_WEIGHT = 0.9, 1.0
"""Weight of the past after each draft, and of what was expected, in nodes of the level above."""

_LEAST_NODES = 0.01
"""A level is taken to add at least this many nodes, even if noisy averages say less."""


class DraftSizes:
    """Mean numbers of nodes.

    Attributes:
        of_levels: mean number of nodes of each level, if the budget has it.
    """

    def __init__(self, expected: Sequence[int]) -> None:
        self._expected = [below / above for above, below in pairwise((1, *expected))]
        # Of each level: its nodes, and those above it, in the drafts whose budgets had the level.
        self._here, self._above = [0.0] * len(expected), [0.0] * len(expected)
        self.of_levels = [float(nodes) for nodes in expected]

    def learn(self, tree: TokenTree, allowed: int) -> None:
        """Learn from a draft whose budget had this depth."""
        levels = len(self._expected)
        nodes = [1, *[0] * levels]
        for depth in tree.depths[1:]:
            nodes[min(depth, levels)] += 1
        for level in range(min(allowed, levels)):
            if not nodes[level]:
                break
            self._here[level] = _MEMORY * self._here[level] + nodes[level + 1]
            self._above[level] = _MEMORY * self._above[level] + nodes[level]
        self.of_levels = [max(_LEAST_NODES, nodes) for nodes in accumulate(self._learnt(), mul)]

    def _learnt(self) -> Iterator[float]:
        """The ratio of each level."""
        for here, above, expected in zip(self._here, self._above, self._expected, strict=True):
            yield (here + _PRIOR_WEIGHT * expected) / (above + _PRIOR_WEIGHT)


# `DraftingCosts`: what the levels of drafts cost, measured from step to step, for `cost_model`.
#
# Costs are counted in levels of one request. If one pass of a drafter makes all levels of a draft,
# the first one costs as much as a pass for it alone, and each further one a share of that, which
# `DeeperLevels` learns. It is near 0 where a pass spends its time reading weights.


_SHARED = 0.7
"""Part of the time of a level of one request that further requests of the same pass share. With an
EAGLE head, the levels of 8 requests take 3 times as long as those of one."""


_SHORTEST = 32
"""Tokens that a pass reads in the time of one: a part of what reading costs is the same for all."""


_OF_LATEST, _FEWEST = 0.03, 8
"""Weight of the latest draft in the regression, and fewest drafts of one."""


def smoothed(known: float, measured: float) -> float:
    """A running mean with one more measurement.

    A measurement counts as at most twice the mean, since it may be an outlier.
    """
    return known + 0.1 * (min(measured, 2 * known) - known)


def levels_of_one(deepest: float, drafted: float) -> float:
    """The cost of drafting, in levels of one request."""
    return _SHARED * deepest + (1 - _SHARED) * drafted


class DeeperLevels:
    """The cost of each further level of a draft made at once, as a share of the first one's.

    It is the slope of a running regression line of costs on depths.
    """

    def __init__(self) -> None:
        self.share = 0.0
        self._count = 0
        self._depth = self._cost = self._variance = self._covariance = 0.0

    def add(self, depth: float, cost: float) -> None:
        """Learn from the drafts of a step: their mean depth, and the cost of one."""
        self._count += 1
        weight = max(_OF_LATEST, 1 / self._count)
        cost = min(cost, 2 * self._cost) if self._count > 1 else cost  # it may be an outlier
        deeper, dearer = depth - self._depth, cost - self._cost
        self._depth += weight * deeper
        self._cost += weight * dearer
        self._variance = (1 - weight) * (self._variance + weight * deeper * deeper)
        self._covariance = (1 - weight) * (self._covariance + weight * deeper * dearer)
        if self._count >= _FEWEST and self._variance >= 1:
            slope = max(0.0, self._covariance / self._variance)
            first = self._cost - slope * (self._depth - 1)
            self.share = min(1.0, slope / first) if first > 0 else 1.0

    def levels(self, depth: float) -> float:
        """The cost of a draft so deep, in first levels."""
        return 1 + self.share * (depth - 1) if depth > 0 else 0.0


def reading(request: Request) -> int:
    """Tokens of text and source that the first draft of a request has to read.

    A pass over a few tokens takes as long as one over `_SHORTEST`.
    """
    source = 0 if request.source is None else len(request.source)
    return max(_SHORTEST, source + len(request.token_ids))


class DraftingCosts:
    """The cost of drafting, without the target's pass, in plain passes over one row.

    The unit makes costs comparable that were measured at different times: another load of the
    machine changes both in the same way, and what is not drafted is not measured.

    Attributes:
        level: of one level of one request. It is an upper bound as long as all timed drafts
            included reading a text.
        token: of reading one token (see `reading`); None before it can be told apart from `level`.
    """

    def __init__(self) -> None:
        self.level, self.bound = 0.0, True
        self.token: float | None = None
        self.known = False
        self._readings: list[tuple[float, float, int]] = []  # as long as `level` is a bound

    def add(self, cost: float, levels: float, *, caught_up: bool, read: int = 0) -> None:
        """Learn from a step that drafted."""
        per_level = cost / max(1.0, levels)
        self.known = True
        if read:
            self._readings.append((cost, levels, read))
        if caught_up and self.bound:
            self.level, self.bound = per_level, False
        elif self.bound:
            self.level = min(per_level, self.level or per_level)
        elif caught_up or per_level < self.level:
            self.level = smoothed(self.level, per_level)
        self._learn_readings()

    def _learn_readings(self) -> None:
        """Learn what reading costs: what is left of a first draft without its levels."""
        if self.bound:
            del self._readings[:-1]
            return
        for cost, levels, read in self._readings:
            per_token = max(0.0, cost - levels * self.level) / read
            self.token = smoothed(self.token or per_token, per_token)
        self._readings.clear()


# `Rest`: steps without drafts that are planned at once, because a plan takes time, too.


@dataclass
class Rest:
    """Steps in which nothing is planned. It ends early if other requests are in the step."""

    keys: tuple[int, ...] = ()
    rows: int = 0
    waiting: Sequence[Request] = ()
    steps: int = 0
    taken: int = 0

    def goes_on(self, batch: Sequence[Request], rows: int) -> bool:
        """Whether the step of this batch is another one of them; it is then counted."""
        if not self.steps or rows != self.rows or tuple(r.key for r in batch) != self.keys:
            return False
        self.steps, self.taken = self.steps - 1, self.taken + 1
        return True
