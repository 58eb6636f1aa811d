"""Counts of unigrams, bigrams and trigrams of a corpus, for the drafter `corpus_ngram`.

    build_ngrams(["notes.txt"], tokenizer).save("notes.ngrams")

The file is a safetensors file. It holds the arrays of `NgramTables` under their names. Its metadata
are `format` (`tokenleap-ngrams`), `version`, `vocab_size`, `num_tokens` and, if it is known, the
`fingerprint` of the tokenizer's vocabulary. Loading maps the file into memory.
"""

from __future__ import annotations

import codecs
import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from tokenleap.core.distribution import Distribution
from tokenleap.core.files import renamed, write_whole
from tokenleap.core.params import GREEDY_BELOW
from tokenleap.drafters.lookups import CountedChains
from tokenleap.drafters.options import CorpusNgramOptions
from tokenleap.errors import CompatibilityError, TokenleapError
from tokenleap.request import Request

BLOCK = 1 << 20
"""Bytes that are read from a file at once."""

PIECE = 1 << 14
"""Characters per piece, at most."""

EMPTY = "the corpus is empty: there is no text in it."

Ints = NDArray[np.int64]


def read_tokens(
    files: Iterable[str | Path],
    tokenizer: PreTrainedTokenizerBase,
    progress: Callable[[int], None] = lambda _: None,
) -> Iterator[Iterator[Ints]]:
    """For each file an iterator over the token ids [N] of its blocks, to be read in this order."""
    done = 0

    def tokens(file: str | Path) -> Iterator[Ints]:
        nonlocal done
        for text, size in _blocks(Path(file)):
            yield _tokenise(text, tokenizer)
            done += size
            progress(done)

    return map(tokens, files)


def _blocks(path: Path) -> Iterator[tuple[str, int]]:
    """The text of a file in blocks that end at `_cut`, with the bytes read for each."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    read, pending = 0, ""
    try:
        with path.open("rb") as file:
            while block := file.read(BLOCK):
                read += len(block)
                pending += decoder.decode(block)
                cut = _cut(pending)
                yield pending[:cut], len(block)
                pending = pending[cut:]
        yield pending + decoder.decode(b"", final=True), 0
    except UnicodeDecodeError as error:
        place = read - len(error.object) + error.start
        raise TokenleapError(f"{path} is not UTF-8 text: {error.reason}, byte {place}.") from error
    except OSError as error:
        raise TokenleapError(f"cannot read {path}: {error.strerror or error}") from error


def _cut(text: str) -> int:
    """The latest good position to cut a text; never 0, so that every piece has text."""
    end = text.rfind("\n", 1)
    while end > 0 and not text[end - 1].isalnum():
        end = text.rfind("\n", 1, end)
    return end if end > 0 else text.rfind("\n") + 1 or len(text)


def _pieces(text: str) -> Iterator[str]:
    start = 0
    while start < len(text):
        end = start + PIECE
        if end < len(text):
            end = start + _cut(text[start:end])
        yield text[start:end]
        start = end


def _tokenise(text: str, tokenizer: PreTrainedTokenizerBase) -> Ints:
    """Token ids [N] of a text; a fast tokenizer processes the pieces in parallel."""
    pieces = list(_pieces(text))
    if not pieces:
        return np.empty(0, dtype=np.int64)
    ids = tokenizer(pieces, add_special_tokens=False, return_attention_mask=False, verbose=False)
    return np.fromiter(itertools.chain.from_iterable(ids["input_ids"]), dtype=np.int64)


def fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """A hash of a tokenizer's vocabulary: equal if every token has the same id."""
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0]))
    return hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()


def check_tokens(tokens: NDArray[Any], vocab_size: int) -> None:
    """Check that all tokens [N] lie in the vocabulary."""
    if len(tokens) and not 0 <= tokens.min() <= tokens.max() < vocab_size:
        raise TokenleapError(f"a token is outside the vocabulary of {vocab_size} tokens.")


def check_target(
    path: str,
    made_by: str,
    highest: int,
    made_with: str | None,
    vocab_size: int,
    tokenizer: PreTrainedTokenizerBase | None,
) -> None:
    if highest >= vocab_size:
        raise CompatibilityError(
            f"{path} has token {highest}, and the target's vocabulary has {vocab_size} tokens: "
            f"build it again for this model with '{made_by}'."
        )
    if made_with is not None and tokenizer is not None and made_with != fingerprint(tokenizer):
        raise CompatibilityError(
            f"{path} was made with the vocabulary of another model: build it again for this one "
            f"with '{made_by}'."
        )


# Safetensors files of one format: written atomically, and mapped into memory when read.
#
# `ngrams` and `datastore` save their arrays with it. The metadata name the format and its version.
# An error can therefore say whether a file is of another version or damaged.


@dataclass(frozen=True)
class TensorFile:
    """A kind of file; `what` is its name in messages, such as "datastore"."""

    format: str
    version: int
    what: str
    made_by: str

    def save(
        self, path: str | Path, arrays: Mapping[str, NDArray[Any]], metadata: Mapping[str, str]
    ) -> None:
        path = Path(path)
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        named = {"format": self.format, "version": str(self.version), **metadata}
        try:
            write_whole(path, lambda beside: save_file(tensors, beside, named))
        except (OSError, SafetensorError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise TokenleapError(f"cannot write {path}: {reason}") from error

    def load(
        self, path: str | Path, names: Iterable[str]
    ) -> tuple[dict[str, Tensor], dict[str, str]]:
        try:
            with safe_open(path, framework="pt") as file:
                metadata = renamed(file.metadata() or {})
                self._check(path, metadata)
                present = set(file.keys())
                tensors = {name: file.get_tensor(name) for name in names if name in present}
            if any(each.data_ptr() % each.element_size() for each in tensors.values()):
                raise self.damaged(path)  # unaligned: a memoryview cannot read it
        except OSError as error:
            raise TokenleapError(f"cannot read {path}: {error.strerror or error}") from error
        except (SafetensorError, RuntimeError) as error:  # of PyTorch: unaligned tensors
            raise TokenleapError(
                f"{path} is not a valid {self.what}: make one with '{self.made_by}'."
            ) from error
        return tensors, metadata

    def _check(self, path: str | Path, metadata: Mapping[str, str]) -> None:
        if metadata.get("format") != self.format:
            raise TokenleapError(
                f"{path} is not a valid {self.what}: make one with '{self.made_by}'."
            )
        if metadata.get("version") != str(self.version):
            raise TokenleapError(
                f"{path} has version {metadata.get('version')} of the format, and this Tokenleap "
                f"reads version {self.version}: build it again with '{self.made_by}'."
            )

    def damaged(self, path: str | Path) -> TokenleapError:
        """The error for a file whose tensors are inconsistent."""
        return TokenleapError(f"{path} is damaged: build it again with '{self.made_by}'.")


FILE = TensorFile("tokenleap-ngrams", 1, "n-gram file", "tokenleap ngrams")
MAX_VOCAB = 1 << 21
"""Largest vocabulary: counting packs three token ids into 63 bits."""

Int32s = NDArray[np.int32]

_DTYPES = {
    "unigrams": torch.int64,
    "bigram_starts": torch.int64,
    "bigram_tokens": torch.int32,
    "bigram_counts": torch.int32,
    "trigram_starts": torch.int64,
    "trigram_tokens": torch.int32,
    "trigram_counts": torch.int32,
}


@dataclass(frozen=True)
class NgramTables:
    """The successors of every token and of every pair of tokens, with their counts.

    The successors of a token or pair are in ascending order of their token ids.

    Args:
        bigram_starts: [V + 1] the successors of token a are the bigrams from `bigram_starts[a]` up
            to, but not including, `bigram_starts[a + 1]`.
        trigram_starts: [B + 1] the successors of bigram i are the trigrams from
            `trigram_starts[i]` up to, but not including, `trigram_starts[i + 1]`.
        fingerprint: hash of the tokenizer's vocabulary; None if the texts were given as token ids.
    """

    unigrams: Ints
    bigram_starts: Ints
    bigram_tokens: Int32s
    bigram_counts: Int32s
    trigram_starts: Ints
    trigram_tokens: Int32s
    trigram_counts: Int32s
    fingerprint: str | None = None

    @property
    def vocab_size(self) -> int:
        return len(self.unigrams)

    @property
    def num_tokens(self) -> int:
        return int(self.unigrams.sum())

    def bigrams(self, first: int) -> slice:
        """The slice of the bigram arrays that holds the successors of a token."""
        if first >= self.vocab_size:
            return slice(0, 0)
        return slice(int(self.bigram_starts[first]), int(self.bigram_starts[first + 1]))

    def trigrams(self, first: int, second: int) -> slice:
        """The slice of the trigram arrays that holds the successors of a pair of tokens."""
        row = self.bigrams(first)
        seconds = self.bigram_tokens[row]
        index = int(seconds.searchsorted(np.int32(second)))
        if index == len(seconds) or seconds[index] != second:
            return slice(0, 0)
        index += row.start
        return slice(int(self.trigram_starts[index]), int(self.trigram_starts[index + 1]))

    def save(self, path: str | Path) -> None:
        arrays = {name: getattr(self, name) for name in _DTYPES}
        FILE.save(path, arrays, self._metadata())

    def _metadata(self) -> dict[str, str]:
        known = {} if self.fingerprint is None else {"fingerprint": self.fingerprint}
        return {
            "vocab_size": str(self.vocab_size),
            "num_tokens": str(self.num_tokens),
            **known,
        }

    @staticmethod
    def load(path: str | Path) -> NgramTables:
        tensors, metadata = FILE.load(path, _DTYPES)
        _check_tensors(path, tensors)
        arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
        return NgramTables(**arrays, fingerprint=metadata.get("fingerprint"))


_MOST_COUNTED = 2**53  # tokens of a corpus: relative frequencies are exact up to here


def _check_tensors(path: str | Path, tensors: dict[str, torch.Tensor]) -> None:
    """Check that all lookups stay inside the arrays, and all tokens inside the vocabulary."""
    fits = all(
        name in tensors and tensors[name].dtype == dtype and tensors[name].dim() == 1
        for name, dtype in _DTYPES.items()
    )
    if not (
        fits
        and len(tensors["unigrams"]) > 0
        and int(tensors["unigrams"].min()) >= 0
        and int(tensors["unigrams"].max()) <= _MOST_COUNTED // len(tensors["unigrams"])
        and int(tensors["unigrams"].sum()) > 0
        and _delimits(tensors, "bigram", len(tensors["unigrams"]))
        and _delimits(tensors, "trigram", len(tensors["bigram_tokens"]))
        and bool((tensors["unigrams"][tensors["bigram_tokens"]] > 0).all())
    ):
        raise FILE.damaged(path)


def _delimits(tensors: dict[str, torch.Tensor], order: str, rows: int) -> bool:
    """Whether the starts divide the successors into `rows` rows, with valid tokens and counts."""
    starts, tokens = tensors[f"{order}_starts"], tensors[f"{order}_tokens"]
    counts, vocab_size = tensors[f"{order}_counts"], len(tensors["unigrams"])
    return (
        len(starts) == rows + 1
        and int(starts[0]) == 0
        and int(starts[-1]) == len(tokens) == len(counts)
        and bool((starts[1:] >= starts[:-1]).all())
        and (not len(tokens) or 0 <= int(tokens.min()) <= int(tokens.max()) < vocab_size)
        and (not len(tokens) or int(counts.min()) > 0)
    )


def build_ngrams(
    files: Iterable[str | Path],
    tokenizer: PreTrainedTokenizerBase,
    progress: Callable[[int], None] = lambda _: None,
) -> NgramTables:
    """Count the n-grams of text files; no n-gram reaches from one file into the next."""
    counter = _Counter(len(tokenizer))
    for text in read_tokens(files, tokenizer, progress):
        counter.begin_text()
        for tokens in text:
            counter.add(tokens)
    return counter.tables(fingerprint(tokenizer))


def count_ngrams(
    texts: Iterable[Sequence[int]],
    vocab_size: int,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> NgramTables:
    """Count the n-grams of texts that are given as token ids."""
    counter = _Counter(vocab_size)
    for text in texts:
        counter.begin_text()
        counter.add(np.array(text, dtype=np.int64))
    return counter.tables(None if tokenizer is None else fingerprint(tokenizer))


class _Counter:
    """Counts the n-grams of texts that come in pieces.

    The counts of each piece form a sorted run, and runs of similar size are merged.
    """

    def __init__(self, vocab_size: int) -> None:
        if not 0 < vocab_size <= MAX_VOCAB:
            raise TokenleapError(
                f"a vocabulary of {vocab_size} tokens: it must have 1 to {MAX_VOCAB}."
            )
        self._vocab_size = vocab_size
        self._unigrams = np.zeros(vocab_size, dtype=np.int64)
        self._runs: dict[int, list[tuple[Ints, Ints]]] = {2: [], 3: []}
        self._before = np.empty(0, dtype=np.int64)  # last two tokens of the previous piece

    def begin_text(self) -> None:
        self._before = self._before[:0]

    def add(self, tokens: Ints) -> None:
        """Count the n-grams that end in the next tokens [N] of the text."""
        if not len(tokens):
            return
        check_tokens(tokens, self._vocab_size)
        self._unigrams += np.bincount(tokens, minlength=self._vocab_size)
        text = np.concatenate([self._before, tokens])
        pairs = text[:-1] * self._vocab_size + text[1:]
        self._count(2, pairs[max(0, len(self._before) - 1) :])  # without those counted before
        self._count(3, pairs[:-1] * self._vocab_size + text[2:])
        self._before = text[-2:]

    def _count(self, order: int, keys: Ints) -> None:
        """Add n-grams, packed into one integer each, to the runs of their order."""
        if not len(keys):
            return
        runs = self._runs[order]
        runs.append(np.unique(keys, return_counts=True))
        # As in a binary counter, every n-gram takes part in only a few merges.
        while len(runs) > 1 and len(runs[-1][0]) * 2 > len(runs[-2][0]):
            runs.append(_merge(runs.pop(), runs.pop()))

    def _all(self, order: int) -> tuple[Ints, Ints]:
        """All n-grams of an order, ascending, and their counts."""
        runs = self._runs[order]
        empty = np.empty(0, dtype=np.int64)
        while len(runs) > 1:
            runs.append(_merge(runs.pop(), runs.pop()))
        return runs[0] if runs else (empty, empty)

    def tables(self, fingerprint: str | None) -> NgramTables:
        if not self._unigrams.any():
            raise TokenleapError(EMPTY)
        pairs, pair_counts = self._all(2)
        triples, triple_counts = self._all(3)
        pair_of_triple = triples // self._vocab_size
        return NgramTables(
            unigrams=self._unigrams,
            bigram_starts=(pairs // self._vocab_size).searchsorted(np.arange(self._vocab_size + 1)),
            bigram_tokens=(pairs % self._vocab_size).astype(np.int32),
            bigram_counts=_narrow(pair_counts),
            trigram_starts=np.append(pair_of_triple.searchsorted(pairs), len(triples)),
            trigram_tokens=(triples % self._vocab_size).astype(np.int32),
            trigram_counts=_narrow(triple_counts),
            fingerprint=fingerprint,
        )


def _merge(first: tuple[Ints, Ints], second: tuple[Ints, Ints]) -> tuple[Ints, Ints]:
    keys = np.concatenate([first[0], second[0]])
    counts = np.concatenate([first[1], second[1]])
    order = keys.argsort(kind="stable")
    keys, counts = keys[order], counts[order]
    (starts,) = np.nonzero(np.diff(keys, prepend=-1))
    return keys[starts], np.add.reduceat(counts, starts)


def _narrow(counts: Ints) -> Int32s:
    """Counts as int32, to halve their size; larger counts are cut to the largest int32."""
    return counts.clip(max=np.iinfo(np.int32).max).astype(np.int32)


# `corpus_ngram`: unigrams, bigrams and trigrams of text files, or of the target's own text.
#
# These are the negligible-cost approximation models of Leviathan et al., "Fast Inference from
# Transformers via Speculative Decoding" (tables 3 and 5 have a unigram and a bigram model).
# `tokenleap ngrams` makes the tables. Let n(..) be counts and T(..) numbers of different
# successors. The distribution after tokens a, b is interpolated as by Witten and Bell ("The
# Zero-Frequency Problem", method C):
#
#     P(c | b)    = (n(b, c)    + T(b)    * P(c))     / (n(b)    + T(b))
#     P(c | a, b) = (n(a, b, c) + T(a, b) * P(c | b)) / (n(a, b) + T(a, b))
#
# Its support is the set of tokens that followed b in the corpus, and P(c) is the relative frequency
# of c among them. If nothing followed b, the support is the set of all tokens of the corpus. Every
# successor of a, b is a successor of b, so the support does not depend on a. `order` 2 drafts from
# P(c | b), and `order` 1 from the relative frequencies of all tokens of the corpus, whatever came
# before. This distribution is q, and sampling stays exact.


class SmoothedNgrams:
    """The smoothed distribution of the next token (see above)."""

    def __init__(self, tables: NgramTables, order: int = 3) -> None:
        self._tables = tables
        self._order = order
        self._of_corpus: dict[float, Distribution] = {}  # temperature -> the same for all contexts

    @cached_property
    def _corpus(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Tokens [S] of the corpus and their relative frequencies [S]."""
        (tokens,) = self._tables.unigrams.nonzero()
        counts = self._tables.unigrams[tokens]
        return tokens, counts / counts.sum()

    def distribution(self, context: Sequence[int], temperature: float) -> Distribution:
        """The distribution of the next token at a temperature; one-hot at temperature 0."""
        tokens, probs = self.probabilities(context)
        if probs is not self._corpus[1]:
            return _at(tokens, probs, temperature)
        if temperature not in self._of_corpus:
            self._of_corpus = {temperature: _at(tokens, probs, temperature)}
        return self._of_corpus[temperature]

    def probabilities(
        self, context: Sequence[int]
    ) -> tuple[NDArray[np.integer[Any]], NDArray[np.float64]]:
        """The support [S] as ascending token ids, and its smoothed probabilities [S]."""
        if self._order == 1:
            return self._corpus
        tables = self._tables
        row = tables.bigrams(context[-1])
        if row.start == row.stop:
            return self._corpus
        tokens = tables.bigram_tokens[row]
        unigrams = tables.unigrams[tokens]
        probs = _interpolated(tables.bigram_counts[row], unigrams / unigrams.sum())
        if self._order == 2 or len(context) < 2:
            return tokens, probs
        row = tables.trigrams(*context[-2:])
        if row.start < row.stop:
            counts = np.zeros(len(tokens) + 1)  # the last one is for damaged files
            counts[tokens.searchsorted(tables.trigram_tokens[row])] = tables.trigram_counts[row]
            probs = _interpolated(counts[:-1], probs)
        return tokens, probs


def _at(
    tokens: NDArray[np.integer[Any]], probs: NDArray[np.float64], temperature: float
) -> Distribution:
    """The distribution of tokens [S] with probabilities [S] at a temperature."""
    if temperature < GREEDY_BELOW:
        return Distribution.one_hot(int(tokens[probs.argmax()]))
    if temperature != 1:
        probs = (probs / probs.max()) ** (1 / temperature)
        probs /= probs.sum()
    distribution = Distribution(torch.from_numpy(probs), torch.from_numpy(tokens.astype(np.int64)))
    # At a low temperature, small probabilities may underflow to 0.
    return distribution.normalised(distribution.probs)


def _interpolated(counts: NDArray[Any], shorter: NDArray[np.float64]) -> NDArray[np.float64]:
    """Counts [S] interpolated with the probabilities [S] of the shorter context (Witten-Bell)."""
    num_successors = np.count_nonzero(counts)  # T in the formula
    total = counts.sum() + num_successors
    smoothed: NDArray[np.float64] = (counts + num_successors * shorter) / total
    return smoothed


def load_corpus(
    path: str, order: int, vocab_size: int, tokenizer: PreTrainedTokenizerBase | None
) -> SmoothedNgrams:
    tables = NgramTables.load(path)
    highest = int(tables.unigrams.nonzero()[0][-1])
    check_target(path, FILE.made_by, highest, tables.fingerprint, vocab_size, tokenizer)
    return SmoothedNgrams(tables, order)


class CorpusNgramDrafter(CountedChains):
    """Chains drawn from the corpus' smoothed distribution, which is q."""

    def __init__(
        self, ngrams: SmoothedNgrams, options: CorpusNgramOptions, *, coupled: bool
    ) -> None:
        super().__init__(options, coupled=coupled, context_length=2)
        self._ngrams = ngrams

    def successors(
        self, request: Request, context: Sequence[int], temperature: float
    ) -> Distribution | None:
        return self._ngrams.distribution(context, temperature)
