"""A corpus: text files as token ids, and the check that a file made from one fits a target.

`ngrams` and `datastore` read their texts with `read_tokens`, and their drafters call
`check_target`. Files are read in blocks. A block is cut into pieces, and the tokenizer processes
many pieces at once. A cut is placed before a line break that follows a letter or a digit, if there
is one. Byte-level tokenizers always split there, so the tokens are those of the whole text. With
other tokenizers, and in long texts without such line breaks, one or two tokens next to a cut may
differ.
"""

from __future__ import annotations

import codecs
import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from tokenleap.core.files import renamed, write_whole
from tokenleap.errors import CompatibilityError, TokenleapError

__all__ = ["EMPTY", "TensorFile", "check_target", "check_tokens", "fingerprint", "read_tokens"]


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
    """Tokenise files, block by block.

    Returns:
        For each file an iterator over the token ids [N] of its blocks. They must be consumed in
        this order.
    """
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
    """Check that all tokens lie in the vocabulary.

    Args:
        tokens: [N] token ids.
    """
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
    """Check that a file made from a corpus has the target's vocabulary."""
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
    """A kind of file.

    Args:
        what: the name of such a file in messages, such as "datastore".
    """

    format: str
    version: int
    what: str
    made_by: str

    def save(
        self, path: str | Path, arrays: Mapping[str, NDArray[Any]], metadata: Mapping[str, str]
    ) -> None:
        """Write a file atomically."""
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
        """Map a file into memory."""
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
