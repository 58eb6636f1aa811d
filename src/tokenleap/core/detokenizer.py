"""Incremental detokenization: the text of an output while its tokens are committed.

Each `Request` owns one `Detokenizer`. It also finds stop strings, including those that cross token
borders.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Protocol, TypeAlias
from weakref import WeakKeyDictionary

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

_INCOMPLETE = "\ufffd"

_LONG_UNREAD = 16
"""Of more tokens without a whole character, decoding is tried again when they are 1/16 more: else
the time would grow with their square."""

_Texts: TypeAlias = dict[int, str]
_PIECES: WeakKeyDictionary[PreTrainedTokenizerBase, dict[bool, _Texts]] = WeakKeyDictionary()
"""Cache of the text of single tokens, by tokenizer and by whether special tokens are skipped."""


def _pieces_of(tokenizer: PreTrainedTokenizerBase | None, skip_special_tokens: bool) -> _Texts:
    if tokenizer is None:
        return {}
    return _PIECES.setdefault(tokenizer, {}).setdefault(skip_special_tokens, {})


class Decode(Protocol):
    def __call__(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...


def _decoder(tokenizer: PreTrainedTokenizerBase) -> Decode:
    """The tokenizer's `decode` without `clean_up_tokenization_spaces`, by its fastest path."""
    kind = type(tokenizer)
    wrapped = kind.decode, getattr(kind, "_decode", None)
    if wrapped == (PreTrainedTokenizerFast.decode, PreTrainedTokenizerFast._decode):
        # The Python wrappers take several times as long as the decoder, and change nothing here.
        decode: Decode = tokenizer.backend_tokenizer.decode
        return decode

    def without_clean_up(token_ids: list[int], *, skip_special_tokens: bool) -> str:
        text = tokenizer.decode(token_ids, skip_special_tokens, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    return without_clean_up


class _Beginning:
    """How much of a stop string a text ends in, in linear time (Knuth, Morris and Pratt, 1977)."""

    def __init__(self, stop: str) -> None:
        self._stop, self._shorter = stop, _borders(stop)
        self._size = 0  # characters of the longest prefix that the text ends in

    def after(self, text: str) -> int:
        """Length of the longest prefix but the whole that the text ends in, with this added."""
        if not self._size and self._stop[0] not in text:
            return 0
        for char in text:
            size = self._shorter[-1] if self._size == len(self._stop) else self._size
            self._size = _longer(self._stop, self._shorter, size, char)
        return self._shorter[-1] if self._size == len(self._stop) else self._size


@lru_cache(maxsize=256)  # a request's outputs share them
def _borders(stop: str) -> array[int]:
    """For each prefix, the length of the longest shorter one that it ends in."""
    found = array("I", [0])
    for char in stop[1:]:
        found.append(_longer(stop, found, found[-1], char))
    return found


def _longer(stop: str, shorter: Sequence[int], size: int, char: str) -> int:
    while size and stop[size] != char:
        size = shorter[size - 1]
    return size + (stop[size] == char)


class Pieces:
    """The text that each token adds inside a text.

    Some tokenizers, such as Llama's, leave out the space at the beginning of a text. Here tokens
    have it. The text is empty without a tokenizer, and of tokens that it cannot decode.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._tokenizer = tokenizer
        self.of = cache(self._piece)

    def all_of(self, tokens: Sequence[int]) -> list[str]:
        return [self.of(token) for token in tokens]

    def _piece(self, token: int) -> str:
        if self._tokenizer is None:
            return ""
        try:
            alone, twice = (
                str(self._tokenizer.decode([token] * times, clean_up_tokenization_spaces=False))
                for times in (1, 2)
            )
        except Exception:  # a rejected token must not fail the output
            return ""
        return twice[len(alone) :] if twice.startswith(alone) else alone


class Detokenizer:
    """Turns the tokens of one output into text, piece by piece; without a tokenizer, into none.

    Unfinished characters and what may begin a stop string are held back: returned text is final.

    Args:
        behind: the last tokens of the text that this one continues. Without them, some tokenizers
            leave out the space at its beginning.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        stop: Sequence[str] = (),
        *,
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        behind: Sequence[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._decode_ids = None if tokenizer is None else _decoder(tokenizer)
        self._stop = tuple(stop)
        self._include_stop = include_stop
        self._skip_special_tokens = skip_special_tokens
        self._token_ids = [] if tokenizer is None else list(behind)
        self._before = self._decode(self._token_ids) if self._token_ids else ""
        if self._before.endswith(_INCOMPLETE):
            self._token_ids, self._before = [], ""
        self._start = 0  # tokens before this index no longer influence the text that follows
        self._read = len(self._token_ids)  # tokens before this index have been turned into text
        # `_before` is the text of the tokens from _start to _read.
        self._next_try = 0  # with fewer unread tokens, decoding is not tried again
        self._pieces = _pieces_of(tokenizer, skip_special_tokens)
        self._text = ""  # all text decoded so far
        self._returned = 0  # number of characters already returned
        self._beginnings = [_Beginning(each) for each in self._stop if each]
        self._begun = 0  # these have read the text before this character
        self._searched = 0  # stop strings end after this character
        self.stopped_at: str | None = None

    @property
    def text(self) -> str:
        """All text so far, including the part that is held back."""
        return self._text

    def add(self, token: int, *, may_stop: bool = True) -> str:
        """Append a token and return the text that became final."""
        if self._tokenizer is None:
            return ""
        self._token_ids.append(token)
        unread = len(self._token_ids) - self._read
        if unread >= self._next_try or not self._piece([token]).endswith(_INCOMPLETE):
            before = self._before
            after = self._decode(self._token_ids[self._start :])
            self._next_try = unread + unread // _LONG_UNREAD
            if not after.endswith(_INCOMPLETE):
                self._extend(after[len(before) :], may_stop)
                # What follows tokens without text must not look like the beginning of a text.
                if len(after) > len(before) or self._read - self._start > _LONG_UNREAD:
                    self._start = self._read
                self._read = len(self._token_ids)
                self._before = self._piece(self._token_ids[self._start :])
                self._next_try = 0
        return self._release(self._held_back())

    def finish(self) -> str:
        """Return the rest of the text, including unfinished characters."""
        if self.stopped_at is None and self._tokenizer is not None:
            before = self._before
            # The output ends for another reason, so a stop string no longer counts.
            self._extend(self._decode(self._token_ids[self._start :])[len(before) :], False)
            self._start = self._read = len(self._token_ids)
            self._before = ""
        return self._release(0)

    def _piece(self, token_ids: Sequence[int]) -> str:
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
        start = len(self._text)
        self._text += piece
        if not may_stop:
            self._searched = len(self._text)
            return
        hits = []
        for stop in self._stop:
            first = max(self._searched, start) - len(stop) + 1
            position = self._text.find(stop, max(0, first))
            if position >= 0:
                hits.append((position, stop))
        if hits:
            position, self.stopped_at = min(hits, key=lambda hit: (hit[0], -len(hit[1])))
            end = position + len(self.stopped_at) if self._include_stop else position
            self._text = self._text[:end]

    def _held_back(self) -> int:
        """Length of the longest suffix of the text that may begin a stop string."""
        if self.stopped_at is not None:
            return 0
        new, self._begun = self._text[self._begun :], len(self._text)
        return max((beginning.after(new) for beginning in self._beginnings), default=0)

    def _release(self, held_back: int) -> str:
        end = max(self._returned, len(self._text) - held_back)
        piece = self._text[self._returned : end]
        self._returned = end
        return piece
