"""Draft models with another vocabulary than the target's.

Timor et al., "Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for
Heterogeneous Vocabularies". The registry calls `Vocabularies` to compare the two vocabularies and
to make the drafter. The paper's token-level intersection is in `translated_model.py`: q is the
draft model's distribution, restricted to the tokens that both models have and renormalised.
Lossless rules stay lossless with this q. The paper's other method, drafting text, is in
`retokenise.py`. `translation.py` converts committed tokens to the draft model's ids. Vocabularies
that differ only in the padding behind the last token count as the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tokenleap import models
from tokenleap.drafters.draft_model import OwnModel
from tokenleap.drafters.overlap import VocabularyOverlap, Way
from tokenleap.drafters.resize import resized
from tokenleap.drafters.retokenise import Splitter, TextDrafter
from tokenleap.drafters.translated_model import TranslatedModel
from tokenleap.drafters.translation import Script, Translator
from tokenleap.errors import CompatibilityError, ConfigError
from tokenleap.runtime.target import Target

__all__ = ["DraftModel", "Vocabularies"]


@dataclass(frozen=True)
class DraftModel:
    """A loaded draft model and its tokenizer.

    Args:
        model: the draft model.
        tokenizer: its tokenizer, or None if it has none.
        source: what it can be loaded from again: a name, or a module; None if that is not known.
    """

    model: Target
    tokenizer: PreTrainedTokenizerBase | None
    source: str | Path | PreTrainedModel | None = None

    def with_tokenizer(self, chosen: str | Path | PreTrainedTokenizerBase | None) -> DraftModel:
        """The same draft model with another tokenizer.

        Args:
            chosen: a tokenizer, or a folder or alias that holds one; None keeps the tokenizer.

        Raises:
            ModelError: the folder or alias does not exist.
            ConfigError: it holds no tokenizer.
        """
        if chosen is None:
            return self
        if isinstance(chosen, str | Path):
            tokenizer = models.find_tokenizer(chosen)
            if tokenizer is None:
                raise ConfigError(f"draft_tokenizer: there is no tokenizer in {chosen}.")
            chosen = tokenizer
        return replace(self, tokenizer=chosen)


class Vocabularies:
    """Compares the vocabularies of a target and a draft model, and makes the drafter for them.

    Args:
        target: the target.
        tokenizer: the target's tokenizer, or None if it has none.
        draft: the draft model with its tokenizer.
    """

    def __init__(
        self, target: Target, tokenizer: PreTrainedTokenizerBase | None, draft: DraftModel
    ) -> None:
        self._target = target
        self._draft = draft.model
        self._tokenizers = (tokenizer, draft.tokenizer)

    @property
    def same(self) -> bool:
        """Whether both have the same tokens, except for padding; those of sources, too.

        Without both tokenizers the sizes of the vocabularies decide.
        """
        target, draft = self._tokenizers
        if target is None or draft is None:
            theirs, ours = _sizes_of(self._target), _sizes_of(self._draft)
            return theirs == ours
        return target is draft or _tokens_of(target) == _tokens_of(draft)

    def way(self, wanted: Literal["auto"] | Way) -> Way:
        """Choose how the draft model drafts.

        Args:
            wanted: see `DraftModelOptions.vocabulary`.

        Raises:
            CompatibilityError: the vocabularies do not allow what is wanted.
        """
        if self._target.reads_source:
            self._check_same_source(wanted)
            return "same"
        if wanted == "same" or (wanted == "auto" and self.same):
            self.check_same("vocabulary 'same'", ", or set vocabulary to 'intersection' or 'text'")
            return "same"
        self._check_tokenizers()
        if wanted == "intersection" and not self._num_shared:
            raise CompatibilityError(
                "vocabulary 'intersection': draft model and target have no token in common; use "
                "another draft model, or set vocabulary to 'text'."
            )
        if wanted == "auto":
            return "intersection" if 2 * self._num_shared >= self._num_tokens[0] else "text"
        return wanted

    def check_same(self, part: str, advice: str = "") -> None:
        """Check that the vocabularies are the same.

        Args:
            part: the part that needs this, such as "method 'cascade'", for the message.
            advice: further advice to the user, added to the message.

        Raises:
            CompatibilityError: the vocabularies differ.
        """
        if self.same:
            self._check_embeds_sources(part)
            return
        found = self._sizes
        if _sizes_of(self._target) == _sizes_of(self._draft):
            found = "draft model and target have vocabularies of the same size but different tokens"
        raise CompatibilityError(
            f"{part}: {found}: use a draft model with the target's tokenizer{advice}."
        )

    def _check_same_source(self, wanted: str) -> None:
        """Check that the draft model of an encoder-decoder reads the same tokens."""
        if wanted not in ("auto", "same"):
            raise CompatibilityError(
                f"vocabulary '{wanted}' is for decoder-only models: an encoder-decoder's draft "
                "model reads the target's source, so it must have the target's tokens."
            )
        self.check_same("an encoder-decoder's draft model")

    def _check_embeds_sources(self, part: str) -> None:
        """Check that the draft model's encoder has all tokens that its tokenizer writes.

        Raises:
            CompatibilityError: it has fewer.
        """
        own, tokenizer = self._draft.source_network, self._tokenizers[1]
        if own is None or own.num_bins is not None or tokenizer is None:
            return
        highest = max(tokenizer.get_vocab().values(), default=0)
        theirs = self._target.source_network
        assert theirs is not None, "the strategy has checked this"
        if own.source_vocab_size <= min(highest, theirs.source_vocab_size - 1):
            raise CompatibilityError(
                f"{part}: its encoder has {own.source_vocab_size} tokens, and its tokenizer has "
                f"token {highest}: the folder does not fit together; use another draft model."
            )

    def overlap(self, way: Way) -> VocabularyOverlap | None:
        """The comparison to report to users; None if a tokenizer is missing.

        Args:
            way: how the draft model drafts.
        """
        if None in self._tokenizers:
            return None
        shared = min(self._num_tokens) if self.same else self._num_shared
        return VocabularyOverlap(way, shared, *self._num_tokens)

    # Drafters for the three ways

    def same_model(self) -> OwnModel:
        """A scorer for way "same": logits are cut or padded to the target's width."""
        partial = self._draft.vocab_size < self._target.vocab_size
        return OwnModel(resized(self._draft, self._target.vocab_size), partial=partial)

    def translated_model(self) -> TranslatedModel:
        """A scorer for way "intersection": it drafts only tokens that both models have."""
        return TranslatedModel(self._draft, self.translator, self._to_draft)

    def text_drafter(self) -> TextDrafter:
        """A drafter for way "text": the draft model writes, the target's tokenizer splits."""
        target, draft = self.scripts
        splitter = Splitter(target, self._texts)
        return TextDrafter(self._draft, draft, self.translator, splitter, self._target.vocab_size)

    @cached_property
    def scripts(self) -> tuple[Script, Script]:
        """The conversions between tokens and text, of the target and of the draft model."""
        target, draft = self._tokenizers
        assert target is not None
        assert draft is not None
        return Script(target), Script(draft)

    @cached_property
    def translator(self) -> Translator:
        """Converts the target's tokens to the draft model's ids."""
        return Translator(*self.scripts, self._to_draft, self._texts)

    # Inside

    @property
    def _sizes(self) -> str:
        (own, read), (theirs, their_read) = _sizes_of(self._draft), _sizes_of(self._target)
        if own != theirs:
            return (
                f"the draft model has a vocabulary of {own} tokens and the target one of {theirs}"
            )
        return f"the draft model reads sources of {read} tokens and the target of {their_read}"

    def _check_tokenizers(self) -> None:
        target, draft = self._tokenizers
        if target is None or draft is None:
            missing = "LLM(tokenizer=...)" if target is None else "draft_tokenizer=..."
            raise CompatibilityError(
                f"{self._sizes}; to translate between them, both tokenizers are needed: "
                f"give {missing}, or use a draft model with the target's vocabulary."
            )

    @property
    def _num_tokens(self) -> tuple[int, int]:
        ours, theirs = (len(script.tokenizer.get_vocab()) for script in self.scripts)
        return min(ours, self._target.vocab_size), min(theirs, self._draft.vocab_size)

    @cached_property
    def _num_shared(self) -> int:
        return sum(token >= 0 for token in self._to_draft)

    @cached_property
    def _texts(self) -> list[str]:
        """[V] the text of each of the target's tokens inside a text."""
        return self.scripts[0].pieces(range(self._target.vocab_size))

    @cached_property
    def _to_draft(self) -> list[int]:
        """[V] the draft model's id of each of the target's tokens; -1 if it lacks the token.

        A token is shared if both vocabularies have it under the same name and decode it to the same
        text. An added token must be an added token in both, and special in both or in neither.
        """
        ours, theirs = (script.tokenizer.get_vocab() for script in self.scripts)
        names = [
            name
            for name, index in ours.items()
            if index < self._target.vocab_size
            and theirs.get(name, self._draft.vocab_size) < self._draft.vocab_size
        ]
        texts = self.scripts[1].pieces([theirs[name] for name in names])
        added, added_theirs = (_added(script.tokenizer) for script in self.scripts)
        to_draft = [-1] * self._target.vocab_size
        for name, text in zip(names, texts, strict=True):
            index = ours[name]
            if self._texts[index] == text and added.get(name) == added_theirs.get(name):
                to_draft[index] = theirs[name]
        return to_draft


def _sizes_of(model: Target) -> tuple[int, int]:
    """How many tokens a model writes, and how many an encoder reads."""
    network = model.source_network
    return model.vocab_size, 0 if network is None else network.source_vocab_size


def _tokens_of(tokenizer: PreTrainedTokenizerBase) -> tuple[dict[str, int], dict[str, int] | None]:
    """Its tokens; Marian's may have other ones for outputs."""
    outputs = getattr(tokenizer, "get_tgt_vocab", None)
    return tokenizer.get_vocab(), None if outputs is None else outputs()


def _added(tokenizer: PreTrainedTokenizerBase) -> dict[str, bool]:
    """The added tokens of a tokenizer, and for each whether it is special."""
    return {token.content: token.special for token in tokenizer.added_tokens_decoder.values()}
