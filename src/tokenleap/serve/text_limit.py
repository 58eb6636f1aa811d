"""`TextLimit`: refuses texts that are too long for the context before they are split into tokens.

A token of a byte-level tokenizer stands for so many bytes of the text at most as its longest token
has. Tokenizers that may leave out or merge parts of a text (unknown words, runs of spaces) have no
such bound. A text that could fit by its bytes, but is long, is counted in pieces, and the count
ends where it is clear.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import models
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerBase

from tokenleap.engine.prompts import tokens_of
from tokenleap.errors import PromptError

_COMPOSED = 4
"""Most bytes that become one by the normal form NFC: composed characters have at most four parts,
and no part is longer than three bytes."""

_KEEPING = frozenset({"ByteLevel", "Digits", "Metaspace"})
"""Pre-tokenizers that leave out no part of a text; and `Split`, unless it removes what it finds."""


_LONG = 4
"""Characters per token of the context; texts that have more are counted."""
_PIECE = 1 << 12
"""Characters that are split into tokens at a time for counting."""
_MARGIN = 2
"""A text has at least half as many tokens as its pieces together, which cut a few words in two."""


@dataclass(frozen=True)
class TextLimit:
    """The longest text that can fit into a context.

    Args:
        bytes_per_token: most bytes that a token stands for; None if there is no bound.
        tokenizer: counts the tokens of long texts; None does not count.
        times: contexts that a text may fill, where it need not fit into one.
    """

    max_tokens: int
    bytes_per_token: int | None
    tokenizer: PreTrainedTokenizerBase | None = None
    times: int = 1

    @staticmethod
    def of(tokenizer: PreTrainedTokenizerBase | None, max_tokens: int) -> TextLimit:
        """That of a tokenizer; without one there is no bound."""
        bound = None if tokenizer is None else most_bytes_per_token(tokenizer)
        return TextLimit(max_tokens, bound, tokenizer)

    def check(self, text: str, name: str = "prompt") -> None:
        """Refuse a text that has too many tokens in any case."""
        most = self.times * self.max_tokens
        if self.bytes_per_token is not None and len(text) >= most:
            size = len(text.encode(errors="replace"))
            if size > most * self.bytes_per_token:
                tokens = -(-size // self.bytes_per_token)
                raise self._too_long(f"the {name} has {size} bytes, at least {tokens} tokens")
        if self.tokenizer is None or len(text) <= _LONG * most:
            return
        found = 0
        for begin in range(0, len(text), _PIECE):
            piece = text[begin : begin + _PIECE].encode(errors="replace").decode()
            # One less: an unknown word of any length is one token, and its pieces are several.
            found += max(0, _count(self.tokenizer, piece) - 1)
            if found > _MARGIN * most:
                raise self._too_long(f"the {name} has more than {found // _MARGIN} tokens")

    def _too_long(self, what: str) -> PromptError:
        context = f"the context of {self.max_tokens}"
        if self.times > 1:
            return PromptError(f"{what}, with room for {self.times} times {context}: shorten it.")
        return PromptError(f"{what}, which leaves no room in {context}: shorten it.")


def _count(tokenizer: PreTrainedTokenizerBase, text: str) -> int:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or backend.truncation:
        return len(tokens_of(tokenizer, text))
    return len(backend.encode_batch_fast([text], add_special_tokens=False)[0])


def most_bytes_per_token(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Most bytes of a text that one token stands for; None if no bound is known."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or not isinstance(backend.model, models.BPE) or backend.truncation:
        return None
    added = backend.get_added_tokens_decoder().values()
    factor = _shrinks_by(_state(backend.normalizer))
    parts = list(_parts(_state(backend.pre_tokenizer)))
    if factor is None or not all(map(_keeps, parts)) or any(t.lstrip or t.rstrip for t in added):
        return None
    vocabulary = backend.get_vocab(with_added_tokens=False)
    if any(part["type"] == "ByteLevel" for part in parts):
        whole = all(symbol in vocabulary for symbol in ByteLevel.alphabet())
        longest = max(map(len, vocabulary))  # a character for each byte
    else:
        bytes_ = (f"<0x{value:02X}>" for value in range(256))
        whole = backend.model.byte_fallback and all(each in vocabulary for each in bytes_)
        longest = max(len(token.encode()) for token in vocabulary)
    if not whole:
        return None
    return factor * max([longest, *(len(token.content.encode()) for token in added)])


def _state(part: Any) -> Mapping[str, Any] | None:
    """The description of a part of a tokenizer; None if it has no such part."""
    if part is None:
        return None
    found: Mapping[str, Any] = json.loads(part.__getstate__())
    return found


def _parts(pre_tokenizer: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    if pre_tokenizer is None:
        return
    if pre_tokenizer["type"] != "Sequence":
        yield pre_tokenizer
        return
    for each in pre_tokenizer["pretokenizers"]:
        yield from _parts(each)


def _keeps(pre_tokenizer: Mapping[str, Any]) -> bool:
    splits = pre_tokenizer["type"] == "Split" and pre_tokenizer["behavior"] != "Removed"
    return splits or pre_tokenizer["type"] in _KEEPING


def _shrinks_by(normalizer: Mapping[str, Any] | None) -> int | None:
    """Most bytes that one byte of the normalised text stands for; None if that is not known."""
    if normalizer is None or normalizer["type"] == "Prepend":
        return 1
    if normalizer["type"] == "NFC":
        return _COMPOSED
    if normalizer["type"] == "Replace":  # SentencePiece's sign for a space
        return 1 if normalizer["pattern"] == {"String": " "} and normalizer["content"] else None
    if normalizer["type"] != "Sequence":
        return None
    factor = 1
    for each in normalizer["normalizers"]:
        own = _shrinks_by(each)
        if own is None:
            return None
        factor *= own
    return factor
