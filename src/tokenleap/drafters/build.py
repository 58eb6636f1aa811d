"""Builds the drafters of all methods.

The functions import what they build. So the registry, which names them, does not need PyTorch, and
a process imports the drafters that it uses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from tokenleap.core.files import renamed
from tokenleap.errors import CompatibilityError, ConfigError

if TYPE_CHECKING:
    from tokenleap.drafters.base import Drafter
    from tokenleap.drafters.heads.eagle import EagleHead
    from tokenleap.drafters.heads.layouts import EagleFolder
    from tokenleap.drafters.model_drafter import Head, Scorer
    from tokenleap.drafters.online import Learnable
    from tokenleap.drafters.options import HybridOptions
    from tokenleap.drafters.spec import DrafterParts


def build_none(parts: DrafterParts) -> Drafter:
    from tokenleap.drafters.lookups import NoDrafter

    return NoDrafter()


def build_ngram(parts: DrafterParts) -> Drafter:
    from tokenleap.drafters.lookups import NgramDrafter

    return NgramDrafter(parts.options)


def build_ngram_table(parts: DrafterParts) -> Drafter:
    from tokenleap.drafters.lookups import NgramTableDrafter

    return NgramTableDrafter(parts.options, coupled=parts.coupled)


def build_suffix(parts: DrafterParts) -> Drafter:
    from tokenleap.drafters.suffix import SuffixDrafter

    return SuffixDrafter(parts.options)


def build_recycle(parts: DrafterParts) -> Drafter:
    from tokenleap.drafters.lookahead import RecycleDrafter

    return RecycleDrafter(parts.options)


def build_copy(parts: DrafterParts) -> Drafter:
    """The rest of the prompt, or of an encoder-decoder's source."""
    from tokenleap.drafters.copying import CopyDrafter

    network, config = parts.target.source_network, parts.target.config
    if network is not None:
        shared = getattr(config, "share_encoder_decoder_embeddings", True)
        if not shared or network.source_vocab_size != parts.target.vocab_size:
            raise CompatibilityError(
                "method 'copy' continues the source, and this model's sources and outputs have "
                "different tokens: draft with 'suffix' or 'ngram'."
            )
    special = () if parts.tokenizer is None else parts.tokenizer.all_special_ids
    return CopyDrafter(parts.options, special)


def build_corpus_ngram(parts: DrafterParts) -> Drafter:
    from tokenleap.drafters.text.ngrams import CorpusNgramDrafter, load_corpus

    options = parts.options
    vocab_size = parts.target.vocab_size
    ngrams = load_corpus(options.corpus, options.order, vocab_size, parts.tokenizer)
    return CorpusNgramDrafter(ngrams, options, coupled=parts.coupled)


def build_rest(parts: DrafterParts) -> Drafter:
    from tokenleap.drafters.text.datastore import RestDrafter, load_datastore

    options = parts.options
    store = load_datastore(options.datastore, parts.target.vocab_size, parts.tokenizer)
    return RestDrafter(store, options)


def build_regex(parts: DrafterParts) -> Drafter:
    from tokenleap.drafters.lookups import RegexDrafter

    return RegexDrafter(parts.options, parts.grammars)


def build_lookahead(parts: DrafterParts) -> Drafter:
    from tokenleap.drafters.lookahead import LookaheadDrafter

    return LookaheadDrafter(parts.options)


def build_random(parts: DrafterParts) -> Drafter:
    from tokenleap.drafters.lookups import RandomDrafter

    return RandomDrafter(coupled=parts.coupled)


def build_pad(parts: DrafterParts) -> Drafter:
    from tokenleap.drafters.padding import PadDrafter

    return PadDrafter(_pad_token_id(parts))


def build_cascade(parts: DrafterParts) -> Drafter:
    from tokenleap.core.acceptance.rules import Coupled
    from tokenleap.drafters.models import Cascade, resized
    from tokenleap.drafters.vocabulary import Vocabularies

    draft, rule = parts.load_model(), Coupled()
    Vocabularies(parts.target, parts.tokenizer, draft).check_same("method 'cascade'")
    model = resized(draft.model, parts.target.vocab_size)
    inner = parts.build(parts.options.drafter, model, rule.couples_draft)
    return Cascade(model, inner, rule, parts.options, coupled=parts.coupled)


def build_ensemble(parts: DrafterParts) -> Drafter:
    from tokenleap.drafters.combine import Ensemble

    return Ensemble(_several(parts), shares_nodes=parts.shares_nodes)


def build_switch(parts: DrafterParts) -> Drafter:
    from tokenleap.drafters.combine import Switch

    return Switch(_several(parts), parts.options)


def build_horizontal_cascade(parts: DrafterParts) -> Drafter:
    from tokenleap.drafters.combine import HorizontalCascade

    return HorizontalCascade(_several(parts), parts.options)


def build_hybrid(
    parts: DrafterParts, default_length: Callable[[Mapping[str, Any]], int]
) -> Drafter:
    from tokenleap.drafters.combine import Hybrid

    options: HybridOptions = parts.options
    lookup = parts.build(options.lookup, parts.target, parts.coupled)
    if not lookup.traits.looks_up:
        raise ConfigError("lookup: its method must look tokens up, as 'suffix' and 'ngram' do.")
    given = {name: v for name, v in options.drafter.items() if name != "num_speculative_tokens"}
    trained = parts.build({**given, "model": parts.model}, parts.target, parts.coupled)
    length = options.drafter.get("num_speculative_tokens")
    return Hybrid(lookup, trained, default_length(given) if length is None else length)


def build_prediction(
    parts: DrafterParts, default_length: Callable[[Mapping[str, Any]], int]
) -> Drafter:
    """The text that a request expects, before another drafter if one is named."""
    from tokenleap.drafters.copying import PredictionDrafter, with_prediction

    inner = parts.options.drafter
    if inner is None:
        return PredictionDrafter()
    drafter = parts.build(inner, parts.target, parts.coupled)
    return with_prediction(drafter, default_length(inner))


def _several(parts: DrafterParts) -> list[Drafter]:
    return [parts.build(config, parts.target, parts.coupled) for config in parts.options.drafters]


def _pad_token_id(parts: DrafterParts) -> int:
    """The padding token: the one chosen, that of the model's training, or the tokenizer's."""
    chosen: int | None = parts.options.pad_token_id
    if chosen is not None and chosen >= parts.target.vocab_size:
        highest = parts.target.vocab_size - 1
        raise ConfigError(f"pad_token_id: must be 0 to {highest} for this model, got {chosen}.")
    names = ("mask_token_id", "pad_token_id", "eos_token_id")
    config = renamed(parts.target.config.to_dict())
    trained = (config.get("tokenleap") or {}).get("pad_token_id")
    candidates = [chosen, trained, *(getattr(parts.tokenizer, name, None) for name in names), 0]
    return next(int(token) for token in candidates if token is not None)


# Drafters with a model, a trained head or a part of the target.


def build_draft_model(parts: DrafterParts) -> Drafter:
    from tokenleap.drafters.learnable import LearnableModel
    from tokenleap.drafters.vocabulary import Vocabularies

    draft = parts.load_model().with_tokenizer(parts.options.draft_tokenizer)
    vocabularies = Vocabularies(parts.target, parts.tokenizer, draft)
    way = vocabularies.way(parts.options.vocabulary)
    drafter: Drafter
    if way == "same":
        scorer = vocabularies.same_model()
        drafter = _with_model(parts, scorer)
        if draft.source is not None:
            learnable = LearnableModel(scorer, draft.source, draft.model, parts.target)
            drafter.traits = replace(drafter.traits, learnable=learnable)
    elif way == "intersection":
        drafter = _with_model(parts, vocabularies.translated_model())
    elif reason := parts.options.refused_for_text():
        raise ConfigError(f"{vocabularies.overlap(way)}; {reason}")
    else:
        drafter = vocabularies.text_drafter()
    overlap = vocabularies.overlap(way)
    drafter.traits = replace(drafter.traits, vocabulary_overlap=overlap)
    return drafter


def build_eagle(parts: DrafterParts) -> Drafter:
    from tokenleap.drafters.learnable import LearnableHead

    head, read = _eagle(parts, "eagle")
    quantization = parts.options.draft_quantization
    draft = partial(head.use_head, target=parts.target, quantization=quantization)
    return _with_head(parts, head, LearnableHead(read, draft, head.layers, parts.target))


def build_parallel(parts: DrafterParts) -> Drafter:
    head, _ = _eagle(parts, "parallel")
    return _with_head(parts, head)


def _eagle(parts: DrafterParts, method: str) -> tuple[EagleHead, Callable[[], EagleFolder]]:
    """A head with attention, and what reads its folder again."""
    from tokenleap.drafters.heads.eagle import load_head
    from tokenleap.drafters.heads.layouts import EagleFolder

    read = partial(EagleFolder.read, parts.model, method)
    quantization = parts.options.draft_quantization
    head, rows = load_head(read(), parts.target, parts.tokenizer, quantization)
    parts.share_memory(rows)
    return head, read


def build_state_head(parts: DrafterParts, method: str) -> Drafter:
    """A head without attention: one of `medusa`, `hydra`, `blockwise` and `mlp_speculator`."""
    from tokenleap.drafters.heads.layouts import StateFolder
    from tokenleap.drafters.heads.probe import check_target
    from tokenleap.drafters.heads.state import StateHead
    from tokenleap.drafters.learnable import LearnableHead

    read = partial(StateFolder.read, parts.model, method)
    file = read()
    head = StateHead(file.load(parts.target), parts.target)
    check_target(file.path, file.verifier, file.notes, parts.target)
    return _with_head(parts, head, LearnableHead(read, head.use, head.layers, parts.target))


def build_spec_drafter(parts: DrafterParts) -> Drafter:
    from tokenleap.drafters.spec_drafter import load_spec_drafter

    quantization = parts.options.draft_quantization
    scorer, rows = load_spec_drafter(parts.model, parts.target, quantization)
    parts.share_memory(rows)
    return _with_model(parts, scorer)


def build_pass(parts: DrafterParts) -> Drafter:
    from tokenleap.drafters.padding import PassDrafter, read_pass_tokens

    rows = read_pass_tokens(parts.model, parts.target)
    return PassDrafter(parts.target.network.extend(rows), len(rows))


def build_early_exit(parts: DrafterParts) -> Drafter:
    from tokenleap.drafters.models import exit_early

    return _with_model(parts, exit_early(parts.target, parts.options))


def build_layer_skip(parts: DrafterParts) -> Drafter:
    from tokenleap.drafters.models import skip_layers

    return _with_model(parts, skip_layers(parts.target, parts.options))


def _with_model(parts: DrafterParts, scorer: Scorer) -> Drafter:
    from tokenleap.drafters.model_drafter import ModelDrafter

    return ModelDrafter(scorer, parts.options, **_drawing(parts))


def _with_head(parts: DrafterParts, head: Head, learnable: Learnable | None = None) -> Drafter:
    from tokenleap.drafters.model_drafter import HeadDrafter

    drafter = HeadDrafter(head, parts.options, **_drawing(parts))
    drafter.traits = replace(drafter.traits, learnable=learnable)
    return drafter


def _drawing(parts: DrafterParts) -> dict[str, bool]:
    """How drafters with a model draw their tokens."""
    return {"coupled": parts.coupled, "shares_nodes": parts.shares_nodes}
