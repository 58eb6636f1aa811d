"""What training needs of the target's passes over conversations, computed once and kept on disk.

For every token: the hidden states of the layers that a drafter reads, and the target's most
probable next tokens. The passes are those of the runtime that will serve the drafter, so it learns
from the features it will see. Hidden states are kept in int8 with a scale per group, which is far
more exact than the noise that training adds to them.

A cache is a folder of raw arrays, mapped into memory when they are read, and `index.json`, which is
written last. A folder without it is incomplete and is made anew (`feature_passes.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd, prod
from pathlib import Path
from typing import Annotated, Any, NotRequired

import numpy as np
import torch
from annotated_types import Ge, Gt, Le
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import TypedDict  # pydantic needs it before Python 3.12

from tokenleap.core.files import read_json, validated
from tokenleap.errors import DataError

__all__ = [
    "ENCODED",
    "INDEX",
    "TOP_K",
    "FeatureCache",
    "Features",
    "array_shapes",
    "bytes_per_token",
    "dequantize",
    "noisy",
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
        answers: [start, stop) of each part to learn.
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
    """The features of some conversations.

    Args:
        folder: made by `compute_features`.

    Raises:
        DataError: the folder is incomplete.
    """

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
        """What an encoder-decoder read in a conversation; empty for other models."""
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
