"""Translation of committed tokens to the ids of a draft model with another tokenizer.

`translated_model.TranslatedModel` and `retokenise.TextDrafter` use it.

A text is translated piece by piece. A token that both vocabularies share becomes the draft model's
id of that token. A sequence of other tokens is converted to text, which the draft model's tokenizer
splits. The end of a piece depends only on the tokens up to it. The translation of a text is
therefore the same for any number of steps, and a step costs only the translation of the last piece.
This file does not know models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from tokenleap.core.common_prefix import common_prefix
from tokenleap.request import Request

__all__ = ["INCOMPLETE", "Script", "Translator"]

INCOMPLETE = "\ufffd"
"""The replacement character: tokenizers decode the bytes of an unfinished character to it."""

LONGEST_PIECE = 32
"""Tokens after which a piece may end inside a word, for scripts without spaces between words."""


class Script:
    """Converts between one tokenizer's tokens and text, at the beginning of a text and inside it.

    Many tokenizers add a space at the beginning of a text, or remove one. To encode or decode a
    piece inside a text, an anchor (a newline or a full stop) is put before it, and removed from the
    result.

    Args:
        tokenizer: the tokenizer.
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
        target: converts between the target's tokens and text.
        draft: converts between the draft model's tokens and text.
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
        self._translations: dict[int, _Translation] = {}

    def translate(self, request: Request) -> list[int]:
        """The committed tokens in the draft model's ids, without an unfinished last character."""
        state = self._translations.setdefault(request.key, _Translation())
        tokens = request.token_ids
        agreed = common_prefix(state.tokens, tokens)
        if agreed < len(tokens) or agreed < len(state.tokens):
            self._redo(state, tokens, agreed)
        return state.ids

    def release(self, request: Request) -> None:
        """Forget a request."""
        self._translations.pop(request.key, None)

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
