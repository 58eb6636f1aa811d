"""Method names and what they stand for: the only place that knows drafters by name.

A new drafter is one file and one entry here; the law suite runs over every entry.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from foretoken.acceptance.coupled import Coupled
from foretoken.config import nearest
from foretoken.drafters.base import Drafter, DrafterOptions
from foretoken.drafters.cascade import Cascade, CascadeOptions
from foretoken.drafters.combine import CombineOptions, Ensemble, Switch, SwitchOptions
from foretoken.drafters.copy import CopyDrafter, CopyOptions
from foretoken.drafters.corpus_ngram import CorpusNgramDrafter, CorpusNgramOptions, load_corpus
from foretoken.drafters.draft_model import OwnModel
from foretoken.drafters.model_drafter import ModelDrafter, Scorer
from foretoken.drafters.ngram import NgramDrafter, NgramOptions
from foretoken.drafters.ngram_table import NgramTableDrafter, NgramTableOptions
from foretoken.drafters.none import NoDrafter
from foretoken.drafters.random_tokens import RandomDrafter
from foretoken.drafters.self_draft import (
    EarlyExitOptions,
    LayerSkipOptions,
    exit_early,
    skip_layers,
)
from foretoken.drafters.shapes import TreeOptions, shape_of
from foretoken.drafters.suffix import SuffixDrafter, SuffixOptions
from foretoken.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from foretoken.target import Target

__all__ = ["METHODS", "DrafterParts", "DrafterSpec", "drafter_spec"]


@dataclass(frozen=True)
class DrafterParts:
    """What a constructor may use.

    Args:
        options: the method's own options.
        coupled: whether the acceptance rule wants drafts drawn with the target's noise.
        target: the model being accelerated, for methods that draft with a part of it.
        load_model: loads the draft model and checks its vocabulary; only for methods that
            declare `takes_model`.
        build: makes another drafter, for methods that combine several: from its configuration,
            the model it drafts for, and whether that one's rule couples.
        tokenizer: the target's, or None where it has none.
    """

    options: Any
    coupled: bool
    target: Target
    load_model: Callable[[], Target]
    build: Callable[[Mapping[str, Any], Target, bool], Drafter]
    tokenizer: PreTrainedTokenizerBase | None


@dataclass(frozen=True)
class DrafterSpec:
    """One method: its options, its constructor, its defaults."""

    options: type[DrafterOptions]
    build: Callable[[DrafterParts], Drafter]
    default_num_speculative_tokens: int
    takes_model: bool = False
    summary: str = ""


class NoOptions(DrafterOptions):
    """A method without options of its own."""


def _cascade(parts: DrafterParts) -> Drafter:
    model, rule = parts.load_model(), Coupled()
    inner = parts.build(parts.options.drafter, model, rule.couples_draft)
    return Cascade(model, inner, rule, parts.options, coupled=parts.coupled)


def _several(parts: DrafterParts) -> list[Drafter]:
    return [parts.build(config, parts.target, parts.coupled) for config in parts.options.drafters]


def _corpus_ngram(parts: DrafterParts) -> Drafter:
    options = parts.options
    ngrams = load_corpus(options.corpus, parts.target.vocab_size, parts.tokenizer)
    return CorpusNgramDrafter(ngrams, options, coupled=parts.coupled)


def _with_model(parts: DrafterParts, scorer: Scorer) -> Drafter:
    shape = shape_of(parts.options)
    return ModelDrafter(scorer, parts.options, shape, coupled=parts.coupled)


METHODS: dict[str, DrafterSpec] = {
    "none": DrafterSpec(
        NoOptions, lambda _: NoDrafter(), 0, summary="no speculation: the baseline"
    ),
    "draft_model": DrafterSpec(
        TreeOptions,
        lambda parts: _with_model(parts, OwnModel(parts.load_model())),
        5,
        takes_model=True,
        summary="a smaller model with the same vocabulary",
    ),
    "cascade": DrafterSpec(
        CascadeOptions,
        _cascade,
        5,
        takes_model=True,
        summary="a draft model that is itself accelerated by a drafter",
    ),
    "ensemble": DrafterSpec(
        CombineOptions,
        lambda parts: Ensemble(_several(parts)),
        8,
        summary="several drafters, merged into one tree",
    ),
    "switch": DrafterSpec(
        SwitchOptions,
        lambda parts: Switch(_several(parts), parts.options),
        5,
        summary="per request the drafter that served it best lately",
    ),
    "early_exit": DrafterSpec(
        EarlyExitOptions,
        lambda parts: _with_model(parts, exit_early(parts.target, parts.options)),
        3,
        summary="the target's own first layers",
    ),
    "layer_skip": DrafterSpec(
        LayerSkipOptions,
        lambda parts: _with_model(parts, skip_layers(parts.target, parts.options)),
        3,
        summary="the target without some of its sublayers",
    ),
    "ngram": DrafterSpec(
        NgramOptions,
        lambda parts: NgramDrafter(parts.options),
        5,
        summary="prompt lookup: what followed the last tokens before",
    ),
    "ngram_table": DrafterSpec(
        NgramTableOptions,
        lambda parts: NgramTableDrafter(parts.options, coupled=parts.coupled),
        4,
        summary="successor frequencies of short contexts",
    ),
    "suffix": DrafterSpec(
        SuffixOptions,
        lambda parts: SuffixDrafter(parts.options),
        16,
        summary="what most often followed the longest suffix, here and in earlier outputs",
    ),
    "copy": DrafterSpec(
        CopyOptions,
        lambda parts: CopyDrafter(parts.options),
        10,
        summary="the rest of the input, where the output follows it",
    ),
    "corpus_ngram": DrafterSpec(
        CorpusNgramOptions,
        _corpus_ngram,
        4,
        summary="trigrams of your own text files (`foretoken ngrams build`)",
    ),
    "random": DrafterSpec(
        NoOptions,
        lambda parts: RandomDrafter(coupled=parts.coupled),
        1,
        summary="uniform over the vocabulary: what a drafter has to beat",
    ),
}


def drafter_spec(method: str) -> DrafterSpec:
    """The entry of this method.

    Raises:
        ConfigError: no method has this name.
    """
    if method not in METHODS:
        raise ConfigError(f"unknown method '{method}': {nearest(method, list(METHODS))}")
    return METHODS[method]
