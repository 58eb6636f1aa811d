"""The target's noise, computed where the logits are: `noise.py` in tensor operations.

Philox4x64-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3") as NumPy counts: the
numbers of position t under a seed are those `Noise` gives, bit for bit, until the logarithms.
PyTorch has no unsigned 64-bit arithmetic, so that words are int64 and wrap around.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

__all__ = ["block_numbers", "gumbel", "signed", "uniform"]

Words: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor]

ROUNDS = 10
MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
WEYL = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
LOW = 0xFFFFFFFF


def signed(word: int) -> int:
    """The int64 with the bits of this unsigned 64-bit word; higher bits are dropped."""
    word &= 2**64 - 1
    return word - 2**64 if word >= 2**63 else word


def block_numbers(size: int, device: torch.device) -> Tensor:
    """[blocks] counters of the blocks of four words that `size` numbers take.

    NumPy counts before it draws, so that the first block has number 1. They are to be made outside
    of what is compiled: TorchInductor takes products with an `arange` for indices, which do not
    wrap around.
    """
    return torch.arange(1, 1 + -(-size // 4), device=device)


def gumbel(seeds: Tensor, positions: Tensor, blocks: Tensor, size: int) -> Tensor:
    """Standard Gumbel noise for every token: see `uniform`; float64."""
    return -(-uniform(seeds, positions, blocks, size).log()).log()


def uniform(seeds: Tensor, positions: Tensor, blocks: Tensor, size: int) -> Tensor:
    """The numbers in (0, 1) from which `Noise.gumbel` makes the target's noise.

    Args:
        seeds: [...] the requests' seeds, as `signed` words.
        positions: [...] of the tokens that are drawn.
        blocks: `block_numbers` of `size`.
        size: V.

    Returns:
        [..., V], float64.
    """
    seeds, positions = seeds[..., None], positions[..., None]  # [..., 1]
    nothing = torch.zeros_like(positions)
    raw = torch.stack(_philox((blocks, nothing, positions, nothing), seeds), dim=-1)
    raw = raw.flatten(-2)[..., :size]  # [..., V]
    # As in `Noise`: 52 bits and a half.
    return (_shifted(raw, 12).double() + 0.5) * 2.0**-52


def _philox(counter: Words, key: Tensor) -> Words:
    """Four words of the stream with this key (its high word is 0) at this counter."""
    first, second, third, fourth = counter
    for index in range(ROUNDS):
        low_key = key + signed(index * WEYL[0])
        high_key = signed(index * WEYL[1])
        high, low = _product(first, MULTIPLIERS[0])
        other_high, other_low = _product(third, MULTIPLIERS[1])
        first, second, third, fourth = (
            other_high ^ second ^ low_key,
            other_low,
            high ^ fourth ^ high_key,
            low,
        )
    return first, second, third, fourth


def _product(words: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """High and low word of the 128-bit products, from products of half words."""
    low, high = words & LOW, _shifted(words, 32)
    factor_low, factor_high = factor & LOW, factor >> 32
    carry = _shifted(low * factor_low, 32)
    middle = low * factor_high + carry
    other = high * factor_low + (middle & LOW)
    return (
        high * factor_high + _shifted(middle, 32) + _shifted(other, 32),
        words * signed(factor),
    )


def _shifted(words: Tensor, bits: int) -> Tensor:
    """Unsigned shift to the right."""
    shifted: Tensor = (words >> bits) & (2 ** (64 - bits) - 1)
    return shifted
