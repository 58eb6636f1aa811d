"""Features: what training needs of the target's passes, computed once and kept on disk.

For every token: the hidden states of the layers that a drafter reads, and the target's most
probable next tokens. The passes are those of the runtime that will serve the drafter, so it learns
from the features it will see. Hidden states are kept in int8 with a scale per group, which is far
more exact than the noise that training adds to them.

A cache is a folder of raw arrays, mapped into memory when they are read, and `index.json`, which is
written last. A folder without it is incomplete and is made anew (`features.py`).
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd, prod
from pathlib import Path
from typing import Annotated, Any, NotRequired

import numpy as np
import torch
import torch.nn.functional as F
from annotated_types import Ge, Gt, Le
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import TypedDict

from tokenleap.core.files import read_json, validated, write_whole
from tokenleap.core.references import Source as EncoderSource
from tokenleap.core.tree import chain
from tokenleap.errors import DataError
from tokenleap.runtime.network import Need, PassOutput
from tokenleap.runtime.passes import INTERNAL_KEY
from tokenleap.runtime.target import Target
from tokenleap.training.conversations import Conversation

__all__ = [
    "ENCODED",
    "INDEX",
    "TOP_K",
    "FeatureCache",
    "Features",
    "array_shapes",
    "bytes_per_token",
    "compute_features",
    "dequantize",
    "draft_vocabulary",
    "noisy",
    "passes",
    "quantize",
]


TOP_K = 16
"""Most probable next tokens that are kept of the target's distribution."""

INDEX = "index.json"
ENCODED, _ENCODED_KIND = "encoded", "float16"
"""The file of what the encoder returned, with its own number of rows: those of the sources."""

_GROUP = 32
"""Numbers of a hidden state that share a scale, as in GGUF's Q8_0."""


@dataclass(frozen=True)
class Features:
    """One conversation of n tokens, with what the target's passes show of it.

    Args:
        tokens: [n].
        hidden: [n, A, E] hidden states of A layers in int8; A may be 0.
        scales: [n, A, G] their scales.
        top_tokens: [n, K] the most probable tokens after each token, the best first.
        top_logprobs: [n, K] their log-probabilities at temperature 1.
        source: [s] what an encoder-decoder read; empty for other models.
        encoded: [s, E] what its encoder made of that, in half precision; empty if no drafter reads
            it.
    """

    tokens: Tensor
    answers: Sequence[tuple[int, int]]
    hidden: Tensor
    scales: Tensor
    top_tokens: Tensor
    top_logprobs: Tensor
    source: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))
    encoded: Tensor = field(default_factory=lambda: torch.zeros(0, 0, dtype=torch.float16))


def _groups(hidden_size: int) -> int:
    return hidden_size // gcd(hidden_size, _GROUP)


def bytes_per_token(num_layers: int, hidden_size: int, *, encoder: bool = False) -> int:
    """Bytes of a cache for each token; with `encoder`, of sources that are as long as outputs."""
    columns = _columns(num_layers, hidden_size).values()
    own = sum(prod(shape) * np.dtype(kind).itemsize for kind, shape in columns)
    return own + (hidden_size * np.dtype(_ENCODED_KIND).itemsize if encoder else 0)


def _columns(num_layers: int, hidden_size: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """File name -> type and shape of what is kept of a token."""
    states = {
        "hidden": ("int8", (num_layers, hidden_size)),
        "scales": ("float16", (num_layers, _groups(hidden_size))),
    }
    return {
        "tokens": ("int32", ()),
        **(states if num_layers else {}),  # nothing of no layers
        "top_tokens": ("int32", (TOP_K,)),
        "top_logprobs": ("float16", (TOP_K,)),
    }


def quantize(hidden: Tensor) -> tuple[Tensor, Tensor]:
    """[..., E] -> int8 [..., E] and float16 scales [..., G]."""
    grouped = torch.unflatten(hidden.float(), -1, (_groups(hidden.shape[-1]), -1))
    scales = (grouped.abs().amax(-1) / 127).clamp(min=1e-6).half()
    codes = (grouped / scales.float().unsqueeze(-1)).round().clamp(-127, 127)
    return codes.to(torch.int8).flatten(-2), scales


def dequantize(hidden: Tensor, scales: Tensor) -> Tensor:
    """The hidden states [..., E] in float32 from int8 [..., E] and their scales [..., G]."""
    grouped = hidden.float().reshape(*scales.shape, -1)
    return (grouped * scales.float().unsqueeze(-1)).flatten(-2)


def noisy(hidden: Tensor, noise: float) -> Tensor:
    """Hidden states [..., E] with noise whose standard deviation is a share of their size."""
    if not noise:
        return hidden
    size = hidden.pow(2).mean(-1, keepdim=True).sqrt()
    return hidden + noise * size * torch.randn_like(hidden)


_PER_TEXT = ("lengths", "answers", "sources")
_Whole = Annotated[int, Ge(0), Le(2**40)]


class _Index(TypedDict):
    """The content of `index.json`; the lists have an entry for each conversation."""

    layers: list[int]
    hidden_size: Annotated[_Whole, Gt(0)]
    lengths: list[_Whole]
    answers: list[list[tuple[_Whole, _Whole]]]
    sources: NotRequired[list[list[int]]]
    encoded: NotRequired[bool]


class FeatureCache:
    """The features of some conversations."""

    def __init__(self, folder: Path) -> None:
        try:
            self.index: Mapping[str, Any] = validated(_Index, read_json(folder / INDEX))
            self._starts = [0, *np.cumsum(self.index["lengths"]).tolist()]
            sizes = [len(source) for source in self.index.get("sources", ())]
            self._source_starts = [0, *np.cumsum(sizes, dtype=int).tolist()]
            self._arrays = {
                name: np.memmap(folder / name, dtype=kind, mode="r", shape=shape)
                for name, (kind, shape) in array_shapes(self.index).items()
            }
            numbers = {len(self.index[name]) for name in _PER_TEXT if name in self.index}
            if numbers != {len(self)}:
                raise ValueError("it tells of other conversations")
        except (OSError, ValueError, KeyError, TypeError, OverflowError):
            raise DataError(
                f"{folder}: the features are incomplete: delete the folder, and compute them anew."
            ) from None

    @property
    def lengths(self) -> Sequence[int]:
        """Tokens of each conversation."""
        lengths: Sequence[int] = self.index["lengths"]
        return lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, number: int) -> Features:
        part = slice(self._starts[number], self._starts[number + 1])
        read = {
            name: torch.from_numpy(np.array(array[part]))
            for name, array in self._arrays.items()
            if name != ENCODED
        }
        size, none = self.index["hidden_size"], (len(read["tokens"]), 0)
        return Features(
            tokens=read["tokens"].long(),
            answers=self.index["answers"][number],
            hidden=read.get("hidden", torch.zeros(*none, size, dtype=torch.int8)),
            scales=read.get("scales", torch.zeros(*none, _groups(size), dtype=torch.float16)),
            top_tokens=read["top_tokens"].long(),
            top_logprobs=read["top_logprobs"].float(),
            source=torch.tensor(self.source(number), dtype=torch.long),
            encoded=self._encoded(number),
        )

    def _encoded(self, number: int) -> Tensor:
        array = self._arrays.get(ENCODED)
        if array is None:
            return torch.zeros(0, 0, dtype=torch.float16)
        part = slice(self._source_starts[number], self._source_starts[number + 1])
        return torch.from_numpy(np.array(array[part]))

    def source(self, number: int) -> Sequence[int]:
        """The source of an encoder-decoder's conversation; empty for other models."""
        sources: Sequence[Sequence[int]] | None = self.index.get("sources")
        return () if sources is None else sources[number]

    def counts(self, vocab_size: int) -> NDArray[np.int64]:
        """[V] how often the target wrote each token."""
        counts = np.zeros(vocab_size, np.int64)
        for start, answers in zip(self._starts, self.index["answers"], strict=False):
            for first, stop in answers:
                part = self._arrays["tokens"][start + first : start + stop]
                counts += np.bincount(part, minlength=vocab_size)
        return counts


def array_shapes(index: Mapping[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """File name -> type and shape of the arrays of a cache with this `index.json`."""
    total, columns = sum(index["lengths"]), _columns(len(index["layers"]), index["hidden_size"])
    shapes = {name: (kind, (total, *shape)) for name, (kind, shape) in columns.items()}
    if index.get(ENCODED):
        rows = sum(len(source) for source in index["sources"])
        shapes[ENCODED] = (_ENCODED_KIND, (rows, index["hidden_size"]))
    return shapes


# Computing features: one pass of the target over each conversation, chunk by chunk.
#
# `features.py` says what is kept, and reads it.


_CHUNK = 256
"""Tokens of a pass."""


def compute_features(
    target: Target,
    conversations: Sequence[Conversation],
    layers: Sequence[int],
    folder: Path,
    *,
    encoder: bool = False,
) -> Iterator[int]:
    """Fill a cache; a complete one for these conversations and layers stays as it is."""
    index: dict[str, Any] = {
        "layers": list(layers),
        "hidden_size": target.hidden_size,
        "lengths": [len(each.tokens) for each in conversations],
        "answers": [each.answers for each in conversations],
    }
    if any(each.source for each in conversations):
        index["sources"] = [each.source for each in conversations]
    if encoder:
        index[ENCODED] = True
    text = json.dumps(index)
    if _is_complete(folder, text):
        return
    arrays = _new_arrays(folder, array_shapes(index))
    at = read = 0
    for each in conversations:
        stop = at + len(each.tokens)
        arrays["tokens"][at:stop] = each.tokens
        if encoder:
            found = _encoded(target, each)
            arrays[ENCODED][read : read + len(found)] = found.half().cpu().numpy()
            read += len(found)
        for name, tensor in _features(target, each, layers).items():
            arrays[name][at:stop] = tensor.numpy()
        at = stop
        yield at
    for array in arrays.values():
        array.flush()
    write_whole(folder / INDEX, lambda path: path.write_text(text))


def _is_complete(folder: Path, index: str) -> bool:
    """Whether a cache has this index, and all that the index says."""
    try:
        FeatureCache(folder)
    except DataError:
        return False
    return (folder / INDEX).read_text() == index


def _new_arrays(
    folder: Path, shapes: Mapping[str, tuple[str, tuple[int, ...]]]
) -> dict[str, np.memmap[Any, Any]]:
    """Empty arrays in a new folder."""
    shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.mkdir(parents=True)
        return {name: _allocated(folder / name, *each) for name, each in shapes.items()}
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        size = sum(prod(shape) * np.dtype(kind).itemsize for kind, shape in shapes.values())
        raise DataError(
            f"{folder}: the features take {size / 1e9:.2f} GB: {error.strerror}: learn fewer "
            "tokens, or choose another disk."
        ) from None


def _allocated(path: Path, kind: str, shape: tuple[int, ...]) -> np.memmap[Any, Any]:
    """A new array on disk whose space is there: writing beyond a full disk would be a signal."""
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, max(1, prod(shape) * np.dtype(kind).itemsize))
    return np.memmap(path, dtype=kind, mode="r+", shape=shape)


def _features(
    target: Target, conversation: Conversation, layers: Sequence[int]
) -> dict[str, Tensor]:
    """File name -> what is kept of the n tokens of a conversation."""
    need = Need(hidden=tuple(sorted(layers)))
    outputs = passes(target, conversation.tokens, need, conversation.source)
    parts = [_kept(output, layers) for output in outputs]
    return {name: torch.cat([part[name] for part in parts]).cpu() for name in parts[0]}


@torch.inference_mode()
def _encoded(target: Target, conversation: Conversation) -> Tensor:
    """[s, E] what the target's encoder makes of a source."""
    assert target.source_network is not None, "the method is for encoder-decoders"
    return target.source_network.encoded(EncoderSource(tuple(conversation.source)))


def passes(
    target: Target, tokens: Sequence[int], need: Need, source: Sequence[int] = ()
) -> Iterator[PassOutput]:
    """The outputs of a target's passes over a text, chunk by chunk."""
    target.add(INTERNAL_KEY)
    try:
        if source:
            target.encode(INTERNAL_KEY, EncoderSource(tuple(source)))
        for start in range(0, len(tokens), _CHUNK):
            chunk = chain(tokens[start : start + _CHUNK])
            (output,) = target.verify([INTERNAL_KEY], [chunk], need=need)
            yield output
            target.commit(INTERNAL_KEY, range(len(chunk)))
    finally:
        target.remove(INTERNAL_KEY)


@torch.inference_mode()
def _kept(output: PassOutput, layers: Sequence[int]) -> dict[str, Tensor]:
    logits = output.scores.float()
    values, tokens = logits.topk(min(TOP_K, logits.shape[-1]))
    missing = TOP_K - values.shape[-1]  # of a vocabulary smaller than that
    logprobs = F.pad(values - logits.logsumexp(-1, keepdim=True), (0, missing), value=-1e4)
    kept = {"top_tokens": F.pad(tokens.int(), (0, missing)), "top_logprobs": logprobs.half()}
    if layers:
        hidden = torch.stack([output.hidden[layer] for layer in layers], dim=1)
        kept["hidden"], kept["scales"] = quantize(hidden)
    return kept


# The draft vocabulary of a head: what the target writes most often.


def draft_vocabulary(
    training: FeatureCache,
    held_out: FeatureCache,
    ends: Collection[int],
    size: int,
    vocab_size: int,
) -> tuple[torch.Tensor, float]:
    """Choose the tokens that a head can draft.

    Returns:
        [Vd] ids, ascending; and their share of what is held out.
    """
    counts = training.counts(vocab_size)
    counts[list(ends)] = np.iinfo(np.int64).max
    most = np.argsort(-counts, kind="stable")[:size]
    tokens = np.sort(most)
    others = held_out.counts(vocab_size)
    coverage = float(others[tokens].sum() / max(1, others.sum()))
    return torch.from_numpy(tokens), coverage
