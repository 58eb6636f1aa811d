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
        self._again = False

    def count(self, *, drafted: bool, surprised: bool = False) -> None:
        """One more step; whether what its pass took was a surprise."""
        self._drafting = self._drafting + 1 if drafted else 0
        self._again = surprised and not drafted

    def due(self, gain: float) -> bool:
        """Whether one costs a percent by now, if drafts yield so many times as much as none.

        One that surprises is followed by another: gains are no more what they seem to be.
        """
        return self._again or (self._drafting >= SOONEST and PRICE * self._drafting >= gain - 1)
