"""`DraftingCosts`: what the levels of drafts cost, measured from step to step, for `cost_model`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from foretoken.request import Request

__all__ = ["DraftingCosts", "levels_of_one", "reading", "smoothed"]

_SHARED = 0.7
"""Part of the time of a level of one request that further requests of the same pass share. With an
EAGLE head, the levels of 8 requests take 3 times as long as those of one."""


_SHORTEST = 32
"""Tokens that a pass reads in the time of one: a part of what reading costs is the same for all."""


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
