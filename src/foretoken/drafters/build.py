"""Builds the drafters that need more than their options: models, heads, files, other drafters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from foretoken.core.acceptance.coupled import Coupled
from foretoken.drafters.base import Drafter
from foretoken.drafters.block import BlockDrafter
from foretoken.drafters.cascade import Cascade
from foretoken.drafters.copy import CopyDrafter
from foretoken.drafters.corpus_ngram import CorpusNgramDrafter, load_corpus
from foretoken.drafters.heads.checkpoint import read_checkpoint
from foretoken.drafters.heads.eagle import EagleDrafter, load_head
from foretoken.drafters.heads.parallel import ParallelDrafter, load_parallel_head
from foretoken.drafters.heads.probe import check_target
from foretoken.drafters.heads.state_file import Layout, load_net, read_state_file
from foretoken.drafters.heads.state_head import StateDrafter, StateHead
from foretoken.drafters.heads.state_net import StateNet
from foretoken.drafters.hybrid import Hybrid, HybridOptions
from foretoken.drafters.learnable import LearnableEagle, LearnableModel, LearnableState
from foretoken.drafters.model_drafter import ModelDrafter
from foretoken.drafters.pass_tokens import PassDrafter, read_pass_tokens
from foretoken.drafters.resize import resized
from foretoken.drafters.rest import RestDrafter, load_datastore
from foretoken.drafters.scorer import Scorer
from foretoken.drafters.spec import DrafterParts
from foretoken.drafters.spec_drafter import load_spec_drafter
from foretoken.drafters.tree_options import shape_of
from foretoken.drafters.vocabulary import Vocabularies
from foretoken.errors import CompatibilityError, ConfigError

__all__ = [
    "build_cascade",
    "build_copy",
    "build_corpus_ngram",
    "build_draft_model",
    "build_eagle",
    "build_hybrid",
    "build_parallel",
    "build_pass",
    "build_rest",
    "build_several",
    "build_spec_drafter",
    "pad_token_id",
    "state_head_builder",
    "with_model",
]


def build_cascade(parts: DrafterParts) -> Drafter:
    """A draft model that is itself accelerated."""
    draft, rule = parts.load_model(), Coupled()
    Vocabularies(parts.target, parts.tokenizer, draft).check_same("method 'cascade'")
    model = resized(draft.model, parts.target.vocab_size)
    inner = parts.build(parts.options.drafter, model, rule.couples_draft)
    return Cascade(model, inner, rule, parts.options, coupled=parts.coupled)


def build_copy(parts: DrafterParts) -> Drafter:
    """The rest of the prompt, or of an encoder-decoder's source.

    Raises:
        CompatibilityError: the source has no tokens, or other ones than the output.
    """
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


def build_several(parts: DrafterParts) -> list[Drafter]:
    """The drafters of a method that combines several."""
    return [parts.build(config, parts.target, parts.coupled) for config in parts.options.drafters]


def pad_token_id(parts: DrafterParts) -> int:
    """What `pad` pads with: the token chosen, that of the model's training, or the tokenizer's.

    Raises:
        ConfigError: the token chosen does not exist.
    """
    chosen: int | None = parts.options.pad_token_id
    if chosen is not None and chosen >= parts.target.vocab_size:
        highest = parts.target.vocab_size - 1
        raise ConfigError(f"pad_token_id: must be 0 to {highest} for this model, got {chosen}.")
    names = ("mask_token_id", "pad_token_id", "eos_token_id")
    trained = (getattr(parts.target.config, "foretoken", None) or {}).get("pad_token_id")
    candidates = [chosen, trained, *(getattr(parts.tokenizer, name, None) for name in names), 0]
    return next(int(token) for token in candidates if token is not None)


def build_corpus_ngram(parts: DrafterParts) -> Drafter:
    """N-grams of the user's own text, or of the target's."""
    options = parts.options
    vocab_size = parts.target.vocab_size
    ngrams = load_corpus(options.corpus, options.order, vocab_size, parts.tokenizer)
    return CorpusNgramDrafter(ngrams, options, coupled=parts.coupled)


def build_rest(parts: DrafterParts) -> Drafter:
    """Lookup in a datastore."""
    options = parts.options
    store = load_datastore(options.datastore, parts.target.vocab_size, parts.tokenizer)
    return RestDrafter(store, options)


def with_model(parts: DrafterParts, scorer: Scorer) -> Drafter:
    """Chains or trees from a drafting model."""
    shape = shape_of(parts.options)
    return ModelDrafter(scorer, parts.options, shape, coupled=parts.coupled)


def build_draft_model(parts: DrafterParts) -> Drafter:
    """A smaller model, with whatever vocabulary.

    Raises:
        ConfigError: its vocabulary asks for drafting by text, and another option rules that out.
    """
    draft = parts.load_model().with_tokenizer(parts.options.draft_tokenizer)
    vocabularies = Vocabularies(parts.target, parts.tokenizer, draft)
    way = vocabularies.way(parts.options.vocabulary)
    drafter: Drafter
    if way == "same":
        scorer = vocabularies.same_model()
        drafter = with_model(parts, scorer)
        if draft.source is not None:
            drafter.learnable = LearnableModel(scorer, draft.source, draft.model)
    elif way == "intersection":
        drafter = with_model(parts, vocabularies.translated_model())
    elif reason := parts.options.refused_for_text():
        raise ConfigError(f"{vocabularies.overlap(way)}; {reason}")
    else:
        drafter = vocabularies.text_drafter()
    drafter.vocabulary_overlap = vocabularies.overlap(way)
    return drafter


def build_eagle(parts: DrafterParts) -> Drafter:
    """A trained head with attention."""
    checkpoint = read_checkpoint(parts.model)
    quantization = parts.options.quantization
    head, rows = load_head(checkpoint, parts.target, parts.tokenizer, quantization)
    parts.share_memory(rows)
    layers = head.layers
    shape = shape_of(parts.options)
    drafter = EagleDrafter(head, layers, parts.options, shape, coupled=parts.coupled)
    drafter.learnable = LearnableEagle(head, checkpoint.path, layers, parts.target, quantization)
    return drafter


def build_parallel(parts: DrafterParts) -> Drafter:
    """A trained head with attention that drafts a block in one pass."""
    checkpoint = read_checkpoint(parts.model, ["peagle"])
    quantization = parts.options.quantization
    head, rows = load_parallel_head(checkpoint, parts.target, parts.tokenizer, quantization)
    parts.share_memory(rows)
    layers = checkpoint.description.config.aux_layers
    shape = shape_of(parts.options)
    return ParallelDrafter(head, layers, parts.options, shape, coupled=parts.coupled)


def build_spec_drafter(parts: DrafterParts) -> Drafter:
    """An encoder-decoder of its own that fills a block of masks."""
    scorer, rows = load_spec_drafter(parts.model, parts.target)
    parts.share_memory(rows)
    shape = shape_of(parts.options)
    return BlockDrafter(scorer, parts.options, shape, coupled=parts.coupled)


def build_pass(parts: DrafterParts) -> Drafter:
    """Look-ahead embeddings that the target's passes read."""
    rows = read_pass_tokens(parts.model, parts.target)
    return PassDrafter(parts.target.network.extend(rows), len(rows))


def build_hybrid(
    parts: DrafterParts, default_length: Callable[[Mapping[str, Any]], int]
) -> Drafter:
    """A lookup beside a trained head.

    Args:
        parts: see `DrafterParts`.
        default_length: the default draft length of a drafter's configuration.

    Raises:
        ConfigError: the lookup does not look tokens up.
    """
    options: HybridOptions = parts.options
    lookup = parts.build(options.lookup, parts.target, parts.coupled)
    if not lookup.looks_up:
        raise ConfigError("lookup: its method must look tokens up, as 'suffix' and 'ngram' do.")
    given = {name: v for name, v in options.drafter.items() if name != "num_speculative_tokens"}
    trained = parts.build({**given, "model": parts.model}, parts.target, parts.coupled)
    length = options.drafter.get("num_speculative_tokens")
    return Hybrid(lookup, trained, default_length(given) if length is None else length)


def state_head_builder(kind: type[StateNet], *layouts: Layout) -> Callable[[DrafterParts], Drafter]:
    """Constructs the drafter of a head without attention, from our own or a published layout."""

    def build(parts: DrafterParts) -> Drafter:
        read = partial(read_state_file, parts.model, kind, layouts)
        file = read()
        head = StateHead(load_net(file, kind, parts.target), parts.target)
        check_target(file.path.parent, file.verifier, file.notes, parts.target)
        shape = shape_of(parts.options)
        drafter = StateDrafter(head, parts.options, shape, coupled=parts.coupled)
        drafter.learnable = LearnableState(head, read, kind, parts.target)
        return drafter

    return build
