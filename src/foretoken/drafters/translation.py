"""The committed tokens as a model with another tokenizer reads them.

A text is translated piece by piece: a token that both vocabularies share becomes the same token,
and a stretch of others is turned into text and split anew. Where a piece ends depends only on the
tokens before its end, so that the translation of a text is one and the same however many steps it
came in, and a step costs the translation of the last piece. This file does not know about models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from foretoken.core.common_prefix import common_prefix
from foretoken.request import Request

__all__ = ["INCOMPLETE", "Script", "Translator"]

INCOMPLETE = "\ufffd"
"""What tokenizers show for bytes that are no whole character."""

LONGEST_PIECE = 32
"""Tokens after which a piece may end inside a word: scripts without spaces have long ones."""


class Script:
    """One tokenizer's tokens as text, inside a text as well as at its beginning.

    Many tokenizers put a space before a text, or take one off it. What stands inside a text is
    therefore read and written behind an anchor, which is cut off again.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self._anchor: list[int] = []
        for text in ("\n", "."):  # some tokenizers have no tokens for white space
            self._anchor = self._anchor or self.encode(text)
        self._anchor_text = self.decode(self._anchor)

    def encode(self, text: str) -> list[int]:
        """Tokens of a text from its beginning, without special ones around it."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def encode_inside(self, text: str) -> list[int]:
        """Tokens of a text that follows another one."""
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
        """Text of tokens that follow others, special ones left out."""
        text = self.decode([*self._anchor, *ids], skip_special_tokens=True)
        if text.startswith(self._anchor_text):
            return text[len(self._anchor_text) :]
        return self.decode(ids, skip_special_tokens=True)

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The text of each of these tokens by itself, inside a text."""
        batch = [[*self._anchor, token] for token in ids]
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None:
            texts = [self.decode(tokens) for tokens in batch]
        else:  # a hundred times as fast
            texts = backend.decode_batch(batch, skip_special_tokens=False)
        size = len(self._anchor_text)
        return [
            text[size:] if text.startswith(self._anchor_text) else self.decode([token])
            for token, text in zip(ids, texts, strict=True)
        ]

    def opening(self) -> list[int]:
        """What the tokenizer puts before every text: its beginning-of-sequence token, or none."""
        bos = self.tokenizer.bos_token_id
        ids: list[int] = self.tokenizer.encode("")
        return ids[:1] if bos is not None and ids[:1] == [bos] else []


@dataclass
class _Translation:
    """One request's tokens and what they became."""

    tokens: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    pieces: list[tuple[int, int]] = field(default_factory=list)
    """Where each piece begins, in `tokens` and in `ids`."""


class Translator:
    """Translates requests' committed tokens; keeps what it has translated until `release`.

    Args:
        target: the target's tokenizer.
        draft: the draft model's tokenizer.
        to_draft: [V] the draft model's id of each of the target's tokens; -1 where it has none.
        texts: [V] the text of each of the target's tokens inside a text.
    """

    def __init__(
        self, target: Script, draft: Script, to_draft: Sequence[int], texts: Sequence[str]
    ) -> None:
        self._target = target
        self._draft = draft
        self._to_draft = to_draft
        self._whole = [INCOMPLETE not in text for text in texts]
        self._starts_word = [text[:1] == " " and not text[:2].isspace() for text in texts]
        self._opening = draft.opening()
        self._translations: dict[int, _Translation] = {}

    def translate(self, request: Request) -> list[int]:
        """The committed tokens in the draft model's ids; what is no whole character is left out."""
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
        """Translate what follows the agreed tokens, and the piece that they end in."""
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
        """The draft model's own opening, unless the text brings it along."""
        return [] if [self._to_draft[first]] == self._opening else list(self._opening)

    def _end(self, tokens: Sequence[int], start: int) -> int:
        """Where the piece that begins here ends."""
        end = start + 1
        if self._is_direct(tokens[start]):
            return end
        while end < len(tokens) and not self._begins_piece(tokens[end], end - start):
            end += 1
        return end

    def _begins_piece(self, token: int, length: int) -> bool:
        """Whether a piece of this length ends before this token."""
        if self._is_direct(token) or self._starts_word[token]:
            return True
        return length >= LONGEST_PIECE and self._whole[token]

    def _is_direct(self, token: int) -> bool:
        # Parts of characters are translated with their neighbours, which the draft model may lack.
        return self._to_draft[token] >= 0 and self._whole[token]

    def _translated(self, tokens: Sequence[int], *, inside: bool) -> list[int]:
        ids = [self._to_draft[token] for token in tokens]
        if min(ids) >= 0:
            return ids
        if inside:
            text = self._target.decode_inside(tokens)
            return self._draft.encode_inside(text.rstrip(INCOMPLETE))
        text = self._target.decode(tokens, skip_special_tokens=True)
        return self._draft.encode(text.rstrip(INCOMPLETE))
