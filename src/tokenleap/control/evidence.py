"""Estimates of how often drafted tokens are accepted. Counts decay, so they follow the text."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenleap.core.tree import Draft
    from tokenleap.decode import Outcome


__all__ = [
    "EDITED",
    "LONGEST_CONTEXT",
    "LONGEST_GUESS",
    "LONGEST_MATCH",
    "NUM_RANKS",
    "AcceptanceRates",
    "Frequency",
    "agreed",
    "by_guess",
    "by_match",
    "by_prediction",
    "by_rank",
    "disagreed",
    "is_graft",
    "path_probs",
    "prior_rate",
]


class Frequency:
    """A running estimate of how often something happens.

    Args:
        memory: weight of the past after each new count.
        prior_weight: weight of the prior, in counts.
    """

    __slots__ = ("_memory", "_prior_weight", "_yes", "count")

    def __init__(self, memory: float, prior_weight: float) -> None:
        self._memory, self._prior_weight = memory, prior_weight
        self._yes = self.count = 0.0

    def add(self, yes: float, no: float = 0.0) -> None:
        """Count this many more cases in which it happened, and in which it did not."""
        self._yes = self._memory * self._yes + yes
        self.count = self._memory * self.count + yes + no

    def given(self, prior: float) -> float:
        """The estimate, if `prior` was expected before anything was counted."""
        weight = self._prior_weight
        return (self._yes + weight * prior) / (self.count + weight)


# A feature (`Draft.features`) says how a lookup found a token, and so how likely it is right

LONGEST_MATCH = 16
"""Longer matches count as this long."""

LONGEST_CONTEXT, NUM_RANKS = 3, 8
"""For tokens that were probable after a context: longest context, and ranks per context."""

_BY_MATCH: list[float] = [0.0, *(1 - 0.8 / length**0.7 for length in range(1, LONGEST_MATCH + 1))]
_LATER_RANKS: list[float] = [0.12, 0.06, 0.04, 0.03, 0.02, 0.015, 0.01]
_BY_RANK = [rate for first in (0.4, 0.5, 0.6) for rate in (first, *_LATER_RANKS)]
_BY_PREDICTION: list[float] = [
    *(0.3, 0.25, 0.2, 0.15),  # guesses behind a divergence, by its age
    0.6,  # the first token of an edit that was seen before
    0.6,  # the first token of the text
    *(1 - 0.5 / length**0.7 for length in range(1, LONGEST_MATCH + 1)),
]
_ALONE = [*_BY_MATCH, *_BY_RANK, *_BY_PREDICTION]
_NUM_ALONE = len(_ALONE)
_AGREED = [(1 + rate) / 2 for rate in _ALONE]
_DISAGREED = [rate / 4 for rate in _ALONE]
_PRIOR_RATES: list[float] = [*_ALONE, *_AGREED, *_DISAGREED]
"""Prior acceptance rate by feature: 0.2 after a match of 1 token, 0.9 after one of 16."""


def by_match(length: int, drafted: int) -> tuple[int, ...]:
    """Features of a chain of `drafted` tokens that was found by a match of `length` tokens.

    Each drafted token makes the match one token longer.
    """
    apart = max(0, min(drafted, LONGEST_MATCH - length))
    return (*range(length, length + apart), *(LONGEST_MATCH,) * (drafted - apart))


def by_rank(rank: int, context: int = 1) -> int:
    """Feature of the token of this rank (from 0) after a context of `context` tokens."""
    return LONGEST_MATCH + 1 + NUM_RANKS * (context - 1) + rank


LONGEST_GUESS = 4
"""Most tokens behind a divergence from a predicted text that may be guessed."""

_FIRST_GUESS = LONGEST_MATCH + 1 + len(_BY_RANK)

EDITED = _FIRST_GUESS + LONGEST_GUESS
"""Feature of the first token of an edit that was made before in a predicted text."""


def by_guess(age: int) -> int:
    """Feature of a guess `age` tokens (from 1) behind a divergence from a predicted text."""
    return _FIRST_GUESS + age - 1


def by_prediction(length: int) -> int:
    """Feature of a token of the predicted text, behind a match of `length` tokens.

    At the beginning of the text `length` is 0.
    """
    return EDITED + 1 + min(length, LONGEST_MATCH)


def agreed(feature: int) -> int:
    """Feature of a looked-up token that a trained drafter proposes in the same place."""
    return _NUM_ALONE + feature


def disagreed(feature: int) -> int:
    """Feature of a looked-up token beside which a trained drafter proposes only others."""
    return 2 * _NUM_ALONE + feature


def is_graft(feature: int) -> bool:
    """Whether a token was looked up and not proposed by a trained drafter; its feature is 0."""
    return feature > 0 and not _NUM_ALONE <= feature < 2 * _NUM_ALONE


def prior_rate(feature: int) -> float:
    """Prior acceptance rate of tokens with this feature."""
    return _PRIOR_RATES[feature]


def path_probs(draft: Draft, rate: Callable[[int], float]) -> list[float]:
    """For each drafted node the probability that it and all its drafted ancestors are right.

    Args:
        draft: a draft with features.
        rate: maps a feature to an acceptance rate.
    """
    path = [1.0]
    for parent, feature in zip(draft.tree.parents[1:], draft.features, strict=True):
        path.append(path[parent] * rate(feature))
    return path[1:]


_MEMORY, _PRIOR_WEIGHT = 0.97, 1.5
"""Weight of the past after each token, and weight of the prior in tokens."""


class AcceptanceRates:
    """For each feature the probability that a looked-up token is right if its parent is."""

    def __init__(self) -> None:
        self._rates = list(_PRIOR_RATES)
        self._seen = [Frequency(_MEMORY, _PRIOR_WEIGHT) for _ in _PRIOR_RATES]

    def of(self, feature: int) -> float:
        """The estimate."""
        return self._rates[feature]

    def add(self, feature: int, *, right: bool) -> None:
        """Count one more token whose ancestors were right."""
        seen = self._seen[feature]
        seen.add(right, not right)
        self._rates[feature] = seen.given(_PRIOR_RATES[feature])

    def learn(self, proposal: Draft, outcome: Outcome) -> None:
        """Follow the generated tokens through a proposal, and count which children were right.

        Args:
            proposal: what was looked up for the step; it need not be what was verified.
            outcome: what became of the step.
        """
        if not proposal.features:
            return
        drafted, accepted = outcome.draft.tree, outcome.accepted
        tree, node = proposal.tree, 0
        for true in (*(drafted.tokens[kept] for kept in accepted.path), accepted.token):
            children, node = tree.children[node], -1
            for child in children:
                right = tree.tokens[child] == true
                self.add(proposal.features[child - 1], right=right)
                if right:
                    node = child
            if node < 0:
                return
