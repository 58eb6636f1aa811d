"""The best step, given what is expected of every level of every draft; for `cost_model`.

Everything here is a function of numbers. What they are estimated from is in `estimates.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import itemgetter, truediv

from tokenleap.control.base import Expected
from tokenleap.control.drafting_costs import levels_of_one

__all__ = ["Chances", "Plan", "best_plan"]


@dataclass(frozen=True)
class Chances:
    """What is expected of the drafts of R requests with L levels.

    Args:
        drafts: [R] the probability that a request has a draft.
        passed: [R, L] the probability that a level of a draft is accepted.
        nodes: [L] the nodes of each level.
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
            rows: number of requests in the whole step.
            node_cost: what a node adds to a pass, as a share of the time of a plain pass.
            level_cost: what a level of one request costs, as such a share.
            deeper: see `best_plan`.

        Returns:
            Shares of the time of a plain pass.
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
    """The best step with drafts.

    Args:
        depths: [R] the draft depth of each request.
        rate: expected tokens per second.
        expected: the step.
    """

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
        chances: of the R requests.
        beside: the step if none of them drafts.
        seconds: of a pass, by its number of positions.
        per_level: seconds of drafting a level of one request; 0 leaves them out.
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
