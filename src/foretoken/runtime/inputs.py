"""What a pass is given: the nodes of several rows, side by side.

Rows may have different numbers of nodes. Attention wants a rectangle, [B, N] with padding; all
other work is done node by node and is best done on the nodes alone, [T]: in a batch of sixteen in
which one row drafts five tokens, padding would be four fifths of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

__all__ = ["PassInputs"]


@dataclass(frozen=True)
class PassInputs:
    """One pass over B rows of at most N nodes, T in all.

    Args:
        tokens: [B, N].
        positions: [B, N].
        mask: [B, 1, padded_rows(N), S] additive.
        used: [T] which of the B N places are nodes, ascending; None where all of them are.
    """

    tokens: Tensor
    positions: Tensor
    mask: Tensor
    used: Tensor | None = None

    @property
    def num_nodes(self) -> int:
        """T."""
        return self.tokens.numel() if self.used is None else len(self.used)

    def flat(self, padded: Tensor) -> Tensor:
        """[B, N, ...] -> [T, ...]: the nodes."""
        flat = padded.flatten(0, 1)
        return flat if self.used is None else flat[self.used]

    def padded(self, flat: Tensor) -> Tensor:
        """[T, ...] -> [B, N, ...]: zeros where no node is."""
        shape = (*self.tokens.shape, *flat.shape[1:])
        if self.used is None:
            return flat.view(shape)
        places = flat.new_zeros(self.tokens.numel(), *flat.shape[1:])
        places[self.used] = flat
        return places.view(shape)
