"""Options of methods that look up, count or guess tokens without a drafting model.

`tokenleap methods` and the checks of a `speculative_config` read them, so no module here imports
PyTorch, Transformers or NumPy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Self

from annotated_types import Ge, Gt, Le
from pydantic import model_validator

from tokenleap.control.evidence import LONGEST_CONTEXT, NUM_RANKS
from tokenleap.core.config import PathText
from tokenleap.core.structured import Structured
from tokenleap.drafters.base import DrafterOptions, InnerConfig
from tokenleap.drafters.sampled import SampledOptions

__all__ = [
    "CopyOptions",
    "CorpusNgramOptions",
    "CountedOptions",
    "LookaheadOptions",
    "NgramOptions",
    "NgramTableOptions",
    "PadOptions",
    "PassOptions",
    "PredictionOptions",
    "RecycleOptions",
    "RegexOptions",
    "RestOptions",
    "SuffixOptions",
]

LONGEST_ALIGNED = 32
"""Longest suffix that `copy` compares, in tokens. It bounds the work on inputs with repetitions."""


class NgramOptions(DrafterOptions):
    """Options of `ngram`.

    Args:
        prompt_lookup_max: longest suffix that is looked up, in tokens.
        prompt_lookup_min: shortest suffix that is looked up, in tokens.
    """

    prompt_lookup_max: Annotated[int, Ge(1), Le(64)] = 4
    prompt_lookup_min: Annotated[int, Ge(1), Le(64)] = 1

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min ({self.prompt_lookup_min}) is larger than "
                f"prompt_lookup_max ({self.prompt_lookup_max})."
            )
        return self


class SuffixOptions(DrafterOptions):
    """Options of `suffix`.

    Args:
        suffix_decoding_max_tree_depth: most tokens of match and draft together.
        suffix_decoding_max_cached_requests: most earlier outputs that are kept; 0 keeps none.
        suffix_decoding_max_cached_tokens: most tokens of earlier outputs that are kept, at about
            0.4 kB each; 0 keeps none.
        suffix_decoding_max_spec_factor: most drafted tokens per matched token: alpha of the paper.
            It is 1 there and in vLLM. It is larger here because the controller cuts tokens that do
            not pay.
        suffix_decoding_min_token_prob: smallest estimated path probability of a drafted token.
        branching: draft trees, for rules that take trees; otherwise chains.
    """

    suffix_decoding_max_tree_depth: Annotated[int, Ge(2), Le(256)] = 24
    suffix_decoding_max_cached_requests: Annotated[int, Ge(0)] = 10_000
    suffix_decoding_max_cached_tokens: Annotated[int, Ge(0)] = 100_000
    suffix_decoding_max_spec_factor: Annotated[float, Gt(0), Le(256)] = 2.0
    suffix_decoding_min_token_prob: Annotated[float, Ge(0), Le(1)] = 0.1
    branching: bool = False

    def draft_length(self, match: int) -> int:
        """Most tokens that are drafted after a match of this many tokens."""
        longest = int(self.suffix_decoding_max_spec_factor * match + 1e-6)
        return max(0, min(longest, self.suffix_decoding_max_tree_depth - match))


class CopyOptions(DrafterOptions):
    """Options of `copy`.

    Args:
        copy_start: index in the prompt (or in an encoder-decoder's source) of the input's first
            token. A negative index counts from the prompt's end, as in Python's slices. None is the
            prompt's beginning.
        copy_end: index after the input's last token, likewise. None is the prompt's end.
        copy_min_match: shortest suffix that aligns text and input again, in tokens.
        copy_insertions: whether tokens that align with nothing count as inserted, as marks are:
            copying goes on where it stopped. After `MOST_INSERTED` of them it ends.
    """

    copy_start: int | None = None
    copy_end: int | None = None
    copy_min_match: Annotated[int, Ge(1), Le(LONGEST_ALIGNED)] = 2
    copy_insertions: bool = False

    def region(self, tokens: Sequence[int]) -> Sequence[int]:
        """The input within a prompt or source; empty if that is too short."""
        return tokens[self.copy_start : self.copy_end]

    @property
    def explicit(self) -> bool:
        """Whether the input is a region instead of the whole prompt or source."""
        return self.copy_start is not None or self.copy_end is not None


LONGEST_PREDICTED = 32
"""Default draft length of `prediction`. Predictions are mostly right, so long drafts pay."""


class PredictionOptions(DrafterOptions):
    """Options of `prediction`.

    Args:
        drafter: configuration of what drafts where there is no prediction, or where it is of no
            use: `method` and that method's own fields. None drafts nothing there.
    """

    drafter: InnerConfig | None = None


class RecycleOptions(DrafterOptions):
    """Options of `recycle`.

    Args:
        recycle_top_k: number of tokens kept for each context; k in the paper.
        recycle_context: longest context, in tokens; 1 in the paper.
        recycle_max_contexts: most contexts kept, at about 0.3 kB each. If there are more, the least
            recently seen ones are dropped.
    """

    recycle_top_k: Annotated[int, Ge(1), Le(NUM_RANKS)] = NUM_RANKS
    recycle_context: Annotated[int, Ge(1), Le(LONGEST_CONTEXT)] = LONGEST_CONTEXT
    recycle_max_contexts: Annotated[int, Ge(1)] = 100_000


class RegexOptions(DrafterOptions):
    """Options of `regex`.

    Args:
        expected: the form that the outputs of requests without `structured_outputs` probably have,
            given like `structured_outputs`. Drafting ends if an output does not follow it. With
            None such requests get no drafts.
    """

    expected: Structured | None = None


class RestOptions(DrafterOptions):
    """Options of `rest`.

    Args:
        datastore: a file made by `tokenleap datastore build`.
        max_match: longest suffix that is looked up, in tokens.
        min_match: shortest suffix that is looked up, in tokens.
        max_hits: most occurrences that are read. If there are more, they are sorted by their
            continuations, and `max_hits` of them at equal distances are read.
        branching: draft trees, for rules that take trees; otherwise chains.
    """

    datastore: PathText = ""
    max_match: Annotated[int, Ge(1), Le(256)] = 16
    min_match: Annotated[int, Ge(1), Le(256)] = 2
    max_hits: Annotated[int, Ge(1), Le(10_000)] = 64
    branching: bool = False

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if not self.datastore:
            raise ValueError(
                "method 'rest' needs 'datastore': a file made by 'tokenleap datastore build'."
            )
        if self.min_match > self.max_match:
            raise ValueError(
                f"min_match ({self.min_match}) is larger than max_match ({self.max_match})."
            )
        return self


class CountedOptions(SampledOptions):
    """Options of drafters that draw from counts; they do not take those of the request.

    Args:
        draft_temperature: the probabilities are raised to the power 1 / draft_temperature. With 0
            the most probable token is drafted, for sampled requests too. None is 0 for greedy
            requests and 1 (q is what was counted) for sampled ones.
        draft_top_k: draw from the k most probable tokens; None and 0 from all.
        draft_top_p: draw from the smallest set of most probable tokens whose mass reaches this;
            None and 1 from all.
    """


class NgramTableOptions(CountedOptions):
    """Options of `ngram_table`, besides those of `CountedOptions`.

    Args:
        window: number of latest tokens that are counted. None counts the whole text, as the source
            does: memory then grows with the text, and with it the time to read a prompt.
    """

    window: Annotated[int, Ge(2), Le(1_000_000)] | None = None


class CorpusNgramOptions(CountedOptions):
    """Options of `corpus_ngram`, besides those of `CountedOptions`.

    Args:
        corpus: a file made by `tokenleap ngrams build` or `tokenleap ngrams write`.
        order: tokens of the longest n-grams that are used: 3 (trigrams), 2 (bigrams), or 1, which
            always drafts the same token for greedy requests: the most frequent one.
    """

    corpus: PathText = ""
    order: Annotated[int, Ge(1), Le(3)] = 3

    @model_validator(mode="after")
    def _has_corpus(self) -> Self:
        if not self.corpus:
            raise ValueError(
                "method 'corpus_ngram' needs 'corpus': a file made by 'tokenleap ngrams'."
            )
        return self


class LookaheadOptions(DrafterOptions):
    """Options of `lookahead`.

    Args:
        window_size: columns of the window; W of the paper.
        ngram_size: tokens of an n-gram; N of the paper. The window has one row less.
        max_ngrams: most n-grams that are drafted in one step, and kept for each first token; G of
            the paper.
        pool_from_prompt: whether the pool starts with the n-grams of the prompt, or of an
            encoder-decoder's source.
    """

    window_size: Annotated[int, Ge(1), Le(32)] = 5
    ngram_size: Annotated[int, Ge(2), Le(16)] = 3
    max_ngrams: Annotated[int, Ge(1), Le(64)] = 3
    pool_from_prompt: bool = True

    def default_num_speculative_tokens(self) -> int:
        """The nodes of all drafted n-grams and the whole window together."""
        return (self.ngram_size - 1) * (self.max_ngrams + self.window_size)


class PadOptions(DrafterOptions):
    """Options of `pad`.

    Args:
        pad_token_id: the padding token. None takes the one that the target was trained with, or
            the first of the mask, padding and end-of-sequence tokens that the tokenizer has, or
            else token 0.
    """

    pad_token_id: Annotated[int, Ge(0)] | None = None


class PassOptions(DrafterOptions):
    """`pass` has no options."""
