"""Draft models whose tokens are not the target's.

Timor et al., "Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for
Heterogeneous Vocabularies". `TranslatedModel` is their token-level intersection: q is the draft
model's distribution on the tokens that both models have, renormalised, so that any lossless rule
stays so. Their other way, drafting text, is in `retokenise.py`; how committed tokens are read is in
`translation.py`. Vocabularies that differ only by padding behind the last token are the same.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from foretoken import models
from foretoken.core.tree import TokenTree
from foretoken.drafters.draft_model import OwnModel
from foretoken.drafters.overlap import VocabularyOverlap, Way
from foretoken.drafters.resize import resized
from foretoken.drafters.retokenise import Splitter, TextDrafter
from foretoken.drafters.translation import Script, Translator
from foretoken.errors import CompatibilityError, ConfigError
from foretoken.request import Request
from foretoken.runtime.network import PassOutput
from foretoken.runtime.target import Target

__all__ = ["DraftModel", "TranslatedModel", "Vocabularies", "resized"]


@dataclass(frozen=True)
class DraftModel:
    """A draft model as it was loaded, and its tokenizer where there is one."""

    model: Target
    tokenizer: PreTrainedTokenizerBase | None

    def with_tokenizer(self, chosen: str | Path | PreTrainedTokenizerBase | None) -> DraftModel:
        """The same with another tokenizer; None keeps what it has.

        Raises:
            ModelError: there is no such folder or alias.
            ConfigError: there is no tokenizer in it.
        """
        if chosen is None:
            return self
        if isinstance(chosen, str | Path):
            folder = os.path.expanduser(chosen)  # noqa: PTH111 - never raises
            if not os.path.isdir(folder):  # noqa: PTH112 - likewise; it may lack a model
                folder = str(models.resolve(chosen))
            tokenizer = models.load_tokenizer(Path(folder))
            if tokenizer is None:
                raise ConfigError(f"draft_tokenizer: there is no tokenizer in {chosen}.")
            chosen = tokenizer
        return replace(self, tokenizer=chosen)


class Vocabularies:
    """The tokens of a target and of a draft model, compared.

    Args:
        target: the target.
        tokenizer: the target's, or None where it has none.
        draft: the draft model.
    """

    def __init__(
        self, target: Target, tokenizer: PreTrainedTokenizerBase | None, draft: DraftModel
    ) -> None:
        self._target = target
        self._draft = draft.model
        self._tokenizers = (tokenizer, draft.tokenizer)

    @property
    def same(self) -> bool:
        """Whether the tokens are the same up to padding; without tokenizers, the sizes decide."""
        target, draft = self._tokenizers
        if target is None or draft is None:
            return self._target.vocab_size == self._draft.vocab_size
        return target is draft or target.get_vocab() == draft.get_vocab()

    def way(self, wanted: Literal["auto"] | Way) -> Way:
        """How to draft.

        Raises:
            CompatibilityError: it is not possible in the way that is wanted.
        """
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
        """Refuse other tokens than the target's.

        Raises:
            CompatibilityError: that `part`, as in "method 'cascade'", cannot work with them.
        """
        if self.same:
            return
        found = self._sizes
        if self._target.vocab_size == self._draft.vocab_size:
            found = "draft model and target have vocabularies of one size but with different tokens"
        raise CompatibilityError(
            f"{part}: {found}: use a draft model with the target's tokenizer{advice}."
        )

    def overlap(self, way: Way) -> VocabularyOverlap | None:
        """How they compare; None where a tokenizer is missing."""
        if None in self._tokenizers:
            return None
        shared = min(self._num_tokens) if self.same else self._num_shared
        return VocabularyOverlap(way, shared, *self._num_tokens)

    # What drafts

    def same_model(self) -> OwnModel:
        """The draft model, its logits cut or padded to the target's number."""
        partial = self._draft.vocab_size < self._target.vocab_size
        return OwnModel(resized(self._draft, self._target.vocab_size), partial=partial)

    def translated_model(self) -> TranslatedModel:
        """The draft model on the tokens that both have."""
        return TranslatedModel(self._draft, self.translator, self._to_draft)

    def text_drafter(self) -> TextDrafter:
        """The draft model as a writer of text."""
        target, draft = self.scripts
        splitter = Splitter(target, self._texts)
        return TextDrafter(self._draft, draft, self.translator, splitter, self._target.vocab_size)

    @cached_property
    def scripts(self) -> tuple[Script, Script]:
        """Target's and draft model's tokens as text."""
        target, draft = self._tokenizers
        assert target is not None
        assert draft is not None
        return Script(target), Script(draft)

    @cached_property
    def translator(self) -> Translator:
        """Makes the draft model's ids of the target's."""
        return Translator(*self.scripts, self._to_draft, self._texts)

    # Inside

    @property
    def _sizes(self) -> str:
        return (
            f"the draft model has a vocabulary of {self._draft.vocab_size} tokens and the target "
            f"one of {self._target.vocab_size}"
        )

    def _check_tokenizers(self) -> None:
        target, draft = self._tokenizers
        if target is None or draft is None:
            missing = "LLM(tokenizer=...)" if target is None else "draft_tokenizer=..."
            raise CompatibilityError(
                f"{self._sizes}, and without the tokenizers of both there is no way to translate: "
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
        """[V] the target's tokens as text."""
        return self.scripts[0].pieces(range(self._target.vocab_size))

    @cached_property
    def _to_draft(self) -> list[int]:
        """[V] the draft model's id of each of the target's tokens; -1 where it has none.

        A token is shared if both vocabularies have it under one name and it says the same in both;
        special and added tokens, if they are that in both.
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


class TranslatedModel(OwnModel):
    """A draft model seen through the tokens that both models have (see `Scorer`).

    It reads the committed tokens in translation. Drafted tokens are shared ones, so that they have
    ids in both vocabularies; the others have logits of minus infinity, and the sampler's
    distribution of what is left is the restricted, renormalised q.

    Args:
        model: the draft model.
        translator: makes its ids of the committed tokens.
        to_draft: [V] its id of each of the target's tokens; -1 where it has none.
    """

    def __init__(self, model: Target, translator: Translator, to_draft: Sequence[int]) -> None:
        super().__init__(model, partial=True)
        self._translator = translator
        self._to_draft = to_draft
        shared = [(token, own) for token, own in enumerate(to_draft) if own >= 0]
        self._shared, self._own = torch.tensor(shared, device=model.device).T  # [S], [S]
        self._num_pending: dict[int, int] = {}

    def seen(self, request: Request) -> Sequence[int]:
        """See `OwnModel.seen`."""
        return self._translator.translate(request)

    def room(self, request: Request) -> int:
        """None where there is nothing to read: not every token says something."""
        return super().room(request) if self.seen(request) else 0

    def pending(self, request: Request) -> list[int]:
        """Tokens of the draft model's."""
        pending = super().pending(request)
        self._num_pending[request.key] = len(pending)
        return pending

    def verify(
        self, keys: Sequence[int], trees: Sequence[TokenTree], num_computed: Sequence[int]
    ) -> list[PassOutput]:
        """One pass of the draft model; logits of the target's tokens."""
        trees = [self._read(*pair) for pair in zip(keys, trees, strict=True)]
        outputs = super().verify(keys, trees, num_computed)
        return [PassOutput(self._restricted(output.scores)) for output in outputs]

    def release(self, request: Request) -> None:
        """Free the request's row, and forget its translation."""
        super().release(request)
        self._translator.release(request)
        self._num_pending.pop(request.key, None)

    def _read(self, key: int, tree: TokenTree) -> TokenTree:
        """The same tree in the draft model's ids, which the pending tokens have already."""
        count = self._num_pending[key]
        drafted = [self._to_draft[token] for token in tree.tokens[count:]]
        assert all(token >= 0 for token in drafted), "only shared tokens are drafted"
        return TokenTree((*tree.tokens[:count], *drafted), tree.parents)

    def _restricted(self, logits: Tensor) -> Tensor:
        """Logits [n, V] of the target's tokens, from the draft model's."""
        restricted = logits.new_full((len(logits), len(self._to_draft)), -torch.inf)
        restricted[:, self._shared] = logits[:, self._own]
        return restricted


def _added(tokenizer: PreTrainedTokenizerBase) -> dict[str, bool]:
    """Tokens added to a vocabulary, and whether they are special."""
    return {token.content: token.special for token in tokenizer.added_tokens_decoder.values()}
