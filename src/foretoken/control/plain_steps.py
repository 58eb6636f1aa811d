"""When a step is to have no drafts, so that what they are compared with stays known."""

from __future__ import annotations

__all__ = ["PRICE", "SOONEST", "PlainSteps"]

PRICE = 0.01
"""What may be spent on finding something out, as a share of the time."""

SOONEST = 8
"""Steps between such spendings at least."""


class PlainSteps:
    """Counts steps with drafts since the last one without."""

    def __init__(self) -> None:
        self._drafting = 0

    def count(self, *, drafted: bool) -> None:
        """One more step."""
        self._drafting = self._drafting + 1 if drafted else 0

    def due(self, gain: float) -> bool:
        """Whether one costs a percent by now, if drafts yield so many times as much as none."""
        return self._drafting >= SOONEST and PRICE * self._drafting >= gain - 1
