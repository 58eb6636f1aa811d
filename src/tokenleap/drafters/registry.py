"""The registry of methods: the only place that knows drafters by name.

A new drafter is one file and one entry here. `SpeculativeConfig` reads options and defaults here,
`engine.strategies` builds drafters, and the invariant suite runs over every entry. Other packages
add methods through entry points (`core.plugins`).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial
from typing import Any, get_args

from tokenleap.core.config import PathText, registered
from tokenleap.drafters import build
from tokenleap.drafters.base import Drafter, DrafterOptions
from tokenleap.drafters.options import (
    LONGEST_PREDICTED,
    CascadeOptions,
    CombineOptions,
    CopyOptions,
    CorpusNgramOptions,
    DraftModelOptions,
    EagleOptions,
    EarlyExitOptions,
    HorizontalOptions,
    HybridOptions,
    LayerSkipOptions,
    LookaheadOptions,
    NgramOptions,
    NgramTableOptions,
    PadOptions,
    PassOptions,
    PredictionOptions,
    RecycleOptions,
    RegexOptions,
    RestOptions,
    SpecDrafterOptions,
    StateHeadOptions,
    SuffixOptions,
    SwitchOptions,
)
from tokenleap.drafters.spec import DrafterSpec

INSTANCE_TOKENS = 5
"""Default draft length of a drafter that the user passes as an instance."""


class NoOptions(DrafterOptions):
    """The options of a method that has none."""


def _state_head(method: str, length: int, summary: str) -> DrafterSpec:
    build_head = partial(build.build_state_head, method=method)
    return DrafterSpec(StateHeadOptions, build_head, length, takes_head=True, summary=summary)


METHODS: dict[str, DrafterSpec] = {
    "none": DrafterSpec(NoOptions, build.build_none, 0, summary="no speculation: the baseline"),
    "draft_model": DrafterSpec(
        DraftModelOptions,
        build.build_draft_model,
        5,
        takes_model=True,
        summary="a smaller model, best with the same vocabulary",
    ),
    "eagle": DrafterSpec(
        EagleOptions,
        build.build_eagle,
        4,
        takes_head=True,
        reads_no_source=True,
        summary="a trained head that reads the target's hidden states (EAGLE-3)",
    ),
    "parallel": DrafterSpec(
        EagleOptions,
        build.build_parallel,
        5,
        takes_head=True,
        reads_no_source=True,
        summary="a trained head that drafts a block in one pass (P-EAGLE)",
    ),
    "medusa": _state_head("medusa", 4, "trained heads, one for each drafted position (Medusa)"),
    "hydra": _state_head(
        "hydra", 4, "trained heads that also read the tokens drafted before (Hydra)"
    ),
    "blockwise": _state_head(
        "blockwise", 4, "trained layers before the target's output layer (blockwise decoding)"
    ),
    "mlp_speculator": _state_head(
        "mlp_speculator", 3, "a trained recurrent MLP over the drafted tokens (MLP speculator)"
    ),
    "spec_drafter": DrafterSpec(
        SpecDrafterOptions,
        build.build_spec_drafter,
        25,
        takes_head=True,
        needs_source=True,
        summary="a trained encoder-decoder that fills a block of masks (SpecDec)",
    ),
    "cascade": DrafterSpec(
        CascadeOptions,
        build.build_cascade,
        5,
        takes_model=True,
        summary="a draft model that is itself accelerated by a drafter",
    ),
    "ensemble": DrafterSpec(
        CombineOptions,
        build.build_ensemble,
        8,
        summary="several drafters, merged into one tree",
    ),
    "switch": DrafterSpec(
        SwitchOptions,
        build.build_switch,
        5,
        summary="for each request the drafter with the best recent goodput",
    ),
    "horizontal_cascade": DrafterSpec(
        HorizontalOptions,
        build.build_horizontal_cascade,
        5,
        summary="one drafter for the first positions, cheaper ones for the next",
    ),
    "hybrid": DrafterSpec(
        HybridOptions,
        lambda parts: build.build_hybrid(parts, _default_length),
        16,
        takes_head=True,
        summary="a lookup or a trained head, whichever is worth more at the moment",
    ),
    "early_exit": DrafterSpec(
        EarlyExitOptions,
        build.build_early_exit,
        3,
        summary="the target's own first layers",
    ),
    "layer_skip": DrafterSpec(
        LayerSkipOptions,
        build.build_layer_skip,
        3,
        summary="the target without some of its sublayers",
    ),
    "lookahead": DrafterSpec(
        LookaheadOptions,
        build.build_lookahead,
        16,
        steady=True,
        summary="n-grams from Jacobi iteration inside the target's own passes",
    ),
    "pad": DrafterSpec(
        PadOptions,
        build.build_pad,
        8,
        steady=True,
        summary="padding after the text, so that one target pass guesses a block",
    ),
    "pass": DrafterSpec(
        PassOptions,
        build.build_pass,
        8,
        takes_head=True,
        steady=True,
        summary="learnt look-ahead embeddings after the text, for a block per pass (PaSS)",
    ),
    "regex": DrafterSpec(
        RegexOptions,
        build.build_regex,
        16,
        summary="what a grammar forces, for structured outputs",
    ),
    "ngram": DrafterSpec(
        NgramOptions,
        build.build_ngram,
        16,
        summary="prompt lookup: what followed the last tokens before",
    ),
    "ngram_table": DrafterSpec(
        NgramTableOptions,
        build.build_ngram_table,
        4,
        summary="successor frequencies of short contexts",
    ),
    "recycle": DrafterSpec(
        RecycleOptions,
        build.build_recycle,
        16,
        summary="tokens that the target found probable after the same context before",
    ),
    "suffix": DrafterSpec(
        SuffixOptions,
        build.build_suffix,
        16,
        summary="what most often followed the longest suffix, here and in earlier outputs",
    ),
    "copy": DrafterSpec(
        CopyOptions,
        build.build_copy,
        10,
        summary="the rest of the input, where the output follows it",
    ),
    "prediction": DrafterSpec(
        PredictionOptions,
        lambda parts: build.build_prediction(parts, _default_length),
        LONGEST_PREDICTED,
        summary="the text that a request expects (`generate(prediction=...)`)",
    ),
    "corpus_ngram": DrafterSpec(
        CorpusNgramOptions,
        build.build_corpus_ngram,
        4,
        summary="n-grams of your own text files, or of the target's text (`tokenleap ngrams`)",
    ),
    "rest": DrafterSpec(
        RestOptions,
        build.build_rest,
        10,
        summary="what followed the longest suffix in a datastore (`tokenleap datastore build`)",
    ),
    "random": DrafterSpec(
        NoOptions,
        build.build_random,
        1,
        summary="uniform over the vocabulary: the baseline that every drafter must beat",
    ),
}


PLUGINS = "tokenleap.drafters"
"""Group of entry points in which other packages declare a `DrafterSpec`."""


def drafter_spec(method: str) -> DrafterSpec:
    """The specification of this method, from this library or from another package."""
    spec: DrafterSpec = registered("method", method, METHODS, PLUGINS, DrafterSpec, classes=False)
    return spec


def _default_length(config: Mapping[str, Any]) -> int:
    """The default draft length of a method with these options: what they imply, or its own."""
    spec = drafter_spec(config["method"])
    fields = {name: value for name, value in config.items() if name not in ("method", "model")}
    implied = spec.options(**fields).default_num_speculative_tokens()
    return spec.default_num_speculative_tokens if implied is None else implied


def spec_of(drafter: Drafter) -> DrafterSpec:
    """A specification for a drafter that the user passes as an instance."""
    return DrafterSpec(NoOptions, lambda _: drafter, INSTANCE_TOKENS)


@cache
def file_fields() -> frozenset[str]:
    """Options of methods that name files."""
    (reads_path,) = get_args(PathText)[1:]
    return frozenset(
        name
        for spec in METHODS.values()
        for name, field in spec.options.model_fields.items()
        if reads_path in field.metadata or _mentions(field.annotation, reads_path)
    )


def _mentions(annotation: Any, metadata: Any) -> bool:
    return any(part is metadata or _mentions(part, metadata) for part in get_args(annotation))
