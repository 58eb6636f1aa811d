"""What drafting costs besides the target's pass, learnt from steps: Leviathan et al.'s c, measured.

A drafter that was not asked lately first catches up with the text. That is no cost of its guesses,
so that the seconds of such a step only say what those cost at most.
"""

from __future__ import annotations

__all__ = ["DraftingCosts", "Seconds", "smoothed"]

_WEIGHT_OF_NEW = 0.1

_MOST_OF_KNOWN = 2.0
"""Seconds above this many times what was expected are cut there, as a pass's are."""


class Seconds:
    """An exponential mean that a hiccup of the machine moves little.

    Attributes:
        value: None before anything has been seen; 0 where it was not told apart from the pass.
        measured: whether it is more than a bound.
    """

    __slots__ = ("measured", "value")

    def __init__(self) -> None:
        self.value: float | None = None
        self.measured = False

    def add(self, seconds: float, *, at_most: bool = False) -> None:
        """One more step; with `at_most` a bound, which the first measurement replaces."""
        known = self.value or 0.0
        if not seconds:
            self.value = known
        elif not at_most and not self.measured:
            self.value, self.measured = seconds, True
        elif not self.measured:
            self.value = min(seconds, known or seconds)
        elif not at_most or seconds < known:
            self.value = smoothed(known, seconds)

    @property
    def bounded(self) -> bool:
        """Whether a bound is all that is known."""
        return bool(self.value) and not self.measured

    def believed(self, *, trying: bool = False) -> float:
        """What to reckon with; of a bound nothing while it is tried what the truth is."""
        return 0.0 if trying and self.bounded else self.value or 0.0


def smoothed(known: float, seconds: float) -> float:
    """An exponential mean with one more measurement, cut where it is far above what was known."""
    return known + _WEIGHT_OF_NEW * (min(seconds, _MOST_OF_KNOWN * known) - known)


class DraftingCosts:
    """Of one controller's drafter.

    Attributes:
        level: a level of a draft.
        asking: a question to which the drafter had no guess.
        start: a step in which it caught up first.
    """

    def __init__(self) -> None:
        self.level, self.asking, self.start = Seconds(), Seconds(), Seconds()

    def add(self, seconds: float, depth: int, *, caught_up: bool) -> None:
        """One more step in which it was asked; the depth is 0 where it had no guess for anyone."""
        if not caught_up:
            self.start.add(seconds)
        if depth:
            self.level.add(seconds / depth, at_most=not caught_up)
        else:
            self.asking.add(seconds, at_most=not caught_up)

    @property
    def bounded(self) -> bool:
        """Whether asking again those who have caught up would tell more."""
        return self.level.bounded or self.asking.bounded
