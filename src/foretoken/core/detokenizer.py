"""Text as tokens are committed: incremental, and aware of stop strings across token borders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol
from weakref import WeakKeyDictionary

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

__all__ = ["Detokenizer"]

_INCOMPLETE = "\ufffd"

Pieces = dict[int, str]
_PIECES: WeakKeyDictionary[PreTrainedTokenizerBase, dict[bool, Pieces]] = WeakKeyDictionary()
"""Text of single tokens, by tokenizer and whether special ones are skipped: filled as they come."""


def _pieces_of(tokenizer: PreTrainedTokenizerBase | None, skip_special_tokens: bool) -> Pieces:
    if tokenizer is None:
        return {}
    return _PIECES.setdefault(tokenizer, {}).setdefault(skip_special_tokens, {})


class Decode(Protocol):
    """Turns tokens into text."""

    def __call__(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        """The text."""
        ...


def _decoder(tokenizer: PreTrainedTokenizerBase) -> Decode:
    """The tokenizer's `decode` without cleaning up: every token goes through it."""
    kind = type(tokenizer)
    wrapped = kind.decode, getattr(kind, "_decode", None)
    if wrapped == (PreTrainedTokenizerFast.decode, PreTrainedTokenizerFast._decode):
        # What is around it takes several times as long as itself, and does nothing here.
        decode: Decode = tokenizer.backend_tokenizer.decode
        return decode

    def as_it_is(token_ids: list[int], *, skip_special_tokens: bool) -> str:
        text = tokenizer.decode(token_ids, skip_special_tokens, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    return as_it_is


class Detokenizer:
    """Turns the tokens of one output into text, piece by piece.

    A piece is held back while it ends in an unfinished character. Text that may be the beginning
    of a stop string is held back too, so that what has been given out is never taken back.

    Args:
        tokenizer: None gives empty text.
        stop: stop strings.
        include_stop: whether a stop string stays in the text.
        skip_special_tokens: whether special tokens are left out of the text.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        stop: Sequence[str] = (),
        *,
        include_stop: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._decode_ids = None if tokenizer is None else _decoder(tokenizer)
        self._stop = tuple(stop)
        self._include_stop = include_stop
        self._skip_special_tokens = skip_special_tokens
        self._token_ids: list[int] = []
        self._start = 0  # tokens before this one no longer influence what follows
        self._read = 0  # tokens before this one have been turned into text
        self._before = ""  # the tokens in between, decoded
        self._pieces = _pieces_of(tokenizer, skip_special_tokens)
        self._text = ""  # everything decoded so far
        self._given = 0  # how much of it has been given out
        self._searched = 0  # stop strings are looked for from here on
        self.stopped_at: str | None = None

    @property
    def text(self) -> str:
        """All text so far, held-back parts included."""
        return self._text

    def add(self, token: int, *, may_stop: bool = True) -> str:
        """Append a token; the text that is now certain.

        Sets `stopped_at` if a stop string is met, unless the output may not end yet.
        """
        if self._tokenizer is None:
            return ""
        self._token_ids.append(token)
        before = self._before
        after = self._decode(self._token_ids[self._start :])
        if not after.endswith(_INCOMPLETE):
            self._extend(after[len(before) :], may_stop)
            self._start, self._read = self._read, len(self._token_ids)
            self._before = self._piece(self._token_ids[self._start :])
        return self._give(self._held_back())

    def finish(self) -> str:
        """The rest of the text, unfinished characters included."""
        if self.stopped_at is None and self._tokenizer is not None:
            before = self._before
            # The output ends for another reason, so a stop string does not count any more.
            self._extend(self._decode(self._token_ids[self._start :])[len(before) :], False)
            self._start = self._read = len(self._token_ids)
            self._before = ""
        return self._give(0)

    def _piece(self, token_ids: Sequence[int]) -> str:
        """Decoded, from memory where it is one token, as it is nearly always."""
        if len(token_ids) != 1:
            return self._decode(token_ids)
        token = token_ids[0]
        if token not in self._pieces:
            self._pieces[token] = self._decode(token_ids)
        return self._pieces[token]

    def _decode(self, token_ids: Sequence[int]) -> str:
        assert self._decode_ids is not None
        return self._decode_ids(list(token_ids), skip_special_tokens=self._skip_special_tokens)

    def _extend(self, piece: str, may_stop: bool) -> None:
        fresh = len(self._text)
        self._text += piece
        if not may_stop:
            self._searched = len(self._text)
            return
        hits = []
        for stop in self._stop:
            position = self._text.find(stop, max(self._searched, fresh - len(stop) + 1))
            if position >= 0:
                hits.append((position, stop))
        if hits:
            position, self.stopped_at = min(hits, key=lambda hit: (hit[0], -len(hit[1])))
            end = position + len(self.stopped_at) if self._include_stop else position
            self._text = self._text[:end]

    def _held_back(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        if self.stopped_at is not None:
            return 0
        longest = 0
        for stop in self._stop:
            for size in range(min(len(stop) - 1, len(self._text)), longest, -1):
                if self._text.endswith(stop[:size]):
                    longest = size
                    break
        return longest

    def _give(self, held_back: int) -> str:
        end = max(self._given, len(self._text) - held_back)
        piece = self._text[self._given : end]
        self._given = end
        return piece
