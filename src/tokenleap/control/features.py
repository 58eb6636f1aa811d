"""Features: how a lookup found a token, and how often tokens that were found so are right."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

from tokenleap.control.estimates import Decayed, moved
from tokenleap.core.acceptance import Accepted

if TYPE_CHECKING:
    from tokenleap.core.tree import Draft
    from tokenleap.decode import Outcome

LONGEST_MATCH = 16
"""Longer matches count as this long."""

LONGEST_CONTEXT, NUM_RANKS = 3, 8
"""For tokens that were probable after a context: longest context, and ranks per context."""

_BY_MATCH: list[float] = [0.0, *(1 - 0.8 / length**0.7 for length in range(1, LONGEST_MATCH + 1))]
_LATER_RANKS: list[float] = [0.12, 0.06, 0.04, 0.03, 0.02, 0.015, 0.01]
_BY_RANK = [rate for first in (0.4, 0.5, 0.6) for rate in (first, *_LATER_RANKS)]
_BY_PREDICTION: list[float] = [
    *(0.3, 0.25, 0.2, 0.15),  # guesses after a divergence, by its age
    0.6,  # the first token of an edit that was seen before
    0.6,  # the first token of the text
    *(1 - 0.5 / length**0.7 for length in range(1, LONGEST_MATCH + 1)),
]
_ALONE = [*_BY_MATCH, *_BY_RANK, *_BY_PREDICTION]
_NUM_ALONE = len(_ALONE)
_AGREED = [(1 + rate) / 2 for rate in _ALONE]
_DISAGREED = [rate / 4 for rate in _ALONE]
_FIRST_CLAIM = 3 * _NUM_ALONE
_STEPS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97, 1.0)
_PRIOR_RATES: list[float] = [
    *(*_ALONE, *_AGREED, *_DISAGREED),
    *((low + high) / 2 for low, high in pairwise(_STEPS)),  # by the probability that is claimed
]
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
"""Most tokens after a divergence from a predicted text that may be guessed."""

_FIRST_GUESS = LONGEST_MATCH + 1 + len(_BY_RANK)

EDITED = _FIRST_GUESS + LONGEST_GUESS
"""Feature of the first token of an edit that was made before in a predicted text."""


def by_guess(age: int) -> int:
    """Feature of a guess `age` tokens (from 1) after a divergence from a predicted text."""
    return _FIRST_GUESS + age - 1


def by_prediction(length: int) -> int:
    """Feature of a token of the predicted text, after a match of `length` tokens.

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
    return 0 < feature < _NUM_ALONE or 2 * _NUM_ALONE <= feature < _FIRST_CLAIM


def with_claims(draft: Draft) -> Draft:
    """A draft in which every token without a feature has that of the probability it was given."""
    above = (1.0, *draft.path_probs)
    features = list(draft.features or (0,) * draft.tree.num_drafted)
    for node, feature in enumerate(features, 1):
        if not feature:
            before = above[draft.tree.parents[node]]
            claimed = above[node] / before if before else 0.0
            place = min(bisect_right(_STEPS, claimed), len(_STEPS) - 1) - 1
            features[node - 1] = _FIRST_CLAIM + place
    return replace(draft, features=tuple(features))


def trained_part(draft: Draft) -> Draft:
    """A trained draft without the looked-up tokens below it."""
    if not draft.features:
        return draft
    return draft.only([n for n, feature in enumerate(draft.features, 1) if not is_graft(feature)])


def without_grafts(outcome: Outcome) -> Outcome:
    """The outcome of the trained draft alone."""
    draft, accepted = trained_part(outcome.draft), outcome.accepted
    if draft is outcome.draft:
        return outcome
    last = draft.tree.num_drafted  # grafts come after
    path = tuple(node for node in accepted.path if node <= last)
    rejected = tuple(node for node in accepted.rejected if node <= last)
    token = accepted.token
    if len(path) < len(accepted.path):
        token = outcome.draft.tree.tokens[accepted.path[len(path)]]
    reason = accepted.reason if rejected else ""
    return replace(outcome, draft=draft, accepted=Accepted(path, token, rejected, reason))


def prior_rate(feature: int) -> float:
    return _PRIOR_RATES[feature]


def path_probs(draft: Draft, rate: Callable[[int], float], factor: float = 1.0) -> list[float]:
    """For each drafted node the probability that it and all its drafted ancestors are right.

    The rates by features are multiplied by `factor`.
    """
    path = [1.0]
    for parent, feature in zip(draft.tree.parents[1:], draft.features, strict=True):
        path.append(path[parent] * factor * rate(feature))
    return path[1:]


_UNLIKE = 0.15
"""So many times as often are tokens right in texts that are unlike others."""

_MOST_SURE = 0.9
"""Not even a rate above this is taken to say more: a long text has a few wrong tokens."""

_MEMORY_OF_FIT, _LEAST_ODDS, _MOST_ODDS = 0.95, 0.1, 30_000.0
"""How much of the odds each token leaves, and their limits."""

_LEAST_LIKE, _FIRST_LIKE, _MOST_LIKE = 0.1, 0.85, 0.95
"""Probability that a new request's text is like others; it follows that of the last ones to end."""


class Fit:
    """How well acceptance rates, which are learnt from all requests, fit one of them.

    Its text is like those of others, and tokens are right as often as the rates say; or it is not,
    and they are right `_UNLIKE` times as often. Each token that turns out right or wrong changes
    the odds by its likelihood ratio: one that was nearly certain and wrong says much, and an
    unlikely one little. Earlier tokens count less.

    Args:
        like: the probability that the text is like others.
    """

    def __init__(self, like: float) -> None:
        self._prior = self._odds = like / (1 - like)

    @property
    def like(self) -> float:
        return self._odds / (1 + self._odds)

    @property
    def factor(self) -> float:
        """What the rates are to be multiplied by."""
        return self.like + (1 - self.like) * _UNLIKE

    def add(self, rate: float, *, right: bool) -> None:
        rate = min(rate, _MOST_SURE)
        ratio = 1 / _UNLIKE if right else (1 - rate) / (1 - _UNLIKE * rate)
        odds = self._prior * (self._odds / self._prior) ** _MEMORY_OF_FIT * ratio
        self._odds = min(_MOST_ODDS, max(_LEAST_ODDS, odds))


class AcceptanceRates:
    """For each feature the probability that a looked-up token is right if its parent is."""

    def __init__(self) -> None:
        self._like = _FIRST_LIKE
        self._rates = list(_PRIOR_RATES)
        self._seen = [Decayed(memory=0.97, prior_weight=1.5) for _ in _PRIOR_RATES]

    def of(self, feature: int) -> float:
        return self._rates[feature]

    def fit(self) -> Fit:
        """How well they fit a new request."""
        return Fit(self._like)

    def ended(self, fit: Fit) -> None:
        """Expect more requests like this one, which has ended."""
        like = moved(self._like, fit.like, share=0.15)
        self._like = min(_MOST_LIKE, max(_LEAST_LIKE, like))

    def add(self, feature: int, *, right: bool) -> None:
        seen = self._seen[feature]
        seen.add(right)
        self._rates[feature] = seen.given(_PRIOR_RATES[feature])

    def learn(self, proposal: Draft, outcome: Outcome, fit: Fit | None = None) -> None:
        """Follow the generated tokens through a proposal, and count which children were right."""
        if not proposal.features:
            return
        drafted, accepted = outcome.draft.tree, outcome.accepted
        tree, node = proposal.tree, 0
        for true in (*(drafted.tokens[kept] for kept in accepted.path), accepted.token):
            children, node = tree.children[node], -1
            for child in children:
                right, feature = tree.tokens[child] == true, proposal.features[child - 1]
                if fit is not None:
                    fit.add(self.of(feature), right=right)
                self.add(feature, right=right)
                if right:
                    node = child
            if node < 0:
                return
