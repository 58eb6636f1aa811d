"""Tables of rotary angles, as the C++ code reads them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tokenleap.runtime.llama import Rotary

__all__ = ["AngleTables"]

_ANGLES = 256
"""Angles are computed for this many positions at once."""


class AngleTables:
    """Cosines and sines of one or more rotary embeddings, of half of a head each.

    Args:
        rotaries: the embeddings.
        width: D.
    """

    def __init__(self, rotaries: Sequence[Rotary], width: int) -> None:
        self._rotaries, self._half = rotaries, width // 2
        shape = (len(rotaries), 0, self._half)
        self.cos = torch.empty(shape, dtype=torch.float32, device="cpu")  # [R, positions, D/2]
        self.sin = torch.empty(shape, dtype=torch.float32, device="cpu")

    @property
    def positions(self) -> int:
        """How many positions the tables have."""
        return self.cos.shape[1]

    def reach(self, positions: int) -> None:
        """Extend the tables, if there are any, to at least this many positions.

        They grow by pieces of one size, because the bits of PyTorch's results may depend on the
        number of positions (invariant 7).
        """
        if not self._rotaries:
            return
        first = range(self.positions, positions, _ANGLES)
        pieces = [self._piece(position) for position in first]
        if pieces:
            cos, sin = (torch.cat(parts, dim=1) for parts in zip(*pieces, strict=True))
            self.cos = torch.cat([self.cos, cos], dim=1)
            self.sin = torch.cat([self.sin, sin], dim=1)

    def _piece(self, first: int) -> tuple[Tensor, Tensor]:
        """[R, positions, D/2] each, from a position on."""
        angles = [each.angles(first, _ANGLES, torch.float32) for each in self._rotaries]
        cos, sin = zip(*angles, strict=True)
        return torch.stack(cos)[..., : self._half], torch.stack(sin)[..., : self._half]
