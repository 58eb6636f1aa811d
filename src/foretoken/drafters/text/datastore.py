"""A datastore: the tokens of a corpus and their suffix array, for `rest`.

    from foretoken.drafters.text.datastore import build_datastore

    build_datastore(["notes.txt"], tokenizer).save("notes.datastore")

He et al., "REST: Retrieval-Based Speculative Decoding", section 3.1. All positions of the corpus
are sorted by the tokens that follow (Manber and Myers, "Suffix arrays"), so that the occurrences of
a string are neighbours and are found by two binary searches. Sorting takes `pydivsufsort` (the
extra `rest`), looking up takes nothing.

The file is a safetensors file: the arrays of `Datastore` under their names, and in its metadata
`format` (`foretoken-datastore`), `version`, `vocab_size`, `num_tokens` and, if it is known, the
`fingerprint` of the tokenizer's vocabulary. Loading maps it into memory and reads next to nothing,
so that only what contradicts itself at a glance is refused as damaged; arrays that are damaged
inside make drafts worse, and outputs the same.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from foretoken.drafters.text.corpus import EMPTY, check_tokens, fingerprint, read_tokens
from foretoken.drafters.text.tensor_file import TensorFile
from foretoken.errors import ForetokenError

__all__ = ["FILE", "Datastore", "build_datastore", "index_texts"]

FILE = TensorFile("foretoken-datastore", 1, "datastore", "foretoken datastore build")
MAX_VOCAB = (1 << 31) - 1
"""Tokens and the separator are at most 32-bit integers."""

Integers = NDArray[np.integer[Any]]

_TOKENS = (torch.uint16, torch.int32)
_POSITIONS = (torch.int32, torch.int64)


@dataclass(frozen=True)
class Datastore:
    """Texts and where every string of tokens occurs in them; none reaches into the next text.

    Args:
        tokens: [N] the texts one after the other, each one followed by a separator: `vocab_size`,
            which is no token.
        suffixes: [N] all positions, in the order of what stands from there to the end.
        vocab_size: V.
        fingerprint: of the tokenizer's vocabulary, or None where tokens came without one.
    """

    tokens: Integers
    suffixes: Integers
    vocab_size: int
    fingerprint: str | None = None

    @cached_property
    def _tokens(self) -> memoryview:
        """The same; its elements and short slices are had in half the time."""
        return self.tokens.data

    @cached_property
    def _suffixes(self) -> memoryview:
        return self.suffixes.data

    @cached_property
    def num_documents(self) -> int:
        """Texts that are not empty."""
        return len(self._occurrences([self.vocab_size]))

    @property
    def num_tokens(self) -> int:
        """Tokens of all texts."""
        return len(self.tokens) - self.num_documents

    @property
    def longest_document(self) -> int:
        """Tokens of the longest text; reads them all."""
        (ends,) = np.nonzero(self.tokens == self.vocab_size)
        return int(np.diff(ends, prepend=-1).max()) - 1

    @property
    def highest(self) -> int:
        """The highest token that occurs: separators are sorted behind it."""
        return int(self.tokens[self.suffixes[self.num_tokens - 1]])

    def find(self, pattern: Sequence[int]) -> range:
        """Where in `suffixes` the occurrences of these tokens are."""
        if max(pattern) >= self.vocab_size:  # of a target that is wider than its tokenizer
            return range(0)
        return self._occurrences(pattern)

    def _occurrences(self, pattern: Sequence[int]) -> range:
        tokens, size, pattern = self._tokens, len(pattern), list(pattern)

        def start(position: int) -> list[int]:
            return tokens[position : position + size].tolist()

        low = bisect_left(self._suffixes, pattern, key=start)
        return range(low, bisect_right(self._suffixes, pattern, lo=low, key=start))

    def find_suffix(self, text: Sequence[int], shortest: int, longest: int) -> tuple[int, range]:
        """The longest suffix of a text that occurs.

        Where a suffix occurs, all shorter ones do: its length is found by binary search.

        Args:
            text: token ids.
            shortest: least length that counts, at least 1.
            longest: greatest length that counts.

        Returns:
            Its length and where in `suffixes` it is found; 0 and nothing where none occurs.
        """
        lengths = range(shortest, min(longest, len(text)) + 1)
        known = bisect_left(lengths, True, key=lambda size: not self.find(text[-size:]))
        if not known:
            return 0, range(0)
        length = lengths[known - 1]
        return length, self.find(text[-length:])

    def continuations(self, entries: Iterable[int], skipped: int, length: int) -> list[list[int]]:
        """What follows at entries of `suffixes`, up to the end of the text.

        Args:
            entries: indices.
            skipped: tokens that are known, and left out.
            length: most tokens of each.
        """
        inside = partial(int.__gt__, self.vocab_size)
        starts = (self._suffixes[entry] + skipped for entry in entries)
        return [list(takewhile(inside, self._tokens[s : s + length].tolist())) for s in starts]

    def save(self, path: str | Path) -> None:
        """Write the file, whole or not at all.

        Raises:
            ForetokenError: it cannot be written; what was there before is untouched.
        """
        known = {} if self.fingerprint is None else {"fingerprint": self.fingerprint}
        sizes = {"vocab_size": str(self.vocab_size), "num_tokens": str(self.num_tokens)}
        FILE.save(path, {"tokens": self.tokens, "suffixes": self.suffixes}, {**sizes, **known})

    @staticmethod
    def load(path: str | Path) -> Datastore:
        """Map a file into memory.

        Raises:
            ForetokenError: there is none, or it is damaged, of another kind or another version.
        """
        tensors, metadata = FILE.load(path, ("tokens", "suffixes"))
        tokens = _array(tensors.get("tokens"), _TOKENS)
        suffixes = _array(tensors.get("suffixes"), _POSITIONS)
        # The last token is the separator behind the last text.
        fits = len(tokens) == len(suffixes) > 0 and metadata.get("vocab_size") == str(tokens[-1])
        if not fits:
            raise FILE.damaged(path)
        return Datastore(tokens, suffixes, int(tokens[-1]), metadata.get("fingerprint"))


def _array(tensor: Tensor | None, dtypes: Sequence[torch.dtype]) -> NDArray[Any]:
    """A tensor as an array; an empty one where it is none of numbers of these kinds, in a row."""
    fits = tensor is not None and tensor.dim() == 1 and tensor.dtype in dtypes
    return tensor.numpy() if tensor is not None and fits else np.empty(0)


def build_datastore(
    files: Iterable[str | Path],
    tokenizer: PreTrainedTokenizerBase,
    progress: Callable[[int], None] = lambda _: None,
) -> Datastore:
    """Sort the suffixes of text files, each of which is one text.

    Args:
        files: UTF-8 text.
        tokenizer: the target's.
        progress: called with the bytes read so far.

    Raises:
        ForetokenError: a file cannot be read or is not UTF-8, there is no text in any, or
            pydivsufsort is not installed.
    """
    sort = _sorter()  # before the work
    vocab_size = len(tokenizer)
    tokens = _joined(read_tokens(files, tokenizer, progress), vocab_size)
    return Datastore(tokens, sort(tokens), vocab_size, fingerprint(tokenizer))


def index_texts(texts: Iterable[Sequence[int]], vocab_size: int) -> Datastore:
    """The same from token ids below `vocab_size`.

    Raises:
        ForetokenError: there are no tokens, a token is outside the vocabulary, or pydivsufsort is
            not installed.
    """
    sort = _sorter()
    tokens = _joined(([np.array(text, dtype=np.int64)] for text in texts), vocab_size)
    return Datastore(tokens, sort(tokens), vocab_size)


def _joined(texts: Iterable[Iterable[NDArray[np.int64]]], vocab_size: int) -> Integers:
    """Texts that come in pieces as one array, each one followed by the separator."""
    if not 0 < vocab_size <= MAX_VOCAB:
        raise ForetokenError(f"a vocabulary of {vocab_size} tokens: it can have 1 to {MAX_VOCAB}.")
    dtype = np.uint16 if vocab_size <= np.iinfo(np.uint16).max else np.int32
    joined: list[Any] = []
    for text in texts:
        before = len(joined)
        for piece in text:
            check_tokens(piece, vocab_size)
            if len(piece):
                joined.append(piece.astype(dtype))
        if len(joined) > before:
            joined.append(np.array([vocab_size], dtype=dtype))
    if not joined:
        raise ForetokenError(EMPTY)
    return np.concatenate(joined)


def _sorter() -> Callable[[Integers], Integers]:
    """The suffix array of an array, in the order of its numbers."""
    try:
        from pydivsufsort import divsufsort  # type: ignore[import-untyped]
    except ImportError as error:
        raise ForetokenError(
            "building a datastore needs pydivsufsort: pip install 'foretoken[rest]'"
        ) from error

    def suffix_array(tokens: Integers) -> Integers:
        # It sorts big-endian bytes and keeps the suffixes that begin with a number's first byte.
        positions: NDArray[Any] = divsufsort(tokens)
        narrow = len(tokens) <= np.iinfo(np.int32).max
        # A copy also when nothing changes: no memoryview can read the type that comes from ctypes.
        return positions.astype(np.int32 if narrow else np.int64)

    return suffix_array
