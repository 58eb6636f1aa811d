"""`Stopping`: the path probability below which a chain is not worth another token.

Some drafters say how probable they find their tokens (`Draft.path_probs`). Whether one more token
pays then depends on the draft itself: the next token is often accepted below a path that the
drafter is sure of, and seldom below another. This beats every fixed length. SVIP (Zhang et al.,
"Draft Model Knows When to Stop") and `confidence` stop by such probabilities, too. Here the
threshold follows from the costs, and the drafter's word is not taken for it: a line is fitted to
how often the next token was accepted, given the path's probability. So it need not be one: of
sampled drafts under the rule `coupled`, it is the product of their clarity.

A token is worth drafting if it is accepted so often that its time brings at least as many tokens as
the time of the whole steps does.
"""

from __future__ import annotations

from itertools import takewhile
from math import isfinite
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenleap.decode import Outcome

__all__ = ["Stopping"]

_MEMORY = 0.995
"""Weight of the past after each draft token."""

_LOWEST, _HIGHEST, _PRIOR_WEIGHT = 0.4, 0.9, 20.0
"""Prior acceptance rate below paths of probability 0 and 1 (Qwen2.5-Coder: drafters are right more
often than they say where they are unsure), and its weight in tokens."""

_FLAT = 0.05
"""With a smaller slope, path probabilities tell nothing."""


class Stopping:
    """Learns how often a token is accepted below a path of some probability."""

    def __init__(self) -> None:
        # Sums over tokens: 1, s, s^2, y and s y, where s is the path's probability above a token,
        # and y whether it was accepted.
        self._sums = [0.0] * 5
        # The prior is a line over evenly spread s, whose mean square is 1/3.
        low, slope, weight = _LOWEST, _HIGHEST - _LOWEST, _PRIOR_WEIGHT
        sums = (1.0, 1 / 2, 1 / 3, low + slope / 2, low / 2 + slope / 3)
        self._prior = [weight * each for each in sums]

    def learn(self, outcome: Outcome) -> None:
        """Learn from a chain with path probabilities."""
        passed = len(outcome.accepted.path)
        probs = list(takewhile(isfinite, outcome.draft.path_probs))  # of no appended tokens
        # The past counts less after the last token, too: if all drafts end at their first one,
        # nothing is learnt, and what was learnt of an earlier text must not keep it so.
        self._sums = [_MEMORY ** len(probs) * old for old in self._sums]
        for depth, s in enumerate(probs[:-1], 1):
            y = float(depth < passed)
            new = (1.0, s, s * s, y, s * y)
            self._sums = [old + each for old, each in zip(self._sums, new, strict=True)]

    def least_path_prob(self, price: float) -> float:
        """The threshold of a draft.

        Args:
            price: the accepted tokens that the time of one more token would bring elsewhere.
        """
        n, s, ss, y, sy = (a + b for a, b in zip(self._sums, self._prior, strict=True))
        slope = (n * sy - s * y) / (n * ss - s * s)  # the prior alone spreads s
        low = (y - slope * s) / n
        if slope < _FLAT:
            return 0.0 if y >= price * n else 1.0
        return min(1.0, max(0.0, (price - low) / slope))
