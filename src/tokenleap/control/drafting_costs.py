"""`DraftingCosts`: what the levels of drafts cost, measured from step to step, for `cost_model`.

Costs are counted in levels of one request. If one pass of a drafter makes all levels of a draft,
the first one costs as much as a pass for it alone, and each further one a share of that, which
`DeeperLevels` learns. It is near 0 where a pass spends its time reading weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenleap.request import Request

__all__ = ["DeeperLevels", "DraftingCosts", "levels_of_one", "reading", "smoothed"]

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
    """What drafting costs, in levels of one request.

    Args:
        deepest: the depth of the deepest draft.
        drafted: the depths of all drafts together.
    """
    return _SHARED * deepest + (1 - _SHARED) * drafted


class DeeperLevels:
    """What each further level of a draft that is made at once costs, as a share of the first one.

    It is the slope of a running regression line of costs on depths.

    Attributes:
        share: 0 until drafts of different depths have been timed.
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
        """What a draft so deep costs, in first levels."""
        return 1 + self.share * (depth - 1) if depth > 0 else 0.0


def reading(request: Request) -> int:
    """What the first draft of a request has to read, in tokens of its text and its source.

    A pass over a few tokens takes as long as one over `_SHORTEST`.
    """
    source = 0 if request.source is None else len(request.source)
    return max(_SHORTEST, source + len(request.token_ids))


class DraftingCosts:
    """What drafting costs, without the target's pass, in plain passes over one row.

    The unit makes costs comparable that were measured at different times: another load of the
    machine changes both in the same way, and what is not drafted is not measured.

    Attributes:
        level: of one level of one request. It is an upper bound as long as all timed drafts
            included reading a text.
        token: of reading one token (see `reading`); None before it can be told apart from `level`.
        bound: whether `level` is only an upper bound.
        known: whether anything was drafted yet.
    """

    def __init__(self) -> None:
        self.level, self.bound = 0.0, True
        self.token: float | None = None
        self.known = False
        self._readings: list[tuple[float, float, int]] = []  # as long as `level` is a bound

    def add(self, cost: float, levels: float, *, caught_up: bool, read: int = 0) -> None:
        """Learn from a step that drafted.

        Args:
            cost: of drafting.
            levels: see `levels_of_one`.
            caught_up: whether all drafting requests could draft in the previous step, too.
            read: tokens that were read before (see `reading`).
        """
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
