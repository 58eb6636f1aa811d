"""What drafts have come to so far: how often there was one, how far it passed, how large it was.

Counts decay with every draft, so that an estimate follows its text: those of one request over about
the last ten drafts, those of all requests, which a new one starts from, over about fifty.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from foretoken.core.tree import Draft

__all__ = [
    "LONGEST_CONTEXT",
    "LONGEST_MATCH",
    "NUM_RANKS",
    "OF_ALL",
    "OF_ONE",
    "Answers",
    "ChainOdds",
    "DraftSizes",
    "GuessOdds",
    "Odds",
    "TreeOdds",
    "at_first",
    "by_match",
    "by_rank",
    "path_odds",
]

OF_ONE, OF_ALL = 0.9, 0.98
"""Weight of the past after each draft, for one request and for all."""

_PRIOR = 2.0
"""Weight, in tokens, of what is known already when something new starts."""

_UNKNOWN = 0.5
"""Odds of what nothing is known of: enough to try it."""

_WEIGHT_OF_NEW = 0.1


class Answers:
    """Whether the drafter had a guess when it was asked."""

    __slots__ = ("_answered", "_asked", "_memory")

    def __init__(self, memory: float) -> None:
        self._memory = memory
        self._asked = self._answered = 0.0

    def add(self, *, drafted: bool) -> None:
        """One more time it was asked."""
        self._asked = self._memory * self._asked + 1
        self._answered = self._memory * self._answered + drafted

    def share(self, prior: float = 1.0) -> float:
        """How likely it has a guess."""
        return (self._answered + _PRIOR * prior) / (self._asked + _PRIOR)


class ChainOdds:
    """Of chains: one acceptance rate alpha for all levels, as the theory has it."""

    __slots__ = ("_accepted", "_levels", "_memory", "_rejected")

    def __init__(self, memory: float, levels: int) -> None:
        self._memory, self._levels = memory, levels
        self._accepted = self._rejected = 0.0

    def add(self, passed: int, rejected: int, asked: int) -> None:
        """One more draft: levels passed, tokens turned down, levels it might have had."""
        self._accepted = self._memory * self._accepted + passed
        self._rejected = self._memory * self._rejected + rejected

    def odds(self, prior: Sequence[float]) -> list[float]:
        """Per level the probability that it is passed, given that the one above was."""
        accepted = self._accepted + _PRIOR * (prior[0] if prior else _UNKNOWN)
        return [accepted / (self._accepted + self._rejected + _PRIOR)] * self._levels


class TreeOdds:
    """Of trees, whose levels have different numbers of branches: each level by itself.

    What is not known of a level is taken from the one above, so that deeper ones are tried where
    those pass; what has not been seen for long is forgotten, so that they are tried again.
    """

    __slots__ = ("_memory", "_passed", "_reached")

    def __init__(self, memory: float, levels: int) -> None:
        # A draft says something of each level once, where alpha is seen once a token.
        self._memory = memory**0.5
        self._reached, self._passed = [0.0] * levels, [0.0] * levels

    def add(self, passed: int, rejected: int, asked: int) -> None:
        """See `ChainOdds.add`; where a tree ends before the levels asked for it is not passed."""
        memory = self._memory
        self._reached = [memory * count for count in self._reached]
        self._passed = [memory * count for count in self._passed]
        for level in range(min(passed + 1, asked, len(self._reached))):
            self._reached[level] += 1
            self._passed[level] += level < passed

    def odds(self, prior: Sequence[float]) -> list[float]:
        """See `ChainOdds.odds`."""
        odds: list[float] = []
        above = _UNKNOWN
        for level, reached in enumerate(self._reached):
            expected = prior[level] if prior else above
            above = (self._passed[level] + _PRIOR * expected) / (reached + _PRIOR)
            odds.append(above)
        return odds


Odds = ChainOdds | TreeOdds


LONGEST_MATCH = 16
"""Longer ones are not told apart."""

LONGEST_CONTEXT, NUM_RANKS = 3, 8
"""Of tokens that were probable after a context: its length, and how many of them."""

_BY_MATCH: list[float] = [0.0, *(1 - 0.8 / length**0.7 for length in range(1, LONGEST_MATCH + 1))]
_FIRST_RANK = [0.4, 0.5, 0.6]
_LATER_RANKS = [0.12, 0.06, 0.04, 0.03, 0.02, 0.015, 0.01]
_BY_RANK = [odds for first in _FIRST_RANK for odds in (first, *_LATER_RANKS)]
_AT_FIRST = [*_BY_MATCH, *_BY_RANK]
"""Odds by features where nothing is known: 0.2 after a match of one token, 0.9 after sixteen."""


def by_match(length: int, drafted: int) -> tuple[int, ...]:
    """Grounds of a chain that was found by the last tokens: each makes the match longer by one.

    Args:
        length: of the match before the first.
        drafted: tokens of the chain.
    """
    apart = max(0, min(drafted, LONGEST_MATCH - length))
    return (*range(length, length + apart), *(LONGEST_MATCH,) * (drafted - apart))


def by_rank(rank: int, context: int = 1) -> int:
    """Grounds of a token that was of this rank, from 0 on, when so many before it came before."""
    return LONGEST_MATCH + 1 + NUM_RANKS * (context - 1) + rank


def at_first(features: int) -> float:
    """How likely a token of these features is right where nothing is known."""
    return _AT_FIRST[features]


def path_odds(guess: Draft, odds: Callable[[int], float]) -> list[float]:
    """Of each drafted node that it is right and all before it, by the odds of its features."""
    path = [1.0]
    for parent, features in zip(guess.tree.parents[1:], guess.features, strict=True):
        path.append(path[parent] * odds(features))
    return path[1:]


_PRIOR_OF_ALL, _PRIOR_OF_ONE = 3.0, 4.0
"""Weight, in tokens, of those; and for one request of what is known of all."""

_MEMORY_OF_ALL, _MEMORY_OF_ONE = 0.99, 0.93


class GuessOdds:
    """Of guesses that were looked up: how often a token is right, by its features.

    Args:
        overall: those of all requests, which those of one begin with; None for these themselves.
    """

    __slots__ = ("_memory", "_odds", "_overall", "_prior", "_reached", "_right")

    def __init__(self, overall: GuessOdds | None = None) -> None:
        self._overall = overall
        self._memory = _MEMORY_OF_ALL if overall is None else _MEMORY_OF_ONE
        self._prior = _PRIOR_OF_ALL if overall is None else _PRIOR_OF_ONE
        self._odds: list[float | None] = [None] * len(_AT_FIRST)
        self._right, self._reached = [0.0] * len(_AT_FIRST), [0.0] * len(_AT_FIRST)

    def of(self, features: int) -> float:
        """How likely a token is right, given that its predecessor is."""
        odds = self._odds[features]
        return self._expected(features) if odds is None else odds

    def _expected(self, features: int) -> float:
        """The same as far as others tell."""
        return _AT_FIRST[features] if self._overall is None else self._overall.of(features)

    def likely(self, guess: Draft, least: float) -> list[tuple[float, int]]:
        """Probability and node: that it is right and all before it; the unlikely left out."""
        if not guess.tree.is_chain:
            paths = path_odds(guess, self.of)
            return [(odds, node) for node, odds in enumerate(paths, 1) if odds >= least]
        found, path, known = list[tuple[float, int]](), 1.0, self._odds
        for node, features in enumerate(guess.features, 1):
            odds = known[features]
            path *= self._expected(features) if odds is None else odds
            if path < least:
                break
            found.append((path, node))
        return found

    def add(self, features: int, *, right: bool) -> None:
        """One more token whose predecessors were right."""
        self._right[features] = self._memory * self._right[features] + right
        self._reached[features] = self._memory * self._reached[features] + 1
        known = self._right[features] + self._prior * self._expected(features)
        self._odds[features] = known / (self._reached[features] + self._prior)


class DraftSizes:
    """How many nodes a draft of a given depth has.

    Args:
        nodes: [L] for depths 1 to L, as far as is known beforehand.
    """

    def __init__(self, nodes: Sequence[float]) -> None:
        self.nodes = list(nodes)
        self._seen = [False] * len(self.nodes)

    def add(self, asked: int, nodes: int) -> None:
        """One more draft of the depth asked for."""
        index = min(asked, len(self.nodes)) - 1
        if not self._seen[index]:
            self.nodes[index], self._seen[index] = float(nodes), True
        self.nodes[index] += _WEIGHT_OF_NEW * (nodes - self.nodes[index])
