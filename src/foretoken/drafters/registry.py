"""The registry of methods: the only place that knows drafters by name.

A new drafter is one file and one entry here. `SpeculativeConfig` reads options and defaults here,
`engine.strategies` builds drafters, and the invariant suite runs over every entry. Other packages
add methods through entry points (`core.plugins`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from foretoken.core.acceptance.coupled import Coupled
from foretoken.core.config import nearest
from foretoken.core.grammar import Grammars
from foretoken.core.plugins import plugin, plugin_names
from foretoken.drafters.base import Drafter, DrafterOptions
from foretoken.drafters.cascade import Cascade, CascadeOptions
from foretoken.drafters.combine import CombineOptions, Ensemble, Switch, SwitchOptions
from foretoken.drafters.copy import CopyDrafter, CopyOptions
from foretoken.drafters.corpus_ngram import CorpusNgramDrafter, CorpusNgramOptions, load_corpus
from foretoken.drafters.draft_model import DraftModelOptions
from foretoken.drafters.heads.blockwise import BlockwiseNet
from foretoken.drafters.heads.checkpoint import read_checkpoint
from foretoken.drafters.heads.eagle import EagleDrafter, EagleOptions, load_head
from foretoken.drafters.heads.hydra import HydraNet
from foretoken.drafters.heads.medusa import MedusaNet
from foretoken.drafters.heads.mlp_speculator import MlpSpeculatorNet
from foretoken.drafters.heads.state_file import Layout, load_net, read_state_file
from foretoken.drafters.heads.state_head import StateDrafter, StateHead, StateHeadOptions
from foretoken.drafters.heads.state_layouts import (
    fasterdecoding_medusa,
    ibm_mlp_speculator,
    vllm_medusa,
)
from foretoken.drafters.heads.state_net import StateNet
from foretoken.drafters.horizontal import HorizontalCascade, HorizontalOptions
from foretoken.drafters.hybrid import Hybrid, HybridOptions
from foretoken.drafters.lookahead import LookaheadDrafter, LookaheadOptions
from foretoken.drafters.model_drafter import ModelDrafter, Scorer
from foretoken.drafters.ngram import NgramDrafter, NgramOptions
from foretoken.drafters.ngram_table import NgramTableDrafter, NgramTableOptions
from foretoken.drafters.none import NoDrafter
from foretoken.drafters.pad import PadDrafter, PadOptions
from foretoken.drafters.random_tokens import RandomDrafter
from foretoken.drafters.recycle import RecycleDrafter, RecycleOptions
from foretoken.drafters.regex import RegexDrafter, RegexOptions
from foretoken.drafters.resize import resized
from foretoken.drafters.rest import RestDrafter, RestOptions, load_datastore
from foretoken.drafters.self_draft import (
    EarlyExitOptions,
    LayerSkipOptions,
    exit_early,
    skip_layers,
)
from foretoken.drafters.shapes import shape_of
from foretoken.drafters.suffix import SuffixDrafter, SuffixOptions
from foretoken.drafters.vocabulary import DraftModel, Vocabularies
from foretoken.errors import ConfigError
from foretoken.runtime.rows import Rows
from foretoken.runtime.target import Target

__all__ = ["METHODS", "DrafterParts", "DrafterSpec", "drafter_spec", "spec_of"]


@dataclass(frozen=True)
class DrafterParts:
    """Everything that `DrafterSpec.build` may use to construct a drafter.

    Args:
        options: the method's own options.
        coupled: whether the acceptance rule wants drafts drawn with the target's own noise.
        target: the target, for methods that draft with a part of it.
        model: what the user gave as `model`; only for methods with `takes_head`.
        share_memory: counts KV rows of the drafter into `kv_cache_memory`.
        load_model: loads the draft model, with any vocabulary; only for methods with
            `takes_model`.
        build: constructs another drafter, for methods that combine several. Its arguments are the
            configuration, the model it drafts for, and whether that model's rule couples.
        tokenizer: the target's tokenizer, or None if it has none.
        grammars: compiles structured outputs for the target's tokens.
    """

    options: Any
    coupled: bool
    target: Target
    model: Any
    share_memory: Callable[[Rows], None]
    load_model: Callable[[], DraftModel]
    build: Callable[[Mapping[str, Any], Target, bool], Drafter]
    tokenizer: PreTrainedTokenizerBase | None
    grammars: Grammars


@dataclass(frozen=True)
class DrafterSpec:
    """One method: its options, its constructor and its defaults.

    Args:
        options: the class of the method's own options.
        build: constructs the drafter.
        default_num_speculative_tokens: the default draft length, in drafted nodes.
        takes_model: whether the method needs a draft model (`model`).
        takes_head: whether the method needs the folder of a trained head (`model`).
        steady: whether the method reads its next draft from the target's output at the nodes of
            its last one. A skipped or shortened draft then makes the next one worse, too. So the
            default controller is `fixed`.
        summary: one line for `foretoken` help texts.
    """

    options: type[DrafterOptions]
    build: Callable[[DrafterParts], Drafter]
    default_num_speculative_tokens: int
    takes_model: bool = False
    takes_head: bool = False
    steady: bool = False
    summary: str = ""


INSTANCE_TOKENS = 5
"""Default draft length of a drafter that the user passes as an instance."""


class NoOptions(DrafterOptions):
    """The options of a method that has none."""


def _cascade(parts: DrafterParts) -> Drafter:
    draft, rule = parts.load_model(), Coupled()
    Vocabularies(parts.target, parts.tokenizer, draft).check_same("method 'cascade'")
    model = resized(draft.model, parts.target.vocab_size)
    inner = parts.build(parts.options.drafter, model, rule.couples_draft)
    return Cascade(model, inner, rule, parts.options, coupled=parts.coupled)


def _several(parts: DrafterParts) -> list[Drafter]:
    return [parts.build(config, parts.target, parts.coupled) for config in parts.options.drafters]


def _pad_token_id(parts: DrafterParts) -> int:
    chosen: int | None = parts.options.pad_token_id
    if chosen is not None and chosen >= parts.target.vocab_size:
        highest = parts.target.vocab_size - 1
        raise ConfigError(f"pad_token_id: must be 0 to {highest} for this model, got {chosen}.")
    names = ("mask_token_id", "pad_token_id", "eos_token_id")
    candidates = [chosen, *(getattr(parts.tokenizer, name, None) for name in names), 0]
    return next(int(token) for token in candidates if token is not None)


def _corpus_ngram(parts: DrafterParts) -> Drafter:
    options = parts.options
    ngrams = load_corpus(options.corpus, parts.target.vocab_size, parts.tokenizer)
    return CorpusNgramDrafter(ngrams, options, coupled=parts.coupled)


def _rest(parts: DrafterParts) -> Drafter:
    options = parts.options
    store = load_datastore(options.datastore, parts.target.vocab_size, parts.tokenizer)
    return RestDrafter(store, options)


def _with_model(parts: DrafterParts, scorer: Scorer) -> Drafter:
    shape = shape_of(parts.options)
    return ModelDrafter(scorer, parts.options, shape, coupled=parts.coupled)


def _draft_model(parts: DrafterParts) -> Drafter:
    draft = parts.load_model().with_tokenizer(parts.options.draft_tokenizer)
    vocabularies = Vocabularies(parts.target, parts.tokenizer, draft)
    way = vocabularies.way(parts.options.vocabulary)
    drafter: Drafter
    if way == "same":
        drafter = _with_model(parts, vocabularies.same_model())
    elif way == "intersection":
        drafter = _with_model(parts, vocabularies.translated_model())
    elif reason := parts.options.refused_for_text():
        raise ConfigError(f"{vocabularies.overlap(way)}; {reason}")
    else:
        drafter = vocabularies.text_drafter()
    drafter.vocabulary_overlap = vocabularies.overlap(way)
    return drafter


def _eagle(parts: DrafterParts) -> Drafter:
    checkpoint = read_checkpoint(parts.model)
    head, rows = load_head(checkpoint, parts.target)
    parts.share_memory(rows)
    layers = checkpoint.description.config.aux_layers
    shape = shape_of(parts.options)
    return EagleDrafter(head, layers, parts.options, shape, coupled=parts.coupled)


def _hybrid(parts: DrafterParts) -> Drafter:
    options: HybridOptions = parts.options
    lookup = parts.build(options.lookup, parts.target, parts.coupled)
    if not lookup.looks_up:
        raise ConfigError("lookup: its method must look tokens up, as 'suffix' and 'ngram' do.")
    given = {name: v for name, v in options.drafter.items() if name != "num_speculative_tokens"}
    trained = parts.build({**given, "model": parts.model}, parts.target, parts.coupled)
    spec = drafter_spec(given.pop("method"))
    implied = spec.options(**given).default_num_speculative_tokens()
    default = spec.default_num_speculative_tokens if implied is None else implied
    return Hybrid(lookup, trained, options.drafter.get("num_speculative_tokens", default))


def _state_head(kind: type[StateNet], *layouts: Layout) -> Callable[[DrafterParts], Drafter]:
    """Constructs the drafter of a head without attention, from our own or a published layout."""

    def build(parts: DrafterParts) -> Drafter:
        file = read_state_file(parts.model, kind, layouts)
        head = StateHead(load_net(file, kind, parts.target), parts.target)
        shape = shape_of(parts.options)
        return StateDrafter(head, parts.options, shape, coupled=parts.coupled)

    return build


METHODS: dict[str, DrafterSpec] = {
    "none": DrafterSpec(
        NoOptions, lambda _: NoDrafter(), 0, summary="no speculation: the baseline"
    ),
    "draft_model": DrafterSpec(
        DraftModelOptions,
        _draft_model,
        5,
        takes_model=True,
        summary="a smaller model, best with the same vocabulary",
    ),
    "eagle": DrafterSpec(
        EagleOptions,
        _eagle,
        4,
        takes_head=True,
        summary="a trained head that reads the target's hidden states (EAGLE-3)",
    ),
    "medusa": DrafterSpec(
        StateHeadOptions,
        _state_head(MedusaNet, fasterdecoding_medusa, vllm_medusa),
        4,
        takes_head=True,
        summary="trained heads, one for each drafted position (Medusa)",
    ),
    "hydra": DrafterSpec(
        StateHeadOptions,
        _state_head(HydraNet),
        4,
        takes_head=True,
        summary="trained heads that also read the tokens drafted before (Hydra)",
    ),
    "blockwise": DrafterSpec(
        StateHeadOptions,
        _state_head(BlockwiseNet),
        4,
        takes_head=True,
        summary="trained layers before the target's output layer (blockwise decoding)",
    ),
    "mlp_speculator": DrafterSpec(
        StateHeadOptions,
        _state_head(MlpSpeculatorNet, ibm_mlp_speculator),
        3,
        takes_head=True,
        summary="a trained recurrent MLP over the drafted tokens (MLP speculator)",
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
        summary="for each request the drafter with the best recent goodput",
    ),
    "horizontal_cascade": DrafterSpec(
        HorizontalOptions,
        lambda parts: HorizontalCascade(_several(parts), parts.options),
        5,
        summary="one drafter for the first positions, cheaper ones for the next",
    ),
    "hybrid": DrafterSpec(
        HybridOptions,
        _hybrid,
        16,
        takes_head=True,
        summary="a lookup or a trained head, whichever is worth more at the moment",
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
    "lookahead": DrafterSpec(
        LookaheadOptions,
        lambda parts: LookaheadDrafter(parts.options),
        16,
        steady=True,
        summary="n-grams from Jacobi iteration inside the target's own passes",
    ),
    "pad": DrafterSpec(
        PadOptions,
        lambda parts: PadDrafter(_pad_token_id(parts)),
        8,
        steady=True,
        summary="padding behind the text, so that one target pass guesses a block",
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
    "rest": DrafterSpec(
        RestOptions,
        _rest,
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


def spec_of(drafter: Drafter) -> DrafterSpec:
    """A specification for a drafter that the user passes as an instance."""
    return DrafterSpec(NoOptions, lambda _: drafter, INSTANCE_TOKENS)
