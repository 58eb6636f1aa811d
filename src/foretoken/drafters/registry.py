"""The registry of methods: the only place that knows drafters by name.

A new drafter is one file and one entry here. `SpeculativeConfig` reads options and defaults here,
`engine.strategies` builds drafters, and the invariant suite runs over every entry. Other packages
add methods through entry points (`core.plugins`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from foretoken.core.config import nearest
from foretoken.core.plugins import plugin, plugin_names
from foretoken.drafters.base import Drafter, DrafterOptions
from foretoken.drafters.build import (
    build_cascade,
    build_copy,
    build_corpus_ngram,
    build_draft_model,
    build_eagle,
    build_hybrid,
    build_parallel,
    build_pass,
    build_rest,
    build_several,
    build_spec_drafter,
    pad_token_id,
    state_head_builder,
    with_model,
)
from foretoken.drafters.cascade import CascadeOptions
from foretoken.drafters.combine import CombineOptions, Ensemble, Switch, SwitchOptions
from foretoken.drafters.copy import CopyOptions
from foretoken.drafters.corpus_ngram import CorpusNgramOptions
from foretoken.drafters.draft_model import DraftModelOptions
from foretoken.drafters.heads.blockwise import BlockwiseNet
from foretoken.drafters.heads.eagle import EagleOptions
from foretoken.drafters.heads.hydra import HydraNet
from foretoken.drafters.heads.medusa import MedusaNet
from foretoken.drafters.heads.mlp_speculator import MlpSpeculatorNet
from foretoken.drafters.heads.state_head import StateHeadOptions
from foretoken.drafters.heads.state_layouts import (
    fasterdecoding_medusa,
    ibm_mlp_speculator,
    vllm_medusa,
)
from foretoken.drafters.horizontal import HorizontalCascade, HorizontalOptions
from foretoken.drafters.hybrid import HybridOptions
from foretoken.drafters.lookahead import LookaheadDrafter, LookaheadOptions
from foretoken.drafters.ngram import NgramDrafter, NgramOptions
from foretoken.drafters.ngram_table import NgramTableDrafter, NgramTableOptions
from foretoken.drafters.none import NoDrafter
from foretoken.drafters.pad import PadDrafter, PadOptions
from foretoken.drafters.pass_tokens import PassOptions
from foretoken.drafters.random_tokens import RandomDrafter
from foretoken.drafters.recycle import RecycleDrafter, RecycleOptions
from foretoken.drafters.regex import RegexDrafter, RegexOptions
from foretoken.drafters.rest import RestOptions
from foretoken.drafters.self_draft import (
    EarlyExitOptions,
    LayerSkipOptions,
    exit_early,
    skip_layers,
)
from foretoken.drafters.spec import DrafterSpec
from foretoken.drafters.spec_drafter import SpecDrafterOptions
from foretoken.drafters.suffix import SuffixDrafter, SuffixOptions
from foretoken.errors import ConfigError

__all__ = ["METHODS", "drafter_spec", "spec_of"]


INSTANCE_TOKENS = 5
"""Default draft length of a drafter that the user passes as an instance."""


class NoOptions(DrafterOptions):
    """The options of a method that has none."""


METHODS: dict[str, DrafterSpec] = {
    "none": DrafterSpec(
        NoOptions, lambda _: NoDrafter(), 0, summary="no speculation: the baseline"
    ),
    "draft_model": DrafterSpec(
        DraftModelOptions,
        build_draft_model,
        5,
        takes_model=True,
        summary="a smaller model, best with the same vocabulary",
    ),
    "eagle": DrafterSpec(
        EagleOptions,
        build_eagle,
        4,
        takes_head=True,
        summary="a trained head that reads the target's hidden states (EAGLE-3)",
    ),
    "parallel": DrafterSpec(
        EagleOptions,
        build_parallel,
        5,
        takes_head=True,
        summary="a trained head that drafts a block in one pass (P-EAGLE)",
    ),
    "medusa": DrafterSpec(
        StateHeadOptions,
        state_head_builder(MedusaNet, fasterdecoding_medusa, vllm_medusa),
        4,
        takes_head=True,
        summary="trained heads, one for each drafted position (Medusa)",
    ),
    "hydra": DrafterSpec(
        StateHeadOptions,
        state_head_builder(HydraNet),
        4,
        takes_head=True,
        summary="trained heads that also read the tokens drafted before (Hydra)",
    ),
    "blockwise": DrafterSpec(
        StateHeadOptions,
        state_head_builder(BlockwiseNet),
        4,
        takes_head=True,
        summary="trained layers before the target's output layer (blockwise decoding)",
    ),
    "mlp_speculator": DrafterSpec(
        StateHeadOptions,
        state_head_builder(MlpSpeculatorNet, ibm_mlp_speculator),
        3,
        takes_head=True,
        summary="a trained recurrent MLP over the drafted tokens (MLP speculator)",
    ),
    "spec_drafter": DrafterSpec(
        SpecDrafterOptions,
        build_spec_drafter,
        25,
        takes_head=True,
        needs_source=True,
        summary="a trained encoder-decoder that fills a block of masks (SpecDec)",
    ),
    "cascade": DrafterSpec(
        CascadeOptions,
        build_cascade,
        5,
        takes_model=True,
        summary="a draft model that is itself accelerated by a drafter",
    ),
    "ensemble": DrafterSpec(
        CombineOptions,
        lambda parts: Ensemble(build_several(parts)),
        8,
        summary="several drafters, merged into one tree",
    ),
    "switch": DrafterSpec(
        SwitchOptions,
        lambda parts: Switch(build_several(parts), parts.options),
        5,
        summary="for each request the drafter with the best recent goodput",
    ),
    "horizontal_cascade": DrafterSpec(
        HorizontalOptions,
        lambda parts: HorizontalCascade(build_several(parts), parts.options),
        5,
        summary="one drafter for the first positions, cheaper ones for the next",
    ),
    "hybrid": DrafterSpec(
        HybridOptions,
        lambda parts: build_hybrid(parts, _default_length),
        16,
        takes_head=True,
        summary="a lookup or a trained head, whichever is worth more at the moment",
    ),
    "early_exit": DrafterSpec(
        EarlyExitOptions,
        lambda parts: with_model(parts, exit_early(parts.target, parts.options)),
        3,
        summary="the target's own first layers",
    ),
    "layer_skip": DrafterSpec(
        LayerSkipOptions,
        lambda parts: with_model(parts, skip_layers(parts.target, parts.options)),
        3,
        summary="the target without some of its sublayers",
    ),
    "lookahead": DrafterSpec(
        LookaheadOptions,
        lambda parts: LookaheadDrafter(parts.options),
        16,
        steady=True,
        summary="n-grams from Jacobi iteration inside the target's own passes",
    ),
    "pad": DrafterSpec(
        PadOptions,
        lambda parts: PadDrafter(pad_token_id(parts)),
        8,
        steady=True,
        summary="padding behind the text, so that one target pass guesses a block",
    ),
    "pass": DrafterSpec(
        PassOptions,
        build_pass,
        8,
        takes_head=True,
        steady=True,
        summary="learnt look-ahead embeddings behind the text, for a block per pass (PaSS)",
    ),
    "regex": DrafterSpec(
        RegexOptions,
        lambda parts: RegexDrafter(parts.options, parts.grammars),
        16,
        summary="what a grammar forces, for structured outputs",
    ),
    "ngram": DrafterSpec(
        NgramOptions,
        lambda parts: NgramDrafter(parts.options),
        16,
        summary="prompt lookup: what followed the last tokens before",
    ),
    "ngram_table": DrafterSpec(
        NgramTableOptions,
        lambda parts: NgramTableDrafter(parts.options, coupled=parts.coupled),
        4,
        summary="successor frequencies of short contexts",
    ),
    "recycle": DrafterSpec(
        RecycleOptions,
        lambda parts: RecycleDrafter(parts.options),
        16,
        summary="tokens that the target found probable after the same context before",
    ),
    "suffix": DrafterSpec(
        SuffixOptions,
        lambda parts: SuffixDrafter(parts.options),
        16,
        summary="what most often followed the longest suffix, here and in earlier outputs",
    ),
    "copy": DrafterSpec(
        CopyOptions,
        build_copy,
        10,
        summary="the rest of the input, where the output follows it",
    ),
    "corpus_ngram": DrafterSpec(
        CorpusNgramOptions,
        build_corpus_ngram,
        4,
        summary="n-grams of your own text files, or of the target's text (`foretoken ngrams`)",
    ),
    "rest": DrafterSpec(
        RestOptions,
        build_rest,
        10,
        summary="what followed the longest suffix in a datastore (`foretoken datastore build`)",
    ),
    "random": DrafterSpec(
        NoOptions,
        lambda parts: RandomDrafter(coupled=parts.coupled),
        1,
        summary="uniform over the vocabulary: the baseline that every drafter must beat",
    ),
}


PLUGINS = "foretoken.drafters"
"""Group of entry points in which other packages declare a `DrafterSpec`."""


def drafter_spec(method: str) -> DrafterSpec:
    """The specification of this method, from this library or from another package.

    Raises:
        ConfigError: no method has this name, or its entry point does not name a `DrafterSpec`.
    """
    spec = METHODS.get(method) or plugin(PLUGINS, method)
    if spec is None:
        names = [*METHODS, *plugin_names(PLUGINS)]
        raise ConfigError(f"unknown method '{method}': {nearest(method, names)}")
    if not isinstance(spec, DrafterSpec):
        raise ConfigError(
            f"method '{method}': the entry point in {PLUGINS} has to name a DrafterSpec, not "
            f"{spec!r}."
        )
    return spec


def _default_length(config: Mapping[str, Any]) -> int:
    """The default draft length of a method with these options: what they imply, or its own."""
    fields = dict(config)
    spec = drafter_spec(fields.pop("method"))
    implied = spec.options(**fields).default_num_speculative_tokens()
    return spec.default_num_speculative_tokens if implied is None else implied


def spec_of(drafter: Drafter) -> DrafterSpec:
    """A specification for a drafter that the user passes as an instance."""
    return DrafterSpec(NoOptions, lambda _: drafter, INSTANCE_TOKENS)
