"""A datastore: the tokens of a corpus and their suffix array, for `rest`.

    build_datastore(["notes.txt"], tokenizer).save("notes.datastore")

He et al., "REST: Retrieval-Based Speculative Decoding", section 3.1. All positions of the corpus
are sorted by the tokens that follow (Manber and Myers, "Suffix arrays"). The occurrences of a
string are then adjacent, and two binary searches find them. Building a datastore needs
`pydivsufsort` (the extra `rest`); looking up does not.

The file is a safetensors file. It holds the arrays of `Datastore` under their names. Its metadata
are `format` (`tokenleap-datastore`), `version`, `vocab_size`, `num_tokens` and, if it is known, the
`fingerprint` of the tokenizer's vocabulary. Loading maps the file into memory and reads almost
nothing of it. Only inconsistent sizes and types are therefore refused as damaged. Wrong values
inside the arrays make drafts worse, and do not change outputs.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from tokenleap.control import Budget
from tokenleap.control.features import by_match
from tokenleap.core.extras import how_to_install
from tokenleap.core.tree import Draft, GrowingTree
from tokenleap.drafters.base import DrafterTraits, OneByOne
from tokenleap.drafters.growth import best_first_nodes
from tokenleap.drafters.options import RestOptions
from tokenleap.drafters.text.ngrams import (
    EMPTY,
    TensorFile,
    check_target,
    check_tokens,
    fingerprint,
    read_tokens,
)
from tokenleap.errors import TokenleapError
from tokenleap.request import Request

FILE = TensorFile("tokenleap-datastore", 1, "datastore", "tokenleap datastore build")
MAX_VOCAB = (1 << 31) - 1
"""Largest vocabulary: token ids and the separator must fit into 32-bit integers."""

Integers = NDArray[np.integer[Any]]

_TOKENS = (torch.uint16, torch.int32)
_POSITIONS = (torch.int32, torch.int64)


@dataclass(frozen=True)
class Datastore:
    """Texts and their suffix array; no string reaches from one text into the next.

    Args:
        tokens: [N] the texts one after another, each followed by a separator. The separator is
            `vocab_size`, which is no token id.
        suffixes: [N] all positions of `tokens`, sorted by the tokens from there to the end.
        fingerprint: hash of the tokenizer's vocabulary; None if the texts were given as token ids.
    """

    tokens: Integers
    suffixes: Integers
    vocab_size: int
    fingerprint: str | None = None

    @cached_property
    def _tokens(self) -> memoryview:
        """`tokens` as a memoryview, which reads elements and short slices in half the time."""
        return self.tokens.data

    @cached_property
    def _suffixes(self) -> memoryview:
        return self.suffixes.data

    @cached_property
    def num_documents(self) -> int:
        """Number of texts that are not empty."""
        return len(self._occurrences([self.vocab_size]))

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) - self.num_documents

    @property
    def longest_document(self) -> int:
        """Number of tokens of the longest text; this reads all tokens."""
        (ends,) = np.nonzero(self.tokens == self.vocab_size)
        return int(np.diff(ends, prepend=-1).max()) - 1

    @property
    def highest(self) -> int:
        """The highest token id that occurs; this reads all tokens."""
        return int(self.tokens.max(initial=0, where=self.tokens < self.vocab_size))

    def find(self, pattern: Sequence[int]) -> range:
        """The occurrences of these tokens, as a range of indices into `suffixes`."""
        if max(pattern) >= self.vocab_size:  # the target's logits may be wider than the tokenizer
            return range(0)
        return self._occurrences(pattern)

    def _occurrences(self, pattern: Sequence[int]) -> range:
        tokens, size, pattern = self._tokens, len(pattern), list(pattern)

        def start(position: int) -> list[int]:
            return tokens[position : position + size].tolist()

        low = bisect_left(self._suffixes, pattern, key=start)
        return range(low, bisect_right(self._suffixes, pattern, lo=low, key=start))

    def find_suffix(self, text: Sequence[int], shortest: int, longest: int) -> tuple[int, range]:
        """The length and the occurrences (in `suffixes`) of the longest suffix of a text.

        If a suffix occurs, all shorter ones do. A binary search therefore finds its length.
        """
        lengths = range(shortest, min(longest, len(text)) + 1)
        num_found = bisect_left(lengths, True, key=lambda size: not self.find(text[-size:]))
        if not num_found:
            return 0, range(0)
        length = lengths[num_found - 1]
        return length, self.find(text[-length:])

    def continuations(self, entries: Iterable[int], skipped: int, length: int) -> list[list[int]]:
        """The tokens at some entries of `suffixes`, each up to the end of its text."""
        inside = range(self.vocab_size).__contains__
        starts = (self._suffixes[entry] + skipped for entry in entries)
        return [list(takewhile(inside, self._tokens[s : s + length].tolist())) for s in starts]

    def save(self, path: str | Path) -> None:
        known = {} if self.fingerprint is None else {"fingerprint": self.fingerprint}
        sizes = {"vocab_size": str(self.vocab_size), "num_tokens": str(self.num_tokens)}
        FILE.save(path, {"tokens": self.tokens, "suffixes": self.suffixes}, {**sizes, **known})

    @staticmethod
    def load(path: str | Path) -> Datastore:
        tensors, metadata = FILE.load(path, ("tokens", "suffixes"))
        tokens = _array(tensors.get("tokens"), _TOKENS)
        suffixes = _array(tensors.get("suffixes"), _POSITIONS)
        # The last element of `tokens` is the separator after the last text.
        fits = len(tokens) == len(suffixes) > 0 and metadata.get("vocab_size") == str(tokens[-1])
        if not fits:
            raise FILE.damaged(path)
        return Datastore(tokens, suffixes, int(tokens[-1]), metadata.get("fingerprint"))


def _array(tensor: Tensor | None, dtypes: Sequence[torch.dtype]) -> NDArray[Any]:
    """A tensor as an array; an empty array unless it is one-dimensional with one of the dtypes."""
    fits = tensor is not None and tensor.dim() == 1 and tensor.dtype in dtypes
    return tensor.numpy() if tensor is not None and fits else np.empty(0)


def build_datastore(
    files: Iterable[str | Path],
    tokenizer: PreTrainedTokenizerBase,
    progress: Callable[[int], None] = lambda _: None,
) -> Datastore:
    """Make a datastore of text files; each file is one text."""
    sort = _sorter()  # first, so that a missing package is reported before the work
    vocab_size = len(tokenizer)
    tokens = _joined(read_tokens(files, tokenizer, progress), vocab_size)
    return Datastore(tokens, sort(tokens), vocab_size, fingerprint(tokenizer))


def index_texts(texts: Iterable[Sequence[int]], vocab_size: int) -> Datastore:
    """Make a datastore of texts that are given as token ids."""
    sort = _sorter()
    tokens = _joined(([np.array(text, dtype=np.int64)] for text in texts), vocab_size)
    return Datastore(tokens, sort(tokens), vocab_size)


def _joined(texts: Iterable[Iterable[NDArray[np.int64]]], vocab_size: int) -> Integers:
    """All texts, which come in pieces, as one array [N] with a separator after each text."""
    if not 0 < vocab_size <= MAX_VOCAB:
        raise TokenleapError(f"a vocabulary of {vocab_size} tokens: it must have 1 to {MAX_VOCAB}.")
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
        raise TokenleapError(EMPTY)
    return np.concatenate(joined)


def _sorter() -> Callable[[Integers], Integers]:
    """The function that computes the suffix array [N] of an array [N] of token ids."""
    try:
        from pydivsufsort import divsufsort  # type: ignore[import-untyped]
    except ImportError as error:
        raise TokenleapError(
            f"building a datastore needs pydivsufsort: {how_to_install('rest')}"
        ) from error

    def suffix_array(tokens: Integers) -> Integers:
        # divsufsort sorts by bytes: it converts the ids to big-endian bytes, and keeps the
        # suffixes that begin with the first byte of an id.
        positions: NDArray[Any] = divsufsort(tokens)
        narrow = len(tokens) <= np.iinfo(np.int32).max
        # `astype` also copies if the dtype is right: a memoryview cannot read the ctypes format.
        return positions.astype(np.int32 if narrow else np.int64)

    return suffix_array


# `rest`: drafts what followed the text's longest suffix in a datastore of the user's own text.
#
# The longest suffix of the text that occurs in the datastore is looked up, and the continuations
# of its occurrences are merged into a trie. The weight of a node is the number of continuations
# that pass through it. Its probability is its weight over its parent's weight. A tree draft has
# the nodes of greatest weight (section 3.2). A chain follows the most frequent token at every
# node.


Place = tuple[list[list[int]], int]
"""A node of the trie: the continuations that run through it, and its depth."""


class RestDrafter(OneByOne):
    """Chains or trees from a datastore; q is one-hot.

    It proposes nothing if no suffix of the text occurs in the datastore.
    """

    def __init__(self, datastore: Datastore, options: RestOptions) -> None:
        branching = options.branching
        self.traits = DrafterTraits(drafts_trees=branching, looks_up=not branching)
        self._datastore = datastore
        self._options = options

    def draft(self, request: Request, budget: Budget) -> Draft:
        if budget.chain <= 0:
            return Draft.empty(request.root)
        branching = self._options.branching
        children = successors if branching else most_frequent_child
        max_nodes = budget.nodes if branching else budget.chain
        match, found = self._continuations(request.token_ids, budget.chain)
        trie = found, 0
        grown = GrowingTree(request.root)
        for parent, token, _, _ in best_first_nodes(trie, children, max_nodes, budget):
            grown.add(parent + 1, token)
        tree = grown.tree()
        features = by_match(match, tree.num_drafted) if self.traits.looks_up else ()
        return Draft.deterministic(tree, features)

    def _continuations(self, text: Sequence[int], length: int) -> tuple[int, list[list[int]]]:
        """Length of the longest suffix that occurs, and what follows its occurrences."""
        options = self._options
        match, hits = self._datastore.find_suffix(text, options.min_match, options.max_match)
        selected = spread(hits, options.max_hits)
        return match, self._datastore.continuations(selected, match, length)


def spread(hits: range, most: int) -> Sequence[int]:
    """At most `most` of the hits, at equal distances."""
    if len(hits) <= most:
        return hits
    return [hits[i * len(hits) // most] for i in range(most)]


def successors(place: Place) -> list[tuple[int, float, Place]]:
    """The children of a node: token, probability given the node, and node of each."""
    continuations, depth = place
    by_token: dict[int, list[list[int]]] = {}
    for continuation in continuations:
        if depth < len(continuation):
            by_token.setdefault(continuation[depth], []).append(continuation)
    return [
        (token, len(through) / len(continuations), (through, depth + 1))
        for token, through in by_token.items()
    ]


def most_frequent_child(place: Place) -> list[tuple[int, float, Place]]:
    """The most frequent child only; on a tie the one with the smallest token id."""
    return sorted(successors(place), key=lambda successor: -successor[1])[:1]


def load_datastore(
    path: str, vocab_size: int, tokenizer: PreTrainedTokenizerBase | None
) -> Datastore:
    datastore = Datastore.load(path)
    made_with = datastore.fingerprint
    fits = datastore.vocab_size <= vocab_size
    highest = datastore.vocab_size - 1 if fits else datastore.highest
    check_target(path, FILE.made_by, highest, made_with, vocab_size, tokenizer)
    return datastore
