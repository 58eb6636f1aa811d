"""Packs weights in the order in which the kernels read them; `formats.h` describes the formats."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import TypeAlias

import torch
import torch.nn.functional as F
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from tokenleap.runtime.llama import LinearWeights

PANEL = 32  # outputs of a panel; `PANEL` in formats.h

GROUP = 32  # inputs that share a scale in int8 and int4; `GROUP` in formats.h

_BLOCK_GROUPS = 8  # groups of a K-quant's block; `BLOCK_GROUPS` in k_blocks.h

_PIECE = 64  # panels that are packed at once

_SMALLEST_SCALE = 6e-8  # the smallest positive number in float16, the dtype of scales


class Format(IntEnum):
    FLOAT32 = 0
    BFLOAT16 = 1
    INT8 = 2
    INT4 = 3
    INT5 = 4
    Q4K = 5
    Q5K = 6
    Q6K = 7


_BITS = {
    Format.INT8: 8,
    Format.INT4: 4,
    Format.INT5: 5,
    Format.Q4K: 4,
    Format.Q5K: 5,
    Format.Q6K: 6,
}
"""Bits of a weight's step."""


@dataclass(frozen=True)
class PackedWeights:
    """A packed linear layer."""

    weight: Tensor
    bias: Tensor | None
    format: Format
    inputs: int
    outputs: int


def panel_bytes(form: Format, inputs: int) -> int | None:
    """Bytes of a panel, as in formats.h; None if the format cannot have so many inputs."""
    match form:
        case Format.FLOAT32:
            return 4 * PANEL * inputs
        case Format.BFLOAT16:
            return None if inputs % 2 else 2 * PANEL * inputs
    groups, rest = divmod(inputs, GROUP)
    k_block = 2 * PANEL * {Format.Q4K: 2, Format.Q5K: 2, Format.Q6K: 1}.get(form, 0)
    if rest or (k_block and groups % _BLOCK_GROUPS):
        return None
    factors = 2 * PANEL if form is Format.INT8 or k_block else 4 * PANEL
    return groups * (GROUP * PANEL * _BITS[form] // 8 + factors) + groups // _BLOCK_GROUPS * k_block


def pack(layer: LinearWeights, form: Format) -> PackedWeights:
    """Pack a layer. Outputs are padded with zeros to a multiple of `PANEL`.

    int8 is symmetric, and int4 has a minimum per group; both round to nearest. Weights from a file
    in GGUF's Q8_0 or Q4_1 keep their values.
    """
    outputs, inputs = layer.weight.shape
    missing = -outputs % PANEL
    weight = F.pad(layer.weight, (0, 0, 0, missing)) if missing else layer.weight
    bias = None if layer.bias is None else F.pad(layer.bias.float(), (0, missing)).contiguous()
    # Piece by piece, because packing a whole output layer takes several times its memory.
    panels = weight.reshape(-1, PANEL, inputs)
    first = _pack(panels[:_PIECE], form)
    packed = first.new_empty(len(panels), *first.shape[1:])
    packed[:_PIECE] = first
    for start in range(_PIECE, len(panels), _PIECE):
        packed[start : start + _PIECE] = _pack(panels[start : start + _PIECE], form)
    return PackedWeights(packed, bias, form, inputs, outputs)


def joined(parts: Sequence[PackedWeights]) -> PackedWeights:
    """One layer of several with the same input, of which all but the last have whole panels."""
    assert all(part.outputs % PANEL == 0 for part in parts[:-1])
    biases = [part.bias for part in parts if part.bias is not None]
    assert len(biases) in (0, len(parts))
    bias = torch.cat(biases) if biases else None
    weight, outputs = torch.cat([part.weight for part in parts]), sum(x.outputs for x in parts)
    return replace(parts[0], weight=weight, bias=bias, outputs=outputs)


def _pack(panels: Tensor, form: Format) -> Tensor:
    inputs = panels.shape[-1]
    match form:
        case Format.FLOAT32:
            packed = panels.float().transpose(1, 2)
        case Format.BFLOAT16:
            packed = panels.bfloat16().view(-1, PANEL, inputs // 2, 2).transpose(1, 2)
        case Format.INT8:
            packed = _int8(panels.view(-1, PANEL, inputs // GROUP, GROUP))
        case Format.INT4:
            packed = _int4(panels.view(-1, PANEL, inputs // GROUP, GROUP))
        case _:
            raise AssertionError(f"weights are not rounded to {form.name}")
    return packed.contiguous()


def halves(packed: PackedWeights) -> tuple[PackedWeights, PackedWeights]:
    """The first and the second half of a layer's outputs, which have whole panels; no biases."""
    assert packed.outputs % (2 * PANEL) == 0
    first, second = packed.weight.chunk(2)
    half = replace(packed, outputs=packed.outputs // 2)
    return replace(half, weight=first), replace(half, weight=second)


def packed_in_turns(gate: PackedWeights, up: PackedWeights) -> PackedWeights:
    assert gate.outputs % PANEL == 0
    both = torch.stack([gate.weight, up.weight], dim=1).flatten(0, 1)
    return replace(gate, weight=both, outputs=2 * gate.outputs)


def in_turns(gate_up: LinearWeights) -> LinearWeights:
    """Interleave the panels of gate and up, so that one thread computes both factors."""

    def turns(both: Tensor) -> Tensor:
        halves = both.view(2, -1, PANEL, *both.shape[1:])  # gate, up
        return halves.transpose(0, 1).flatten(0, 2)

    bias = None if gate_up.bias is None else turns(gate_up.bias)
    return LinearWeights(turns(gate_up.weight), bias)


def pack_steps(form: Format, steps: Tensor, scales: Tensor, least: Tensor | None) -> PackedWeights:
    """Pack a layer that is quantized already, without a bias.

    Steps [N, K] are what is multiplied with the scale, plus 128 for int8; scales and what is added
    to the products, None for int8, are float16 [N, G]. N is a multiple of `PANEL` but for an output
    layer.
    """
    outputs, inputs = steps.shape
    groups = _panels(steps, inputs // GROUP, GROUP)
    padded = _panels(scales, inputs // GROUP)
    if least is None:
        packed = _int8_bytes(groups, padded)
    else:
        packed = _bits_bytes(groups, padded, _panels(least, inputs // GROUP), _BITS[form])
    return PackedWeights(packed, None, form, inputs, outputs)


def _panels(numbers: Tensor, *shape: int) -> Tensor:
    """[N, ...] -> [P, 32, *shape], padded with zeros."""
    return F.pad(numbers, (0, 0, 0, -len(numbers) % PANEL)).view(-1, PANEL, *shape)


def _int8(groups: Tensor) -> Tensor:
    """[P, 32, G, 32] -> [P, G, bytes]."""
    groups = groups.float()
    scales = _as_float16(groups.abs().amax(dim=-1) / 127)  # [P, 32, G]
    steps = (groups / scales.float()[..., None]).round_().clamp_(-127, 127)
    return _int8_bytes((steps + 128).to(torch.uint8), scales)


def _int8_bytes(steps: Tensor, scales: Tensor) -> Tensor:
    """[P, 32, G, 32] uint8 and [P, 32, G] float16 -> [P, G, bytes]."""
    return torch.cat([quads(steps), _bytes(scales)], dim=-1)


def _int4(groups: Tensor) -> Tensor:
    """[P, 32, G, 32] -> [P, G, bytes]."""
    groups = groups.float()
    least = groups.amin(dim=-1).half()
    scales = _as_float16((groups.amax(dim=-1) - least.float()) / 15)
    steps = (groups - least.float()[..., None]) / scales.float()[..., None]
    return _bits_bytes(steps.round_().clamp_(0, 15).to(torch.uint8), scales, least, 4)


def _bits_bytes(steps: Tensor, scales: Tensor, least: Tensor, bits: int) -> Tensor:
    """[P, 32, G, 32] uint8 of so many bits and [P, 32, G] float16 -> [P, G, bytes]."""
    parts = [*split_bits(quads(steps), bits), _bytes(scales), _bytes(least)]
    return torch.cat(parts, dim=-1)


def split_bits(words: Tensor, bits: int) -> list[Tensor]:
    """Bits 0 to 3 of [P, G, 8 * 32 * 4] bytes, two in a byte, and the others, if there are any."""
    low, high = (words & 15).chunk(2, dim=-1)
    parts, more = [low | high << 4], (words >> 4).view(*words.shape[:2], 8, 4 * PANEL)
    if bits == 5:
        parts.append(_gathered(more.unbind(2), 1))
    if bits == 6:  # two words in turn
        parts.append(_gathered(more.view(*words.shape[:2], 4, 8 * PANEL).unbind(2), 2))
    return parts


def _gathered(numbers: tuple[Tensor, ...], bits: int) -> Tensor:
    """Numbers of so many bits in one byte, the first in its lowest bits."""
    gathered = numbers[0].clone()
    for place, number in enumerate(numbers[1:], start=1):
        gathered |= number << bits * place
    return gathered


def _as_float16(scales: Tensor) -> Tensor:
    """Scales as stored. Weights are divided by these, so that rounding a scale adds no error."""
    return scales.clamp(min=_SMALLEST_SCALE).half()


def quads(steps: Tensor) -> Tensor:
    """[P, 32, G, 32] -> [P, G, 8 * 32 * 4]: four inputs of each output in turn."""
    quads = steps.contiguous().view(torch.int32)  # four bytes are moved at once
    return quads.permute(0, 2, 3, 1).contiguous().view(torch.uint8).flatten(2)


def _bytes(scales: Tensor) -> Tensor:
    """[P, 32, G] float16 -> [P, G, 64] bytes."""
    return scales.transpose(1, 2).contiguous().view(torch.uint8)


# Packs GGUF's K-quants without requantizing them; `k_blocks.h` describes the formats.
#
# A weight of a K-quant is `d s q - e m`: d and e are float16 and belong to a block of 256 weights;
# s and m are whole numbers of a group of 32 weights (16 in Q6_K), and q has four to six bits.


K_FORMATS = {Kind.Q4_K: Format.Q4K, Kind.Q5_K: Format.Q5K, Kind.Q6_K: Format.Q6K}
"""The formats of the kinds."""

_BLOCK = 256


@dataclass(frozen=True)
class _Blocks:
    """The numbers of B blocks."""

    steps: Tensor  # [B, 256] uint8: q
    whole: Tensor  # [B, 8, 2] uint8: s and m of a group (Q6_K: s of its halves)
    factors: Tensor  # [B, 1 or 2] float16: d, and e if the kind has it


def pack_k_blocks(kind: Kind, rows: Tensor, inputs: int) -> PackedWeights | None:
    blocks = _K_QUANTS[kind](_as_blocks(kind, rows))
    if not blocks.factors.isfinite().all():
        return None
    outputs, form = len(rows), K_FORMATS[kind]
    steps, whole, factors = (
        each.reshape(outputs, -1) for each in (blocks.steps, blocks.whole, blocks.factors)
    )
    groups = _panels(steps, inputs // GROUP, GROUP)
    pairs = _panels(whole, inputs // GROUP, 2).permute(0, 2, 3, 1).flatten(2)  # [P, G, 2 * 32]
    parts = [*split_bits(quads(groups), _BITS[form]), pairs]
    ends = _panels(factors, inputs // _BLOCK, blocks.factors.shape[1]).permute(0, 2, 3, 1)
    ends = ends.contiguous().view(torch.uint8)  # [P, K/256, 1 or 2, 64]
    packed = torch.cat([torch.cat(parts, dim=-1).flatten(1), ends.flatten(1)], dim=1)
    return PackedWeights(packed, None, form, inputs, outputs)


def _q4_k(blocks: Tensor) -> _Blocks:
    return _Blocks(_nibbles_of_quarters(blocks[:, 16:]), _six_bits(blocks), _factors(blocks[:, :4]))


def _q5_k(blocks: Tensor) -> _Blocks:
    groups = torch.arange(8, dtype=torch.uint8)[:, None]
    fifth = blocks[:, None, 16:48] >> groups & 1  # [B, 8, 32]
    steps = _nibbles_of_quarters(blocks[:, 48:]) | fifth.flatten(1) << 4
    return _Blocks(steps, _six_bits(blocks), _factors(blocks[:, :4]))


def _q6_k(blocks: Tensor) -> _Blocks:
    low = blocks[:, :128].reshape(-1, 2, 1, 64)  # two halves of the block
    places = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> places & 3  # [B, 2, 4, 32]
    steps = torch.cat([low & 15, low >> 4], dim=2).view(-1, 2, 4, 32) | high << 4
    whole = blocks[:, 192:208].reshape(-1, 8, 2)
    return _Blocks(steps.flatten(1), whole, _factors(blocks[:, 208:]))


_K_QUANTS: dict[Kind, Callable[[Tensor], _Blocks]] = {
    Kind.Q4_K: _q4_k,
    Kind.Q5_K: _q5_k,
    Kind.Q6_K: _q6_k,
}


def _as_blocks(kind: Kind, rows: Tensor) -> Tensor:
    """Rows of bytes as the blocks [B, bytes of a block] of a kind."""
    return rows.view(-1, GGML_QUANT_SIZES[kind][1])


def _nibbles_of_quarters(quarters: Tensor) -> Tensor:
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
    return blocks.contiguous().view(torch.float16)


# Packs blocks of a GGUF file without requantizing them, where a kernel's format allows.
#
#     Q4_0, Q4_1       -> int4           a scale and a least number (Q4_0: -8 scales) per 32 weights
#     Q5_1             -> int5           the same
#     Q8_0, Q5_0       -> int8           a scale per 32 weights
#     Q4_K, Q5_K, Q6_K -> q4k, q5k, q6k  see above
#
# Everything else is dequantized and rounded to int8, which is finer (`runtime/packed.py`).


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
    """Pack a layer's blocks [N, bytes of a row], contiguous.

    None if a scale is not finite: the file is damaged, or has numbers beyond float16.
    """
    if kind in K_FORMATS:
        return pack_k_blocks(kind, rows, inputs)
    steps, scales, least = _KINDS[kind](_as_blocks(kind, rows))
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


_KINDS: dict[Kind, Callable[[Tensor], _Steps]] = {
    Kind.Q4_0: _q4_0,
    Kind.Q4_1: _q4_1,
    Kind.Q5_0: _q5_0,
    Kind.Q5_1: _q5_1,
    Kind.Q8_0: _q8_0,
}


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
