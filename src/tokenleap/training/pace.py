"""How much a drafter may learn while it serves: a share of the time, or a count of steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tokenleap.core import clock
from tokenleap.drafters.online import OnlineOptions

__all__ = ["Pace"]


class Pace:
    """Says when a slice of learning is due.

    Args:
        options: `share` or `every`.
    """

    def __init__(self, options: OnlineOptions) -> None:
        self._rate = options.share / (1 - options.share)
        self._every = options.every
        self._credit = 0.0  # seconds
        self._steps = 0
        self.learning = self.serving = 0.0

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Count the time inside as learning."""
        began = clock.now()
        try:
            yield
        finally:
            seconds = clock.now() - began
            self.learning += seconds
            self._credit -= seconds

    def served(self, seconds: float) -> None:
        """A step took so long, without learning."""
        self.serving += seconds
        self._credit += self._rate * seconds
        self._steps += 1

    def take(self) -> bool:
        """Whether a slice is due; it is then taken."""
        if self._every is None:
            return self._credit > 0
        due = self._steps >= self._every
        self._steps -= self._every if due else 0
        return due

    def waive(self) -> None:
        """There was nothing to learn: time that was not used is not made up for."""
        self._credit, self._steps = min(0.0, self._credit), 0
