"""Draft models with another vocabulary than the target's.

Timor et al., "Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for
Heterogeneous Vocabularies". The registry calls `Vocabularies` to compare the two vocabularies and
to make the drafter. `TranslatedModel` is the paper's token-level intersection: q is the draft
model's distribution, restricted to the tokens that both models have and renormalised.
Lossless rules stay lossless with this q. `TextDrafter` is the paper's other method, and
`Translator` converts committed tokens to the draft model's ids. Vocabularies that differ only in
the padding after the last token count as the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from tokenleap import models
from tokenleap.control import Budget
from tokenleap.core.params import SamplingParams
from tokenleap.core.per_request import PerRequest, drop_request
from tokenleap.core.references import common_prefix
from tokenleap.core.tree import Draft, TokenTree, chain
from tokenleap.drafters.base import Drafter, VocabularyOverlap, Way
from tokenleap.drafters.model_drafter import ModelDrafter
from tokenleap.drafters.models import OwnModel, resized
from tokenleap.drafters.shapes import TreeOptions
from tokenleap.errors import CompatibilityError, ConfigError
from tokenleap.request import Request
from tokenleap.runtime.network import PassOutput
from tokenleap.runtime.target import Target

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Drafting text: the draft model writes in its own tokens, and the target's tokenizer splits it.
#
# The string-level method of Timor et al., for models with few tokens in common. `draft_model`
# uses it with `vocabulary="text"`. The draft model generates greedily, so nothing is drawn and q
# is one-hot in the target's tokens. Every rule treats such a draft like one that was looked up.


SHORTEST_TAIL = 4
"""Fewest committed tokens that are split again along with the draft. The tail then extends back to
the beginning of a word."""
LONGEST_TAIL = 32
"""Most of these tokens, if no word begins earlier."""


class Splitter:
    """Splits text that continues committed tokens into the target's tokens.

    Args:
        texts: [V] the text of each of the target's tokens inside a text.
    """

    def __init__(self, script: Script, texts: Sequence[str]) -> None:
        self._script = script
        self._starts_word = [text[:1].isspace() for text in texts]
        self._special = frozenset(script.tokenizer.all_special_ids)

    def before(self, tokens: Sequence[int]) -> str | None:
        """The text of the last committed tokens; None if they end inside a character."""
        text = self._script.decode_inside(self._tail(tokens))
        return None if text.endswith(INCOMPLETE) else text

    def split(self, tokens: Sequence[int], text: str) -> list[int]:
        """The tokens that follow the committed ones if `text` is appended to their text.

        Committed tail and new text are split together. This may split the tail differently from its
        committed tokens. The tokens that begin at the end of the committed text are then the
        result. If a token crosses that border, the new text is split alone.
        """
        tail, before = self._tail(tokens), self.before(tokens)
        if not text or before is None:
            return []
        together = self._script.encode_inside(before + text)
        if together[: len(tail)] == tail:
            return together[len(tail) :]
        for count in range(len(together)):
            if self._script.decode_inside(together[:count]) == before:
                return together[count:]
        return self._script.encode_inside(text)

    def _tail(self, tokens: Sequence[int]) -> list[int]:
        """The last tokens, from a point where splitting no longer depends on earlier tokens."""
        start = len(tokens)
        while start > 0 and len(tokens) - start < LONGEST_TAIL:
            if tokens[start - 1] in self._special:
                break
            start -= 1
            if len(tokens) - start >= SHORTEST_TAIL and self._starts_word[tokens[start]]:
                break
        return list(tokens[start:])


class TextDrafter(Drafter):
    """Chains of the target's tokens from a draft model with other tokens."""

    def __init__(
        self,
        model: Target,
        script: Script,
        translator: Translator,
        splitter: Splitter,
        vocab_size: int,
    ) -> None:
        self._model = model
        self._script = script
        self._translator = translator
        self._splitter = splitter
        self._vocab_size = vocab_size
        self._special = frozenset(script.tokenizer.all_special_ids)
        self._writer = ModelDrafter(OwnModel(model), TreeOptions(), coupled=False)
        self._shadows = PerRequest[Request]()  # requests over the translated tokens

    def propose(self, batch: Sequence[Request], budgets: Sequence[Budget]) -> list[Draft]:
        shadows = {r.key: shadow for r in batch if (shadow := self._shadow(r)) is not None}
        written = self._writer.propose(
            list(shadows.values()),
            [budget for r, budget in zip(batch, budgets, strict=True) if r.key in shadows],
        )
        texts = dict(zip(shadows, map(self._text, written), strict=True))
        return [
            self._draft(request, texts.get(request.key, ""), budget.chain)
            for request, budget in zip(batch, budgets, strict=True)
        ]

    def rewind(self, request: Request) -> None:
        """Nothing to do: `_shadow` translates the committed tokens in every step."""

    def release(self, request: Request) -> None:
        self._translator.release(request)
        shadow = self._shadows.pop(request.key, None)
        if shadow is not None:
            shadow.fail_with(request)
            self._writer.release(shadow)

    def _shadow(self, request: Request) -> Request | None:
        """A greedy request over the translated tokens; None if there is no text to continue."""
        tokens = self._translator.translate(request)
        if not tokens or self._splitter.before(request.token_ids) is None:
            return None
        shadow = self._shadows.get(request.key)
        if shadow is None:
            shadow = self._shadows[request.key] = Request(
                tokens,
                SamplingParams(temperature=0, max_tokens=None),
                vocab_size=self._model.vocab_size,
                max_model_len=self._model.max_model_len,
            )
        shadow.token_ids = list(tokens)
        return shadow

    def _text(self, written: Draft) -> str:
        """The written text up to a special token, without an unfinished character."""
        tokens = takewhile(lambda token: token not in self._special, written.tree.tokens[1:])
        return self._script.decode_inside(list(tokens)).rstrip(INCOMPLETE)

    def _draft(self, request: Request, text: str, length: int) -> Draft:
        split = self._splitter.split(request.token_ids, text)
        in_vocabulary = takewhile(lambda token: token < self._vocab_size, split)
        return Draft.deterministic(chain([request.root, *list(in_vocabulary)[:length]]))


class TranslatedModel(OwnModel):
    """A draft model restricted to the tokens that both models have (`vocabulary="intersection"`).

    It reads the committed tokens in translation. It drafts only shared tokens, which have ids in
    both vocabularies. All other tokens have logits of minus infinity. The sampler's distribution
    over the remaining tokens is the restricted and renormalised q.

    Args:
        to_draft: [V] the draft model's id of each of the target's tokens; -1 if it lacks the token.
    """

    grows = False  # the draft model's most probable tokens may not be shared
    translates = True

    def __init__(self, model: Target, translator: Translator, to_draft: Sequence[int]) -> None:
        super().__init__(model, partial=True)
        self._translator = translator
        self._to_draft = to_draft
        shared = [(token, own) for token, own in enumerate(to_draft) if own >= 0]
        # [S] the S shared tokens, in the target's ids and in the draft model's
        self._shared, self._shared_own = torch.tensor(shared, device=model.device).T
        self._num_pending = PerRequest[int]()  # tokens of the last `pending`

    def seen(self, request: Request) -> Sequence[int]:
        return self._translator.translate(request)

    def room(self, request: Request) -> int:
        """See `OwnModel.room`; 0 if the translation is empty."""
        return super().room(request) if self.seen(request) else 0

    def pending(self, request: Request) -> list[int]:
        """See `OwnModel.pending`; in the draft model's ids."""
        pending = super().pending(request)
        self._num_pending[request.key] = len(pending)
        return pending

    def verify(
        self, keys: Sequence[int], trees: Sequence[TokenTree], num_computed: Sequence[int]
    ) -> list[PassOutput]:
        """One pass of the draft model; the logits [n, V] are those of the target's tokens."""
        trees = [self._translated(*pair) for pair in zip(keys, trees, strict=True)]
        outputs = super().verify(keys, trees, num_computed)
        return [PassOutput(self._restricted(output.scores)) for output in outputs]

    def release(self, request: Request) -> None:
        super().release(request)
        self._translator.release(request)

    def _translated(self, key: int, tree: TokenTree) -> TokenTree:
        """The tree in the draft model's ids; its pending tokens are in these ids already."""
        count = self._num_pending[key]
        drafted = [self._to_draft[token] for token in tree.tokens[count:]]
        assert all(token >= 0 for token in drafted), "only shared tokens are drafted"
        return TokenTree((*tree.tokens[:count], *drafted), tree.parents)

    def _restricted(self, logits: Tensor) -> Tensor:
        """Logits [n, V] of the target's tokens, from the draft model's logits [n, own V]."""
        restricted = logits.new_full((len(logits), len(self._to_draft)), -torch.inf)
        restricted[:, self._shared] = logits[:, self._shared_own]
        return restricted


# Translation of committed tokens to the ids of a draft model with another tokenizer.
#
# A text is translated piece by piece. A token that both vocabularies share becomes the draft
# model's id of that token. A sequence of other tokens is converted to text, which the draft model's
# tokenizer splits. The end of a piece depends only on the tokens up to it. The translation of a
# text is therefore the same for any number of steps, and a step costs only the translation of the
# last piece.


INCOMPLETE = "\ufffd"
"""The replacement character: tokenizers decode the bytes of an unfinished character to it."""

LONGEST_PIECE = 32
"""Tokens after which a piece may end inside a word, for scripts without spaces between words."""


class Script:
    """Converts between one tokenizer's tokens and text, at the beginning of a text and inside it.

    Many tokenizers add a space at the beginning of a text, or remove one. To encode or decode a
    piece inside a text, an anchor (a newline or a full stop) is put before it, and removed from the
    result.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self._anchor: list[int] = []
        for text in ("\n", "."):  # some tokenizers have no token for a newline
            self._anchor = self._anchor or self.encode(text)
        self._anchor_text = self.decode(self._anchor)

    def encode(self, text: str) -> list[int]:
        """Tokens of a text from its beginning, without added special tokens."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def encode_inside(self, text: str) -> list[int]:
        """Tokens of a piece that follows other text."""
        ids = self.encode(self._anchor_text + text)
        size = len(self._anchor)
        return ids[size:] if ids[:size] == self._anchor else self.encode(text)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of tokens from its beginning."""
        return str(
            self.tokenizer.decode(
                list(ids),
                skip_special_tokens=skip_special_tokens,
                clean_up_tokenization_spaces=False,
            )
        )

    def decode_inside(self, ids: Sequence[int]) -> str:
        """Text of tokens that follow other tokens, without special tokens."""
        text = self.decode([*self._anchor, *ids], skip_special_tokens=True)
        if text.startswith(self._anchor_text):
            return text[len(self._anchor_text) :]
        return self.decode(ids, skip_special_tokens=True)

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The text of each of these tokens, inside a text."""
        batch = [[*self._anchor, token] for token in ids]
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None:
            texts = [self.decode(tokens) for tokens in batch]
        else:  # a hundred times faster
            texts = backend.decode_batch(batch, skip_special_tokens=False)
        size = len(self._anchor_text)
        return [
            text[size:] if text.startswith(self._anchor_text) else self.decode([token])
            for token, text in zip(ids, texts, strict=True)
        ]

    def opening(self) -> list[int]:
        """The beginning-of-sequence token if the tokenizer puts it before every text, or []."""
        bos = self.tokenizer.bos_token_id
        ids: list[int] = self.tokenizer.encode("")
        return ids[:1] if bos is not None and ids[:1] == [bos] else []


@dataclass
class _Translation:
    """The translation of one request's committed tokens."""

    tokens: list[int] = field(default_factory=list)
    """The committed tokens, in the target's ids."""
    ids: list[int] = field(default_factory=list)
    """Their translation, in the draft model's ids."""
    pieces: list[tuple[int, int]] = field(default_factory=list)
    """The beginning of each piece, in `tokens` and in `ids`."""


class Translator:
    """Translates the committed tokens of requests, and keeps the translations until `release`.

    Args:
        to_draft: [V] the draft model's id of each of the target's tokens; -1 if it lacks the token.
        texts: [V] the text of each of the target's tokens inside a text.
    """

    def __init__(
        self, target: Script, draft: Script, to_draft: Sequence[int], texts: Sequence[str]
    ) -> None:
        self._target = target
        self._draft = draft
        self._to_draft = to_draft
        self._whole_characters = [INCOMPLETE not in text for text in texts]
        self._starts_word = [text[:1] == " " and not text[:2].isspace() for text in texts]
        self._opening = draft.opening()
        self._translations = PerRequest(_Translation)

    def translate(self, request: Request) -> list[int]:
        """The committed tokens in the draft model's ids, without an unfinished last character."""
        state = self._translations[request.key]
        tokens = request.token_ids
        agreed = common_prefix(state.tokens, tokens)
        if agreed < len(tokens) or agreed < len(state.tokens):
            self._redo(state, tokens, agreed)
        return state.ids

    def release(self, request: Request) -> None:
        drop_request(self, request.key)

    def _redo(self, state: _Translation, tokens: Sequence[int], agreed: int) -> None:
        """Translate again from the piece in which the first `agreed` tokens end."""
        start, size = 0, 0
        while state.pieces:
            start, size = state.pieces.pop()
            if start < agreed:
                break
        del state.ids[size:]
        if start == 0:
            state.ids = self._begin(tokens[0])
        state.tokens = list(tokens)
        while start < len(tokens):
            end = self._end(tokens, start)
            state.pieces.append((start, len(state.ids)))
            state.ids += self._translated(tokens[start:end], inside=start > 0)
            start = end

    def _begin(self, first: int) -> list[int]:
        """The draft model's beginning-of-sequence token, unless the text begins with it."""
        return [] if [self._to_draft[first]] == self._opening else list(self._opening)

    def _end(self, tokens: Sequence[int], start: int) -> int:
        """The end of the piece that begins at `start`."""
        end = start + 1
        if self._is_direct(tokens[start]):
            return end
        while end < len(tokens) and not self._begins_piece(tokens[end], end - start):
            end += 1
        return end

    def _begins_piece(self, token: int, length: int) -> bool:
        """Whether a piece of `length` tokens ends before `token`."""
        if self._is_direct(token) or self._starts_word[token]:
            return True
        return length >= LONGEST_PIECE and self._whole_characters[token]

    def _is_direct(self, token: int) -> bool:
        """Whether a token is a piece of its own, translated to one id."""
        # A token with part of a character is translated together with the rest of the character,
        # because the draft model may lack the tokens of the rest.
        return self._to_draft[token] >= 0 and self._whole_characters[token]

    def _translated(self, tokens: Sequence[int], *, inside: bool) -> list[int]:
        """The draft model's ids of one piece, which stands inside or at the start of the text."""
        ids = [self._to_draft[token] for token in tokens]
        if min(ids) >= 0:
            return ids
        if inside:
            text = self._target.decode_inside(tokens)
            return self._draft.encode_inside(text.rstrip(INCOMPLETE))
        text = self._target.decode(tokens, skip_special_tokens=True)
        return self._draft.encode(text.rstrip(INCOMPLETE))


@dataclass(frozen=True)
class DraftModel:
    """A loaded draft model and its tokenizer.

    Args:
        source: what it can be loaded from again: a name, or a module; None if that is not known.
    """

    model: Target
    tokenizer: PreTrainedTokenizerBase | None
    source: str | Path | PreTrainedModel | None = None

    def with_tokenizer(self, chosen: str | Path | PreTrainedTokenizerBase | None) -> DraftModel:
        if chosen is None:
            return self
        if isinstance(chosen, str | Path):
            tokenizer = models.find_tokenizer(chosen)
            if tokenizer is None:
                raise ConfigError(f"draft_tokenizer: there is no tokenizer in {chosen}.")
            chosen = tokenizer
        return replace(self, tokenizer=chosen)


class Vocabularies:
    """Compares the vocabularies of a target and a draft model, and makes the drafter for them."""

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
        if wanted not in ("auto", "same"):
            raise CompatibilityError(
                f"vocabulary '{wanted}' is for decoder-only models: an encoder-decoder's draft "
                "model reads the target's source, so it must have the target's tokens."
            )
        self.check_same("an encoder-decoder's draft model")

    def _check_embeds_sources(self, part: str) -> None:
        """Check that the draft model's encoder has all tokens that its tokenizer writes."""
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
        """The comparison to report to users; None if a tokenizer is missing."""
        if None in self._tokenizers:
            return None
        shared = min(self._num_tokens) if self.same else self._num_shared
        return VocabularyOverlap(way, shared, *self._num_tokens)

    # Drafters for the three ways

    def same_model(self) -> OwnModel:
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
        target, draft = self._tokenizers
        assert target is not None
        assert draft is not None
        return Script(target), Script(draft)

    @cached_property
    def translator(self) -> Translator:
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
