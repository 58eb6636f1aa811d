"""`ngram_table`: frequency tables of short contexts, with back-off.

The n-gram drafter of the akunu engine. Tables of orders 2 to 4 count the whole prompt and every
committed token, and forget nothing. The successor is read from the longest context that has one. A
draft continues its own predictions. Greedy requests get the most frequent successor; on a tie the
latest one, where the source takes whichever its hash table has first. There, hashes of the contexts
are the keys, and a window bounds the history that contexts are read from; it is longer than any
context, so no draft depends on it.

Beyond the source: `window` counts the latest tokens alone. Sampled requests get a token drawn from
the counts, whose distribution is q, so speculative sampling stays exact.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tokenleap.control import Budget
from tokenleap.core.distribution import Distribution
from tokenleap.core.params import GREEDY_BELOW
from tokenleap.core.tree import Draft
from tokenleap.drafters.counted import CountedChains
from tokenleap.drafters.options.lookups import NgramTableOptions
from tokenleap.request import Request

__all__ = ["NgramTable", "NgramTableDrafter", "NgramTableOptions"]

ORDERS = (2, 3, 4)
"""An n-gram of order n is a context of n - 1 tokens and its successor."""


class NgramTable:
    """Successor counts of every context of one text.

    Args:
        window: number of latest tokens that are counted; None counts all of them.
    """

    def __init__(self, window: int | None = None) -> None:
        self._window = window
        # context -> successor -> count, with successors in the order of their last occurrence
        self._counts: dict[tuple[int, ...], dict[int, int]] = {}
        self._first = self._seen = 0  # the counted tokens are those from `_first` up to `_seen`

    def catch_up(self, tokens: Sequence[int]) -> None:
        """Count the new committed tokens, and forget those that left the window."""
        first = 0 if self._window is None else max(0, len(tokens) - self._window)
        if first >= self._seen:  # no counted token is in the window any more
            self._counts.clear()
            self._first = self._seen = first
        for stop in range(self._seen + 1, len(tokens) + 1):
            self._count(tokens, stop)
        self._seen = len(tokens)
        for start in range(self._first, first):
            self._forget(tokens, start)
        self._first = first

    def _count(self, tokens: Sequence[int], stop: int) -> None:
        """Count the n-grams that end before index `stop`."""
        for order in ORDERS:
            if order <= stop - self._first:
                *context, successor = tokens[stop - order : stop]
                counts = self._counts.setdefault(tuple(context), {})
                counts[successor] = counts.pop(successor, 0) + 1

    def _forget(self, tokens: Sequence[int], start: int) -> None:
        """Forget the n-grams that begin at index `start`."""
        for order in ORDERS:
            if start + order <= len(tokens):
                *context, successor = tokens[start : start + order]
                counts = self._counts[tuple(context)]
                counts[successor] -= 1
                if not counts[successor]:
                    del counts[successor]
                if not counts:
                    del self._counts[tuple(context)]

    def successors(self, tokens: Sequence[int]) -> dict[int, int]:
        """Successor -> count after the longest known context at the end of `tokens`, or empty."""
        for order in reversed(ORDERS):
            if order <= len(tokens) + 1:
                counts = self._counts.get(tuple(tokens[len(tokens) - order + 1 :]))
                if counts:
                    return counts
        return {}


class NgramTableDrafter(CountedChains):
    """Chains from the tables of each request's own text.

    Args:
        options: see `NgramTableOptions`.
        coupled: whether to draw with the target's own noise.
    """

    def __init__(self, options: NgramTableOptions, *, coupled: bool) -> None:
        super().__init__(options, coupled=coupled, context_length=max(ORDERS) - 1)
        self._window = options.window
        self._tables: dict[int, NgramTable] = {}

    def propose(self, batch: Sequence[Request], budgets: Sequence[Budget]) -> list[Draft]:
        """Chains that end where no context has a successor."""
        for request in batch:
            table = self._tables.setdefault(request.key, NgramTable(self._window))
            table.catch_up(request.token_ids)
        return super().propose(batch, budgets)

    def successors(
        self, request: Request, context: Sequence[int], temperature: float
    ) -> Distribution | None:
        """See `CountedChains.successors`."""
        counts = self._tables[request.key].successors(context)
        return distribution_of_counts(counts, temperature) if counts else None

    def release(self, request: Request) -> None:
        """Forget the request's tables."""
        self._tables.pop(request.key, None)


def distribution_of_counts(counts: dict[int, int], temperature: float) -> Distribution:
    """The q proportional to count^(1/temperature).

    At temperature 0 it is one-hot at the most frequent token, the latest on a tie.

    Args:
        counts: token -> count, in the order of the last occurrence.
        temperature: see `CountedOptions.draft_temperature`.
    """
    if temperature < GREEDY_BELOW:
        best = max(counts.values())
        return Distribution.one_hot(next(t for t in reversed(counts) if counts[t] == best))
    tokens, order = torch.tensor(list(counts)).sort()
    numbers = torch.tensor(list(counts.values()), dtype=torch.float32)[order]
    return Distribution((numbers.log() / temperature).softmax(-1), tokens)
