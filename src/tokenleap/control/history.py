"""`History`: how drafts were accepted, of one request or of all, for `cost_model`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tokenleap.control.evidence import Frequency

if TYPE_CHECKING:
    from tokenleap.decode import Outcome

__all__ = ["UNKNOWN", "History"]

UNKNOWN = 0.5
"""Acceptance rate before anything was observed: high enough to try drafts."""


class History:
    """How the drafts of one request, or of all requests, were accepted.

    Args:
        memory: weight of the past after each draft.
        levels: number of levels of the deepest draft.
        alike: whether all levels share one acceptance rate, alpha. Each level of a tree, or of a
            chain that may end early, has its own: the share of drafts that pass it, of those that
            pass the level above.
        prior_weight: of the prior of an acceptance rate, in drafts.

    Attributes:
        depth: how deep the request may draft in the current step.
        caught_up: whether it could also draft in the previous step.
        tried: whether it has ever drafted.
        plain_steps: number of steps since it could last draft; served ones count more.
        missed: seconds that drafts would have saved before the first one.
    """

    def __init__(
        self, memory: float, levels: int, *, alike: bool, prior_weight: float = 2.0
    ) -> None:
        self._levels = levels
        self._alike = alike
        # A draft counts once for each level, but once per token for alpha.
        memory_of_rates = memory if alike else memory**0.5
        self._passed = [
            Frequency(memory_of_rates, prior_weight) for _ in range(1 if alike else levels)
        ]
        self._drafted = Frequency(memory, 2.0)
        self.depth, self.plain_steps, self.missed = 0, 0.0, 0.0
        self.caught_up = self.tried = False

    @property
    def just_started(self) -> bool:
        """Whether the last step drafted and the one before did not; only valid between steps.

        The drafter then had to read the text first.
        """
        return self.depth > 0 and not self.caught_up

    def allow(self, depth: int, *, wanted: bool, counts: float = 1.0) -> None:
        """Record how deep the request may draft in the current step.

        Args:
            depth: so deep.
            wanted: whether more than 0 was chosen.
            counts: plain steps as which it counts, if it drafts nothing.
        """
        self.plain_steps = 0.0 if wanted else self.plain_steps + counts
        self.caught_up, self.depth = self.depth > 0, depth

    def rest(self, steps: int) -> None:
        """Record so many steps without a draft, after one without."""
        self.plain_steps, self.caught_up, self.depth = self.plain_steps + steps, False, 0

    def skip(self) -> None:
        """Record a step in which a draft from elsewhere cannot be beaten."""
        self.caught_up, self.depth = self.depth > 0, 0

    def add(self, outcome: Outcome, allowed: int) -> None:
        """Learn from one draft, which may have had up to `allowed` levels."""
        drafted, passed = outcome.draft.tree.num_drafted, len(outcome.accepted.path)
        self._drafted.add(drafted > 0, not drafted)
        if not drafted:
            return
        self.tried = True
        if self._alike:
            self._passed[0].add(passed, len(outcome.accepted.rejected))
            return
        for level, frequency in enumerate(self._passed):
            reached = level <= passed and level < allowed  # else its counts only decay
            frequency.add(reached and level < passed, reached and level == passed)

    def draft_rate(self, prior: float = 1.0) -> float:
        """Probability that the drafter has a draft."""
        return self._drafted.given(prior)

    def acceptance_rates(self, prior: Sequence[float] = ()) -> list[float]:
        """For each level, the probability that it is passed, given that the level above was.

        A level without observations gets the rate of the level above.
        """
        if self._alike:
            return [self._passed[0].given(prior[0] if prior else UNKNOWN)] * self._levels
        rates, above = list[float](), UNKNOWN
        for level, frequency in enumerate(self._passed):
            above = frequency.given(prior[level] if prior else above)
            rates.append(above)
        return rates
