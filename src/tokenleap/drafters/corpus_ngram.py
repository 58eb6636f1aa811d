"""`corpus_ngram`: unigrams, bigrams and trigrams of text files, or of the target's own text.

These are the negligible-cost approximation models of Leviathan et al., "Fast Inference from
Transformers via Speculative Decoding" (tables 3 and 5 have a unigram and a bigram model).
`tokenleap ngrams` makes the tables (see `tokenleap.drafters.text.ngrams`). Let n(..) be counts and
T(..) numbers of different successors. The distribution after tokens a, b is interpolated as by
Witten and Bell ("The Zero-Frequency Problem", method C):

    P(c | b)    = (n(b, c)    + T(b)    * P(c))     / (n(b)    + T(b))
    P(c | a, b) = (n(a, b, c) + T(a, b) * P(c | b)) / (n(a, b) + T(a, b))

Its support is the set of tokens that followed b in the corpus, and P(c) is the relative frequency
of c among them. If nothing followed b, the support is the set of all tokens of the corpus. Every
successor of a, b is a successor of b, so the support does not depend on a. `order` 2 drafts from
P(c | b), and `order` 1 from the relative frequencies of all tokens of the corpus, whatever came
before. This distribution is q, and sampling stays exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from tokenleap.core.distribution import Distribution
from tokenleap.core.params import GREEDY_BELOW
from tokenleap.drafters.counted import CountedChains
from tokenleap.drafters.options.lookups import CorpusNgramOptions
from tokenleap.drafters.text.corpus import check_target
from tokenleap.drafters.text.ngrams import FILE, NgramTables
from tokenleap.request import Request

__all__ = ["CorpusNgramDrafter", "CorpusNgramOptions", "SmoothedNgrams", "load_corpus"]


class SmoothedNgrams:
    """The smoothed distribution of the next token (see the module's docstring).

    Args:
        tables: the counts of the corpus.
        order: see `CorpusNgramOptions.order`.
    """

    def __init__(self, tables: NgramTables, order: int = 3) -> None:
        self._tables = tables
        self._order = order
        self._of_corpus: dict[float, Distribution] = {}  # temperature -> the same for all contexts

    @cached_property
    def _corpus(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Tokens [S] of the corpus and their relative frequencies [S]."""
        (tokens,) = self._tables.unigrams.nonzero()
        counts = self._tables.unigrams[tokens]
        return tokens, counts / counts.sum()

    def distribution(self, context: Sequence[int], temperature: float) -> Distribution:
        """The distribution of the next token at a temperature; one-hot at temperature 0.

        Args:
            context: the tokens before it, at least one; only the last two matter.
            temperature: see `CountedOptions.draft_temperature`.
        """
        tokens, probs = self.probabilities(context)
        if probs is not self._corpus[1]:
            return _at(tokens, probs, temperature)
        if temperature not in self._of_corpus:
            self._of_corpus = {temperature: _at(tokens, probs, temperature)}
        return self._of_corpus[temperature]

    def probabilities(
        self, context: Sequence[int]
    ) -> tuple[NDArray[np.integer[Any]], NDArray[np.float64]]:
        """The support [S] as ascending token ids, and its smoothed probabilities [S]."""
        if self._order == 1:
            return self._corpus
        tables = self._tables
        row = tables.bigrams(context[-1])
        if row.start == row.stop:
            return self._corpus
        tokens = tables.bigram_tokens[row]
        unigrams = tables.unigrams[tokens]
        probs = _interpolated(tables.bigram_counts[row], unigrams / unigrams.sum())
        if self._order == 2 or len(context) < 2:
            return tokens, probs
        row = tables.trigrams(*context[-2:])
        if row.start < row.stop:
            counts = np.zeros(len(tokens) + 1)  # the last one is for damaged files
            counts[tokens.searchsorted(tables.trigram_tokens[row])] = tables.trigram_counts[row]
            probs = _interpolated(counts[:-1], probs)
        return tokens, probs


def _at(
    tokens: NDArray[np.integer[Any]], probs: NDArray[np.float64], temperature: float
) -> Distribution:
    """The distribution of tokens [S] with probabilities [S] at a temperature."""
    if temperature < GREEDY_BELOW:
        return Distribution.one_hot(int(tokens[probs.argmax()]))
    if temperature != 1:
        probs = (probs / probs.max()) ** (1 / temperature)
        probs /= probs.sum()
    distribution = Distribution(torch.from_numpy(probs), torch.from_numpy(tokens.astype(np.int64)))
    # At a low temperature, small probabilities may underflow to 0.
    return distribution.normalised(distribution.probs)


def _interpolated(counts: NDArray[Any], shorter: NDArray[np.float64]) -> NDArray[np.float64]:
    """Counts [S] interpolated with the probabilities [S] of the shorter context (Witten-Bell)."""
    num_successors = np.count_nonzero(counts)  # T in the formula
    total = counts.sum() + num_successors
    smoothed: NDArray[np.float64] = (counts + num_successors * shorter) / total
    return smoothed


def load_corpus(
    path: str, order: int, vocab_size: int, tokenizer: PreTrainedTokenizerBase | None
) -> SmoothedNgrams:
    """Load the distribution of a corpus and check that it fits the target.

    Args:
        path: a file made by `tokenleap ngrams`.
        order: see `CorpusNgramOptions.order`.
        vocab_size: V, the width of the target's logits.
        tokenizer: the target's tokenizer, or None if it has none.

    Raises:
        TokenleapError: the file does not exist or is damaged.
        CompatibilityError: the file was made with another vocabulary.
    """
    tables = NgramTables.load(path)
    highest = int(tables.unigrams.nonzero()[0][-1])
    check_target(path, FILE.made_by, highest, tables.fingerprint, vocab_size, tokenizer)
    return SmoothedNgrams(tables, order)


class CorpusNgramDrafter(CountedChains):
    """Chains drawn from the corpus' smoothed distribution, which is q.

    Args:
        ngrams: the smoothed distribution.
        options: see `CorpusNgramOptions`.
        coupled: whether to draw with the target's own noise.
    """

    def __init__(
        self, ngrams: SmoothedNgrams, options: CorpusNgramOptions, *, coupled: bool
    ) -> None:
        super().__init__(options, coupled=coupled, context_length=2)
        self._ngrams = ngrams

    def successors(
        self, request: Request, context: Sequence[int], temperature: float
    ) -> Distribution | None:
        """See `CountedChains.successors`: every context has some."""
        return self._ngrams.distribution(context, temperature)
