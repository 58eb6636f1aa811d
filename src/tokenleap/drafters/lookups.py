"""`ngram`: prompt lookup. It drafts the tokens that followed the last few tokens before.

Saxena, "Prompt Lookup Decoding"; vLLM's `ngram` method, whose option names are used here. The
longest suffix of the text, of `prompt_lookup_max` down to `prompt_lookup_min` tokens, is looked up
in prompt and output. The most recent occurrence is continued. If a longer match occurs in one of
the request's references, its last occurrence there is continued instead.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from tokenleap.control import Budget
from tokenleap.control.features import LONGEST_MATCH, by_match
from tokenleap.core.distribution import Distribution, truncated
from tokenleap.core.grammar import Grammar, Grammars
from tokenleap.core.params import GREEDY_BELOW
from tokenleap.core.tree import Draft, chain
from tokenleap.drafters.base import Drafter, DrafterTraits, OneByOne, PerRequest
from tokenleap.drafters.growth import GrowingChain
from tokenleap.drafters.options import (
    LONGEST_ALIGNED,
    CountedOptions,
    NgramOptions,
    NgramTableOptions,
    RegexOptions,
)
from tokenleap.request import Request


class SearchedText:
    """The text of one request as a string with one character per token.

    Python searches such a string faster than it can maintain an index.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        self._lengths = range(shortest, longest + 1)
        self._text = ""

    def catch_up(self, tokens: Sequence[int]) -> None:
        self._text += "".join(map(chr, tokens[len(self._text) :]))

    def find(self) -> tuple[int, int]:
        """The position after the latest earlier occurrence of the longest suffix, and its length.

        The match may be longer than the longest suffix that is looked up; 0 if no suffix occurs.
        """
        text, length = self._text, 0
        end = len(text) - 1  # an occurrence must have a successor
        for size in self._lengths:  # a longer suffix does not occur later than a shorter one
            start = text.rfind(text[-size:], 0, end) if size <= end else -1
            if start < 0:
                break
            end, length = start + size, size
        return end, length and _whole_match(text, end, text, length)


def _whole_match(text: Sequence[Any], position: int, own: Sequence[Any], length: int) -> int:
    """How long a match before a position in `text` is, of which `length` tokens are known."""
    most = min(LONGEST_MATCH, position, len(own))
    while length < most and text[position - length - 1] == own[-length - 1]:
        length += 1
    return length


class NgramDrafter(OneByOne):
    """Chains that continue an earlier occurrence; q is one-hot.

    It proposes nothing if no suffix has occurred before.
    """

    traits = DrafterTraits(looks_up=True, quotes_references=True)

    def __init__(self, options: NgramOptions) -> None:
        self.options = options
        self._texts = PerRequest[SearchedText]()

    def draft(self, request: Request, budget: Budget) -> Draft:
        if budget.chain <= 0:
            return Draft.empty(request.root)
        lengths = self.options.prompt_lookup_min, self.options.prompt_lookup_max
        text = self._texts.made(request.key, lambda: SearchedText(*lengths))
        text.catch_up(request.token_ids)
        position, match = text.find()
        quoted = self._quoted(request, match, budget.chain) if request.references else None
        if quoted is not None:
            copied, match = quoted
        elif match:
            copied = copy_from(request.token_ids, position, budget.chain)
        else:
            return Draft.empty(request.root)
        return Draft.deterministic(chain([request.root, *copied]), by_match(match, len(copied)))

    def _quoted(self, request: Request, least: int, length: int) -> tuple[list[int], int] | None:
        """The tokens after the last longest match in a reference, if it is longer than `least`."""
        texts, own, longest = request.references, request.token_ids, self.options.prompt_lookup_max
        found = texts.indexed("ngram", lambda: Occurrences(joined(texts.texts)))
        ends, match = found.longest(own[-longest:], longest)
        if match < min(max(least + 1, self.options.prompt_lookup_min), longest):
            return None
        position = int(ends[-1])
        match = _whole_match(found.tokens, position, own, match)
        return (found.quote(position, length), match) if match > least else None


def copy_from(tokens: Sequence[int], position: int, length: int) -> list[int]:
    """`length` tokens from `position` on; past the end it repeats the tokens it has copied.

    A text with a period shorter than the draft is thus continued for the whole draft, as in LZ77.
    """
    period = len(tokens) - position
    return [tokens[position + i % period] for i in range(length)]


# `Occurrences`: where the latest tokens of an output occur in a given text.


SEPARATOR = -1
"""Stands between two texts that are searched as one; no token has this id."""

Positions: TypeAlias = NDArray[np.int64]


def joined(texts: Iterable[Sequence[int]]) -> list[int]:
    """Texts that are searched as one."""
    tokens: list[int] = []
    for text in texts:
        tokens += (SEPARATOR, *text)
    return tokens[1:]


class Occurrences:
    """Finds the longest suffix of an output that occurs in a text, or in several (`joined`)."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = tokens
        self._array = np.array(tokens, dtype=np.int64)
        self._ends = _ends_of(self._array)

    def longest(self, suffix: Sequence[int], most: int = LONGEST_ALIGNED) -> tuple[Positions, int]:
        """Positions after the occurrences of the longest suffix, ascending, and its length.

        Where the text ends, nothing follows, so this is no occurrence.
        """
        ends = self._ends.get(suffix[-1], _NOWHERE)
        length = int(len(ends) > 0)
        while len(ends) and length < min(len(suffix), most):
            longer = ends[ends > length]
            longer = longer[self._array[longer - length - 1] == suffix[-length - 1]]
            if not len(longer):
                break
            ends, length = longer, length + 1
        return ends, length

    def quote(self, position: int, length: int) -> list[int]:
        """At most `length` tokens of one text, from this position on."""
        ahead = list(self.tokens[position : position + length])
        return ahead[: ahead.index(SEPARATOR)] if SEPARATOR in ahead else ahead

    def of(self, token: int) -> Positions:
        return self._ends.get(token, _NOWHERE)


_NOWHERE: Positions = np.empty(0, dtype=np.int64)


def _ends_of(tokens: NDArray[Any]) -> dict[int, Positions]:
    """Token -> ascending positions after its occurrences in [N] tokens; text ends are none."""
    (followed,) = (tokens[1:] != SEPARATOR).nonzero()
    order = followed[tokens[followed].argsort(kind="stable")]
    distinct, starts = np.unique(tokens[order], return_index=True)
    return dict(zip(distinct.tolist(), np.split(order + 1, starts[1:]), strict=False))


# Chains drawn from counted successors: what `ngram_table` and `corpus_ngram` share.


class CountedChains(OneByOne):
    """Chains whose q comes from counts."""

    def __init__(self, options: CountedOptions, *, coupled: bool, context_length: int) -> None:
        self._options = options
        self._coupled = coupled
        self._context_length = context_length

    @abstractmethod
    def successors(
        self, request: Request, context: Sequence[int], temperature: float
    ) -> Distribution | None:
        """The distribution of the next token; one-hot at temperature 0, None if unknown."""

    def draft(self, request: Request, budget: Budget) -> Draft:
        temperature = self._temperature(request)
        noise = request.noise.at(len(request.token_ids)).drafting(coupled=self._coupled)
        context = request.token_ids[-self._context_length :]
        drafted = GrowingChain(request.root, budget)
        while not drafted.ended:
            found = self.successors(request, context, temperature)
            if found is None:
                break
            drafted.draw(self._truncated(found), noise)
            context = [*context[1 - self._context_length :], drafted.tokens[-1]]
        return drafted.draft(with_probs=False)

    def _truncated(self, found: Distribution) -> Distribution:
        top_k, top_p = self._options.draft_top_k, self._options.draft_top_p
        if found.certain is not None or (top_k is None and top_p is None):
            return found
        return truncated(found, top_k or 0, 1.0 if top_p is None else top_p)

    def _temperature(self, request: Request) -> float:
        if self._options.draft_temperature is None:
            return 0.0 if request.params.greedy else 1.0
        return self._options.draft_temperature


# `ngram_table`: frequency tables of short contexts, with back-off.
#
# The n-gram drafter of the akunu engine. Tables of orders 2 to 4 count the whole prompt and every
# committed token, and forget nothing. The successor is read from the longest context that has one.
# A draft continues its own predictions. Greedy requests get the most frequent successor; on a tie
# the latest one, where the source takes whichever its hash table has first. There, hashes of the
# contexts are the keys, and a window bounds the history that contexts are read from; it is longer
# than any context, so no draft depends on it.
#
# Beyond the source: `window` counts the latest tokens alone. Sampled requests get a token drawn
# from the counts, whose distribution is q, so speculative sampling stays exact.


ORDERS = (2, 3, 4)
"""An n-gram of order n is a context of n - 1 tokens and its successor."""


class NgramTable:
    """Successor counts of every context of one text, or of its latest `window` tokens."""

    def __init__(self, window: int | None = None) -> None:
        self._window = window
        # context -> successor -> count, with successors in the order of their last occurrence
        self._counts: dict[tuple[int, ...], dict[int, int]] = {}
        self._first = self._seen = 0  # the counted tokens are those from `_first` up to `_seen`

    def catch_up(self, tokens: Sequence[int]) -> None:
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
        for order in ORDERS:
            if order <= stop - self._first:
                *context, successor = tokens[stop - order : stop]
                counts = self._counts.setdefault(tuple(context), {})
                counts[successor] = counts.pop(successor, 0) + 1

    def _forget(self, tokens: Sequence[int], start: int) -> None:
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
    """Chains from the tables of each request's own text."""

    def __init__(self, options: NgramTableOptions, *, coupled: bool) -> None:
        super().__init__(options, coupled=coupled, context_length=max(ORDERS) - 1)
        self._tables = PerRequest(lambda: NgramTable(options.window))

    def draft(self, request: Request, budget: Budget) -> Draft:
        self._tables[request.key].catch_up(request.token_ids)
        return super().draft(request, budget)

    def successors(
        self, request: Request, context: Sequence[int], temperature: float
    ) -> Distribution | None:
        counts = self._tables[request.key].successors(context)
        return distribution_of_counts(counts, temperature) if counts else None


def distribution_of_counts(counts: dict[int, int], temperature: float) -> Distribution:
    """The q proportional to count^(1/temperature).

    At temperature 0 it is one-hot at the most frequent token, the latest on a tie.
    """
    if temperature < GREEDY_BELOW:
        best = max(counts.values())
        return Distribution.one_hot(next(t for t in reversed(counts) if counts[t] == best))
    tokens, order = torch.tensor(list(counts)).sort()
    numbers = torch.tensor(list(counts.values()), dtype=torch.float32)[order]
    return Distribution((numbers.log() / temperature).softmax(-1), tokens)


# `regex`: proposes the tokens that a grammar forces, at no cost.
#
# Examples are the keys, quotes and punctuation of a JSON schema, the fixed parts of a regular
# expression, and the rest of a choice when only one choice is left. The grammar is the one of the
# request's own `structured_outputs`; its mask gives these tokens p = 1. For requests without one,
# the option `expected` names a form that the output probably has.


class RegexDrafter(OneByOne):
    """Chains of forced tokens; q is one-hot. It proposes nothing where there is a choice."""

    def __init__(self, options: RegexOptions, grammars: Grammars) -> None:
        form = options.expected
        assert not isinstance(form, Mapping), "the validator converts it"
        made = (lambda: None) if form is None else partial(grammars.compile, form)
        made()  # what is wrong with a form shows now
        self._expected = PerRequest[Grammar | None](made)

    def draft(self, request: Request, budget: Budget) -> Draft:
        grammar = self._grammar(request)
        if grammar is None or budget.chain < 1:
            return Draft.empty(request.root)
        forced = grammar.forced(request.output_ids)[: budget.chain]
        return Draft.deterministic(chain([request.root, *forced]))

    def _grammar(self, request: Request) -> Grammar | None:
        own = request.sampler.grammar
        return self._expected[request.key] if own is None else own


# `random`: tokens drawn uniformly from the vocabulary.
#
# The baseline of Leviathan et al. Its acceptance rate is the sum over x of min(p(x), 1 / V): it is
# 1 / V for a one-hot p, and higher for any other p. Every useful drafter must do better than that.
# It also shows that the output distribution does not depend on the quality of the drafter.


class RandomDrafter(OneByOne):
    """Chains with a uniform q, at every temperature."""

    def __init__(self, *, coupled: bool) -> None:
        self._coupled = coupled

    def draft(self, request: Request, budget: Budget) -> Draft:
        vocab_size = request.sampler.vocab_size
        distribution = uniform(vocab_size)
        noise = request.noise.at(len(request.token_ids)).drafting(coupled=self._coupled)
        drafted = GrowingChain(request.root, budget)
        while not drafted.ended:
            if self._coupled:
                drafted.draw(distribution, noise)
            else:
                token = noise.uniform_token(vocab_size, len(drafted.tokens))
                drafted.add(token, distribution, 1 / vocab_size)
        return drafted.draft(with_probs=False)


@lru_cache(maxsize=8)
def uniform(vocab_size: int) -> Distribution:
    return Distribution(torch.full((vocab_size,), 1 / vocab_size))


# `none`: no speculation. The baseline runs the same loop with empty drafts (invariant 3).


class NoDrafter(Drafter):
    """Proposes nothing."""

    def propose(self, batch: Sequence[Request], budgets: Sequence[Budget]) -> list[Draft]:
        return [Draft.empty(request.root) for request in batch]
