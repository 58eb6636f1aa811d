"""`corpus_ngram`: unigrams, bigrams and trigrams counted in the user's own text files.

These are the negligible-cost approximation models of Leviathan et al., "Fast Inference from
Transformers via Speculative Decoding". `foretoken ngrams build` makes the tables (see
`foretoken.drafters.text.ngrams`). Let n(..) be counts and T(..) numbers of different successors.
The distribution after tokens a, b is interpolated as by Witten and Bell ("The Zero-Frequency
Problem", method C):

    P(c | b)    = (n(b, c)    + T(b)    * P(c))     / (n(b)    + T(b))
    P(c | a, b) = (n(a, b, c) + T(a, b) * P(c | b)) / (n(a, b) + T(a, b))

Its support is the set of tokens that followed b in the corpus, and P(c) is the relative frequency
of c among them. If nothing followed b, the support is the set of all tokens of the corpus. Every
successor of a, b is a successor of b, so the support does not depend on a. This distribution is q,
and sampling stays exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Any, Self

import numpy as np
import torch
from annotated_types import Ge
from numpy.typing import NDArray
from pydantic import FiniteFloat, model_validator
from transformers import PreTrainedTokenizerBase

from foretoken.control import Budget
from foretoken.core.config import PathText
from foretoken.core.distribution import Distribution
from foretoken.core.params import GREEDY_BELOW
from foretoken.core.tree import Draft, chain
from foretoken.drafters.base import Drafter, DrafterOptions
from foretoken.drafters.text.corpus import check_target
from foretoken.drafters.text.ngrams import FILE, NgramTables
from foretoken.request import Request

__all__ = ["CorpusNgramDrafter", "CorpusNgramOptions", "SmoothedNgrams", "load_corpus"]


class CorpusNgramOptions(DrafterOptions):
    """Options of `corpus_ngram`.

    Args:
        corpus: a file made by `foretoken ngrams build`.
        draft_temperature: the probabilities are raised to the power 1 / draft_temperature. With 0
            the most probable token is drafted, for sampled requests too. None is 0 for greedy
            requests and 1 (q is the smoothed distribution) for sampled ones.
    """

    corpus: PathText = ""
    draft_temperature: Annotated[FiniteFloat, Ge(0)] | None = None

    @model_validator(mode="after")
    def _has_corpus(self) -> Self:
        if not self.corpus:
            raise ValueError(
                "method 'corpus_ngram' needs 'corpus': a file made by 'foretoken ngrams build'."
            )
        return self


class SmoothedNgrams:
    """The smoothed distribution of the next token (see the module's docstring).

    Args:
        tables: the counts of the corpus.
    """

    def __init__(self, tables: NgramTables) -> None:
        self._tables = tables

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
            temperature: see `CorpusNgramOptions.draft_temperature`.
        """
        tokens, probs = self.probabilities(context)
        if temperature < GREEDY_BELOW:
            return Distribution.one_hot(int(tokens[probs.argmax()]))
        if temperature != 1:
            probs = (probs / probs.max()) ** (1 / temperature)
            probs /= probs.sum()
        distribution = Distribution(
            torch.from_numpy(probs), torch.from_numpy(tokens.astype(np.int64))
        )
        # At a low temperature, small probabilities may underflow to 0.
        return distribution.normalised(distribution.probs)

    def probabilities(
        self, context: Sequence[int]
    ) -> tuple[NDArray[np.integer[Any]], NDArray[np.float64]]:
        """The support [S] as ascending token ids, and its smoothed probabilities [S]."""
        tables = self._tables
        row = tables.bigrams(context[-1])
        if row.start == row.stop:
            return self._corpus
        tokens = tables.bigram_tokens[row]
        unigrams = tables.unigrams[tokens]
        probs = _interpolated(tables.bigram_counts[row], unigrams / unigrams.sum())
        row = tables.trigrams(*context[-2:]) if len(context) > 1 else slice(0, 0)
        if row.start < row.stop:
            counts = np.zeros(len(tokens))
            counts[tokens.searchsorted(tables.trigram_tokens[row])] = tables.trigram_counts[row]
            probs = _interpolated(counts, probs)
        return tokens, probs


def _interpolated(counts: NDArray[Any], shorter: NDArray[np.float64]) -> NDArray[np.float64]:
    """Counts [S] interpolated with the probabilities [S] of the shorter context (Witten-Bell)."""
    num_successors = np.count_nonzero(counts)  # T in the formula
    total = counts.sum() + num_successors
    smoothed: NDArray[np.float64] = (counts + num_successors * shorter) / total
    return smoothed


def load_corpus(
    path: str, vocab_size: int, tokenizer: PreTrainedTokenizerBase | None
) -> SmoothedNgrams:
    """Load the distribution of a corpus and check that it fits the target.

    Args:
        path: a file made by `foretoken ngrams build`.
        vocab_size: V, the width of the target's logits.
        tokenizer: the target's tokenizer, or None if it has none.

    Raises:
        ForetokenError: the file does not exist or is damaged.
        CompatibilityError: the file was made with another vocabulary.
    """
    tables = NgramTables.load(path)
    highest = int(tables.unigrams.nonzero()[0][-1])
    check_target(path, FILE.made_by, highest, tables.fingerprint, vocab_size, tokenizer)
    return SmoothedNgrams(tables)


class CorpusNgramDrafter(Drafter):
    """Chains drawn from the corpus' smoothed distribution, which is q.

    Args:
        ngrams: the smoothed distribution.
        options: see `CorpusNgramOptions`.
        coupled: whether to draw with the target's own noise.
    """

    def __init__(
        self, ngrams: SmoothedNgrams, options: CorpusNgramOptions, *, coupled: bool
    ) -> None:
        self._ngrams = ngrams
        self._options = options
        self._coupled = coupled

    def propose(self, batch: Sequence[Request], budgets: Sequence[Budget]) -> list[Draft]:
        """Chains up to the budget's limits."""
        return [
            self._propose(request, budget) for request, budget in zip(batch, budgets, strict=True)
        ]

    def _propose(self, request: Request, budget: Budget) -> Draft:
        temperature = self._temperature(request)
        noise = request.noise.at(len(request.token_ids)).drafting(coupled=self._coupled)
        context = request.token_ids[-2:]
        tokens, distributions, path_prob = [request.root], [], 1.0
        for depth in range(budget.chain):
            distributions.append(self._ngrams.distribution(context, temperature))
            tokens.append(noise.draw(distributions[-1], depth))
            token_prob = distributions[-1].prob(tokens[-1])
            path_prob *= token_prob
            if budget.stops_below(token_prob, path_prob):
                break
            context = [context[-1], tokens[-1]]
        return Draft(chain(tokens), tuple(distributions))

    def _temperature(self, request: Request) -> float:
        if self._options.draft_temperature is None:
            return 0.0 if request.params.greedy else 1.0
        return self._options.draft_temperature
