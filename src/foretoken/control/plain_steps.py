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
        self._drafting = self._surprising = 0

    def count(self, *, drafted: bool, surprised: bool = False) -> None:
        """One more step; whether what its pass took was a surprise."""
        self._drafting = self._drafting + 1 if drafted else 0
        self._surprising = self._surprising + 1 if surprised and not drafted else 0

    def due(self, gain: float) -> bool:
        """Whether one costs a percent by now, if drafts yield so many times as much as none.

        One that surprises is followed by another: gains are no more what they seem to be. Where
        that does not end it is noise.
        """
        if self._surprising:
            return self._surprising < SOONEST
        return self._drafting >= SOONEST and PRICE * self._drafting >= gain - 1
