"""The memory of a network's weights. What has the same bits in another network is in memory once.

A draft model may have the embedding, the output layer or whole layers of its target: heads that
draft with the target's output layer do, and so do draft models that were cut from their target, or
trained with its embedding.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import torch
from torch import Tensor

__all__ = ["KeptWeights"]

_Kind: TypeAlias = tuple[torch.dtype, torch.Size, bytes]
"""What tensors with the same bits have in common, and few others: their first bytes, too."""

_FIRST_BYTES = 256


class KeptWeights:
    """The tensors that the kernels of a network read. They stay as long as this object.

    Args:
        beside: the weights of another network, which are looked through for the same ones. They
            must never change, and stay in memory as long as something here uses them.
    """

    def __init__(self, beside: KeptWeights | None = None) -> None:
        self._tensors: list[Tensor] = []
        self._beside: dict[_Kind, list[Tensor]] = {}
        for tensor in () if beside is None else beside:
            self._beside.setdefault(_kind(tensor), []).append(tensor)

    def keep(self, tensor: Tensor) -> Tensor:
        """Keep a tensor, and return it."""
        self._tensors.append(tensor)
        return tensor

    def share(self, tensor: Tensor) -> Tensor:
        """Keep a contiguous tensor, or instead the one from `beside` that has the same bits.

        Returns:
            The one that is kept.
        """
        alike = self._beside.get(_kind(tensor), ()) if self._beside else ()
        return self.keep(next((other for other in alike if _same_bits(tensor, other)), tensor))

    def __iter__(self) -> Iterator[Tensor]:
        """All tensors, in the order in which they were kept."""
        return iter(self._tensors)

    def close(self) -> None:
        """Look through the other network's weights no more, and let go of them."""
        self._beside = {}


def _kind(tensor: Tensor) -> _Kind:
    first: bytes = _bits(tensor)[:_FIRST_BYTES].numpy().tobytes()
    return tensor.dtype, tensor.shape, first


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether all bits are equal; equal numbers are not enough, since 0 equals -0."""
    return one.data_ptr() == other.data_ptr() or torch.equal(_bits(one), _bits(other))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.flatten().view(torch.uint8)
