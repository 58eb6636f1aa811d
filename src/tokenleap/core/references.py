"""What else a request reads: texts that drafts may quote, and an encoder-decoder's source."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

Index = TypeVar("Index")


@dataclass(frozen=True, eq=False)
class References:
    """Texts in the target's tokens, which it does not read.

    Requests made with the same texts share one object; it and its indexes are freed with the last.
    """

    texts: tuple[tuple[int, ...], ...] = ()
    _indexes: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False)

    def __bool__(self) -> bool:
        return bool(self.texts)

    def indexed(self, key: Hashable, build: Callable[[], Index]) -> Index:
        """The index that a drafter searches in place of the texts, built at the first call."""
        if key not in self._indexes:
            self._indexes[key] = build()
        index: Index = self._indexes[key]
        return index


NO_REFERENCES = References()  # the references of a request without any


@dataclass(frozen=True)
class Source:
    """The encoder's input; sources with the same input are equal."""

    tokens: tuple[int, ...] = ()
    # [bins, frames] of audio
    features: Tensor | None = field(default=None, compare=False, repr=False)
    digest: str = ""  # of the features, which are compared by it

    @classmethod
    def of_audio(cls, features: Tensor) -> Source:
        """Audio as its features, float [bins, frames]."""
        numbers = features.detach().float().cpu().contiguous().numpy()
        digest = hashlib.sha256(repr(numbers.shape).encode() + numbers.tobytes()).hexdigest()
        return cls(features=features, digest=digest)

    def inputs(self, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
        """The arguments by which Transformers' models take it, in a batch of one."""
        if self.features is not None:
            return {"input_features": self.features[None].to(device, dtype)}
        return {"input_ids": torch.tensor([self.tokens], device=device)}

    def __len__(self) -> int:
        """Number of tokens, or of audio frames."""
        return len(self.tokens) if self.features is None else int(self.features.shape[-1])


_PIECE = 256  # tokens that are compared at once, which is faster


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Its length: so far, state that is kept per token stays as it is (invariant 4)."""
    length = 0
    while (piece := first[length : length + _PIECE]) and length < len(second):
        if piece != second[length : length + _PIECE]:
            for a, b in zip(piece, second[length : length + _PIECE], strict=False):
                if a != b:
                    return length
                length += 1
        else:
            length += len(piece)
    return length
