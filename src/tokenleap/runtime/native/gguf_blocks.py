"""Packs blocks of a GGUF file in their own numbers, where a kernel's format has them.

    Q4_0, Q4_1       -> int4           a scale and a least number (Q4_0: -8 scales) per 32 weights
    Q5_1             -> int5           the same
    Q8_0, Q5_0       -> int8           a scale per 32 weights
    Q4_K, Q5_K, Q6_K -> q4k, q5k, q6k  see `k_blocks.py`

Everything else is dequantized and rounded to int8, which is finer (`packing_gguf.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from tokenleap.runtime.native.k_blocks import K_FORMATS, pack_k_blocks
from tokenleap.runtime.native.pack import GROUP, Format, PackedWeights, pack_steps

__all__ = ["FORMAT_OF", "pack_blocks"]

_Steps: TypeAlias = tuple[Tensor, Tensor, Tensor | None]
"""Steps [B, 32] uint8, scales [B] and least numbers [B] float16, of B groups."""

FORMAT_OF = {
    Kind.Q4_0: Format.INT4,
    Kind.Q4_1: Format.INT4,
    Kind.Q5_0: Format.INT8,
    Kind.Q5_1: Format.INT5,
    Kind.Q8_0: Format.INT8,
    **K_FORMATS,
}
"""The format of kinds whose numbers it has."""


def pack_blocks(kind: Kind, rows: Tensor, inputs: int) -> PackedWeights | None:
    """Pack a layer's blocks.

    Args:
        kind: of `FORMAT_OF`.
        rows: [N, bytes of a row] uint8, contiguous.
        inputs: K.

    Returns:
        None if a scale is not finite: the file is damaged, or has numbers beyond float16.
    """
    if kind in K_FORMATS:
        return pack_k_blocks(kind, rows, inputs)
    size, steps_of = _KINDS[kind]
    steps, scales, least = steps_of(rows.view(-1, size))
    if not scales.isfinite().all() or not (least is None or least.isfinite().all()):
        return None
    count, groups = len(rows), inputs // GROUP
    return pack_steps(
        FORMAT_OF[kind],
        steps.view(count, inputs),
        scales.view(count, groups),
        None if least is None else least.view(count, groups),
    )


def _q4_0(blocks: Tensor) -> _Steps:
    scales = _half(blocks, 0)
    return _nibbles(blocks[:, 2:]), scales, (-8 * scales.float()).half()


def _q4_1(blocks: Tensor) -> _Steps:
    return _nibbles(blocks[:, 4:]), _half(blocks, 0), _half(blocks, 2)


def _q5_0(blocks: Tensor) -> _Steps:
    return _five_bits(blocks[:, 2:]) + (128 - 16), _half(blocks, 0), None


def _q5_1(blocks: Tensor) -> _Steps:
    return _five_bits(blocks[:, 4:]), _half(blocks, 0), _half(blocks, 2)


def _q8_0(blocks: Tensor) -> _Steps:
    return blocks[:, 2:] ^ 128, _half(blocks, 0), None


_KINDS: dict[Kind, tuple[int, Callable[[Tensor], _Steps]]] = {
    Kind.Q4_0: (18, _q4_0),
    Kind.Q4_1: (20, _q4_1),
    Kind.Q5_0: (22, _q5_0),
    Kind.Q5_1: (24, _q5_1),
    Kind.Q8_0: (34, _q8_0),
}
"""Bytes of a block, and what reads blocks."""


def _half(blocks: Tensor, at: int) -> Tensor:
    """[B] the float16 numbers at a place of every block."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16)[:, 0]


def _five_bits(blocks: Tensor) -> Tensor:
    """[B, 20] -> [B, 32]: the fifth bits, then the nibbles."""
    bits = torch.arange(8, dtype=torch.uint8)
    return _nibbles(blocks[:, 4:]) | (blocks[:, :4, None] >> bits & 1).flatten(1) << 4


def _nibbles(halves: Tensor) -> Tensor:
    """[B, 16] -> [B, 32]: the low nibbles, then the high ones."""
    return torch.cat([halves & 15, halves >> 4], dim=1)
