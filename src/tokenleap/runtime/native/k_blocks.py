"""Packs GGUF's K-quants in their own numbers; `k_blocks.h` describes the formats.

A weight of a K-quant is `d s q - e m`: d and e are float16 and belong to a block of 256 weights; s
and m are whole numbers of a group of 32 weights (16 in Q6_K), and q has four to six bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from tokenleap.runtime.native.pack import GROUP, PANEL, Format, PackedWeights, quads, split_bits

__all__ = ["K_FORMATS", "pack_k_blocks"]

K_FORMATS = {Kind.Q4_K: Format.Q4K, Kind.Q5_K: Format.Q5K, Kind.Q6_K: Format.Q6K}
"""The formats of the kinds."""

_BLOCK = 256


@dataclass(frozen=True)
class _Blocks:
    """The numbers of B blocks.

    Args:
        steps: [B, 256] uint8: q.
        whole: [B, 8, 2] uint8: s and m of a group (Q6_K: s of its halves, as two's complement).
        factors: [B, 1 or 2] float16: d, and e if the kind has it.
    """

    steps: Tensor
    whole: Tensor
    factors: Tensor


def pack_k_blocks(kind: Kind, rows: Tensor, inputs: int) -> PackedWeights | None:
    """Pack a layer's blocks; arguments and result as in `pack_blocks`."""
    size, read = _KINDS[kind]
    blocks = read(rows.view(-1, size))
    if not blocks.factors.isfinite().all():
        return None
    outputs, groups = len(rows), inputs // GROUP
    missing = -outputs % PANEL

    def panels(numbers: Tensor, *shape: int) -> Tensor:
        """[B, ...] -> [P, 32, *shape], padded with zeros."""
        return F.pad(numbers.reshape(outputs, -1), (0, 0, 0, missing)).view(-1, PANEL, *shape)

    steps = panels(blocks.steps, groups, GROUP)
    whole = panels(blocks.whole, groups, 2).permute(0, 2, 3, 1).flatten(2)  # [P, G, 2 * 32]
    factors = panels(blocks.factors, inputs // _BLOCK, blocks.factors.shape[1])
    bits = {Kind.Q4_K: 4, Kind.Q5_K: 5, Kind.Q6_K: 6}[kind]
    parts = [*split_bits(quads(steps), bits), whole]
    ends = factors.permute(0, 2, 3, 1).contiguous().view(torch.uint8)  # [P, K/256, 1 or 2, 64]
    packed = torch.cat([torch.cat(parts, dim=-1).flatten(1), ends.flatten(1)], dim=1)
    return PackedWeights(packed, None, K_FORMATS[kind], inputs, outputs)


def _q4_k(blocks: Tensor) -> _Blocks:
    return _Blocks(_nibbles(blocks[:, 16:]), _six_bits(blocks), _factors(blocks[:, :4]))


def _q5_k(blocks: Tensor) -> _Blocks:
    groups = torch.arange(8, dtype=torch.uint8)[:, None]
    fifth = blocks[:, None, 16:48] >> groups & 1  # [B, 8, 32]
    steps = _nibbles(blocks[:, 48:]) | fifth.flatten(1) << 4
    return _Blocks(steps, _six_bits(blocks), _factors(blocks[:, :4]))


def _q6_k(blocks: Tensor) -> _Blocks:
    low = blocks[:, :128].reshape(-1, 2, 1, 64)  # two halves of the block
    places = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> places & 3  # [B, 2, 4, 32]
    steps = torch.cat([low & 15, low >> 4], dim=2).view(-1, 2, 4, 32) | high << 4
    whole = blocks[:, 192:208].reshape(-1, 8, 2)
    return _Blocks(steps.flatten(1), whole, _factors(blocks[:, 208:]))


_KINDS: dict[Kind, tuple[int, Callable[[Tensor], _Blocks]]] = {
    Kind.Q4_K: (144, _q4_k),
    Kind.Q5_K: (176, _q5_k),
    Kind.Q6_K: (210, _q6_k),
}
"""Bytes of a block, and what reads blocks."""


def _nibbles(quarters: Tensor) -> Tensor:
    """[B, 128] -> [B, 256]: the low nibbles of 32 bytes are a group, the high ones the next."""
    chunks = quarters.reshape(-1, 4, 1, 32)
    return torch.cat([chunks & 15, chunks >> 4], dim=2).flatten(1)


def _six_bits(blocks: Tensor) -> Tensor:
    """[B, 8, 2] eight scales and eight least numbers of 6 bits, from 12 bytes."""
    first, second, both = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat([first & 63, (both & 15) | (first >> 2 & 48)], dim=1)
    least = torch.cat([second & 63, (both >> 4) | (second >> 2 & 48)], dim=1)
    return torch.stack([scales, least], dim=2)


def _factors(blocks: Tensor) -> Tensor:
    """The float16 numbers in bytes."""
    return blocks.contiguous().view(torch.float16)
