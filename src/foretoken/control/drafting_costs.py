"""`DraftingCosts`: what the levels of drafts cost, measured from step to step, for `cost_model`."""

from __future__ import annotations

__all__ = ["DraftingCosts", "levels_of_one", "smoothed"]

_SHARED = 0.7
"""Part of the time of a level of one request that further requests of the same pass share. With an
EAGLE head, the levels of 8 requests take 3 times as long as those of one."""


def smoothed(known: float, seconds: float) -> float:
    """A running mean with one more measurement.

    A measurement counts as at most twice the mean, since it may be an outlier.
    """
    return known + 0.1 * (min(seconds, 2 * known) - known)


def levels_of_one(deepest: float, drafted: float) -> float:
    """What drafting costs, in levels of one request.

    Args:
        deepest: the depth of the deepest draft.
        drafted: the depths of all drafts together.
    """
    return _SHARED * deepest + (1 - _SHARED) * drafted


class DraftingCosts:
    """Seconds of drafting, without the target's pass.

    Attributes:
        level: seconds of one level of one request. It is an upper bound as long as all timed drafts
            included reading a text.
        token: seconds to read a token of a request's text; None before the first reading.
        bound: whether `level` is only an upper bound.
    """

    def __init__(self) -> None:
        self.level, self.bound = 0.0, True
        self.token: float | None = None

    def add(self, seconds: float, levels: float, *, caught_up: bool, read: int = 0) -> None:
        """Learn from a step that drafted, after reading so many tokens of texts.

        Args:
            seconds: of drafting.
            levels: see `levels_of_one`.
            caught_up: whether all drafting requests could draft in the previous step, too.
            read: tokens of texts that were read.
        """
        per_level = seconds / max(1.0, levels)
        if read:
            per_token = max(0.0, seconds - levels * self.level) / read
            self.token = smoothed(self.token or per_token, per_token)
        if caught_up and self.bound:
            self.level, self.bound = per_level, False
        elif self.bound:
            self.level = min(per_level, self.level or per_level)
        elif caught_up or per_level < self.level:
            self.level = smoothed(self.level, per_level)
