"""Text that changes while a drafter is trained: every so many steps there is other text."""

from __future__ import annotations

from typing import Protocol

from tokenleap.training.batches import Examples
from tokenleap.training.features import Features
from tokenleap.training.trainee import Trainee

__all__ = ["Current", "Rounds"]


class Rounds(Protocol):
    """What is learnt if it is not the same from beginning to end.

    Attributes:
        steps: of each round.
    """

    steps: int

    def begin(self, number: int, trainee: Trainee) -> None:
        """Prepare a round: called at its first step, and again if training continues there.

        Args:
            number: of the round.
            trainee: with the weights with which the round begins.
        """
        ...

    def examples(self, number: int) -> Examples:
        """What a round learns from; it was prepared, perhaps by another process."""
        ...


class Current(Examples):
    """What is learnt now.

    Args:
        now: it.
    """

    def __init__(self, now: Examples) -> None:
        self.use(now)

    def use(self, now: Examples) -> None:
        """Learn from this."""
        self._now, self.sizes = now, now.sizes

    def __getitem__(self, index: int) -> Features:
        features: Features = self._now[index]
        return features
