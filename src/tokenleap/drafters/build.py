"""Builds the drafters that look up, count or guess tokens, and those that combine others.

The functions import what they build. So the registry, which names them, does not need PyTorch, and
a process imports the drafters that it uses. `build_models.py` has all other methods.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from tokenleap.core.files import renamed
from tokenleap.errors import CompatibilityError, ConfigError

if TYPE_CHECKING:
    from tokenleap.drafters.base import Drafter
    from tokenleap.drafters.options.combined import HybridOptions
    from tokenleap.drafters.spec import DrafterParts

__all__ = [
    "build_cascade",
    "build_copy",
    "build_corpus_ngram",
    "build_ensemble",
    "build_horizontal_cascade",
    "build_hybrid",
    "build_lookahead",
    "build_ngram",
    "build_ngram_table",
    "build_none",
    "build_pad",
    "build_prediction",
    "build_random",
    "build_recycle",
    "build_regex",
    "build_rest",
    "build_suffix",
    "build_switch",
]


def build_none(parts: DrafterParts) -> Drafter:
    """Nothing is drafted."""
    from tokenleap.drafters.none import NoDrafter

    return NoDrafter()


def build_ngram(parts: DrafterParts) -> Drafter:
    """Prompt lookup."""
    from tokenleap.drafters.ngram import NgramDrafter

    return NgramDrafter(parts.options)


def build_ngram_table(parts: DrafterParts) -> Drafter:
    """Counts of the text itself."""
    from tokenleap.drafters.ngram_table import NgramTableDrafter

    return NgramTableDrafter(parts.options, coupled=parts.coupled)


def build_suffix(parts: DrafterParts) -> Drafter:
    """Lookup in this text and in earlier outputs."""
    from tokenleap.drafters.suffix import SuffixDrafter

    return SuffixDrafter(parts.options)


def build_recycle(parts: DrafterParts) -> Drafter:
    """What the target found probable before."""
    from tokenleap.drafters.recycle import RecycleDrafter

    return RecycleDrafter(parts.options)


def build_copy(parts: DrafterParts) -> Drafter:
    """The rest of the prompt, or of an encoder-decoder's source.

    Raises:
        CompatibilityError: the source has no tokens, or other ones than the output.
    """
    from tokenleap.drafters.copy import CopyDrafter

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
    """N-grams of the user's own text, or of the target's."""
    from tokenleap.drafters.corpus_ngram import CorpusNgramDrafter, load_corpus

    options = parts.options
    vocab_size = parts.target.vocab_size
    ngrams = load_corpus(options.corpus, options.order, vocab_size, parts.tokenizer)
    return CorpusNgramDrafter(ngrams, options, coupled=parts.coupled)


def build_rest(parts: DrafterParts) -> Drafter:
    """Lookup in a datastore."""
    from tokenleap.drafters.rest import RestDrafter, load_datastore

    options = parts.options
    store = load_datastore(options.datastore, parts.target.vocab_size, parts.tokenizer)
    return RestDrafter(store, options)


def build_regex(parts: DrafterParts) -> Drafter:
    """What a grammar forces."""
    from tokenleap.drafters.regex import RegexDrafter

    return RegexDrafter(parts.options, parts.grammars)


def build_lookahead(parts: DrafterParts) -> Drafter:
    """Jacobi iteration."""
    from tokenleap.drafters.lookahead import LookaheadDrafter

    return LookaheadDrafter(parts.options)


def build_random(parts: DrafterParts) -> Drafter:
    """Uniform tokens."""
    from tokenleap.drafters.random_tokens import RandomDrafter

    return RandomDrafter(coupled=parts.coupled)


def build_pad(parts: DrafterParts) -> Drafter:
    """Padding behind the text."""
    from tokenleap.drafters.pad import PadDrafter

    return PadDrafter(_pad_token_id(parts))


def build_cascade(parts: DrafterParts) -> Drafter:
    """A draft model that is itself accelerated."""
    from tokenleap.core.acceptance.coupled import Coupled
    from tokenleap.drafters.cascade import Cascade
    from tokenleap.drafters.resize import resized
    from tokenleap.drafters.vocabulary import Vocabularies

    draft, rule = parts.load_model(), Coupled()
    Vocabularies(parts.target, parts.tokenizer, draft).check_same("method 'cascade'")
    model = resized(draft.model, parts.target.vocab_size)
    inner = parts.build(parts.options.drafter, model, rule.couples_draft)
    return Cascade(model, inner, rule, parts.options, coupled=parts.coupled)


def build_ensemble(parts: DrafterParts) -> Drafter:
    """Several drafters, merged."""
    from tokenleap.drafters.combine import Ensemble

    return Ensemble(_several(parts))


def build_switch(parts: DrafterParts) -> Drafter:
    """One of several drafters at a time."""
    from tokenleap.drafters.combine import Switch

    return Switch(_several(parts), parts.options)


def build_horizontal_cascade(parts: DrafterParts) -> Drafter:
    """Several drafters, one behind the other."""
    from tokenleap.drafters.horizontal import HorizontalCascade

    return HorizontalCascade(_several(parts), parts.options)


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
    from tokenleap.drafters.hybrid import Hybrid

    options: HybridOptions = parts.options
    lookup = parts.build(options.lookup, parts.target, parts.coupled)
    if not lookup.looks_up:
        raise ConfigError("lookup: its method must look tokens up, as 'suffix' and 'ngram' do.")
    given = {name: v for name, v in options.drafter.items() if name != "num_speculative_tokens"}
    trained = parts.build({**given, "model": parts.model}, parts.target, parts.coupled)
    length = options.drafter.get("num_speculative_tokens")
    return Hybrid(lookup, trained, default_length(given) if length is None else length)


def build_prediction(
    parts: DrafterParts, default_length: Callable[[Mapping[str, Any]], int]
) -> Drafter:
    """The text that a request expects, in front of another drafter if one is named.

    Args:
        parts: see `DrafterParts`.
        default_length: the default draft length of a drafter's configuration.
    """
    from tokenleap.drafters.prediction import PredictionDrafter, with_prediction

    inner = parts.options.drafter
    if inner is None:
        return PredictionDrafter()
    drafter = parts.build(inner, parts.target, parts.coupled)
    return with_prediction(drafter, default_length(inner))


def _several(parts: DrafterParts) -> list[Drafter]:
    """The drafters of a method that combines several."""
    return [parts.build(config, parts.target, parts.coupled) for config in parts.options.drafters]


def _pad_token_id(parts: DrafterParts) -> int:
    """What `pad` pads with: the token chosen, that of the model's training, or the tokenizer's.

    Raises:
        ConfigError: the token chosen does not exist.
    """
    chosen: int | None = parts.options.pad_token_id
    if chosen is not None and chosen >= parts.target.vocab_size:
        highest = parts.target.vocab_size - 1
        raise ConfigError(f"pad_token_id: must be 0 to {highest} for this model, got {chosen}.")
    names = ("mask_token_id", "pad_token_id", "eos_token_id")
    config = renamed(parts.target.config.to_dict())
    trained = (config.get("tokenleap") or {}).get("pad_token_id")
    candidates = [chosen, trained, *(getattr(parts.tokenizer, name, None) for name in names), 0]
    return next(int(token) for token in candidates if token is not None)
