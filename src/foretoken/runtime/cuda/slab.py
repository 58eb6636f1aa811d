"""The KV slab of a GPU: buffers that stay where they are, and places that are tensors.

A graph reads and writes the addresses it was captured with. Capacity is therefore taken in advance
and doubled where it does not suffice; `version` then changes, and graphs captured before are
dropped. Tensors on the device say where a pass writes. Every row has one position
more than its capacity, behind all that attention reads: padding writes there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foretoken.runtime.attention import KEY_BLOCK
from foretoken.runtime.cuda.buckets import doubled
from foretoken.runtime.kv_slab import KVSlab, SlabFull, whole_blocks

__all__ = ["StaticSlab"]


class StaticSlab(KVSlab):
    """A `KVSlab` for captured passes, and for others.

    Args:
        rows: how many to begin with.
        positions: of each row, to begin with; rounded up to whole key blocks.

    Attributes:
        version: changes whenever buffers move.
    """

    def __init__(self, rows: int = 4, positions: int = KEY_BLOCK) -> None:
        super().__init__()
        self._rows, self._positions = rows, whole_blocks(positions)
        self.version = 0

    @property
    def allocated(self) -> bool:
        """Whether a pass has shown the shapes, so that there are buffers."""
        return bool(self._keys)

    @property
    def rows(self) -> int:
        """Rows there is memory for."""
        return self._rows

    @property
    def positions(self) -> int:
        """Positions there is memory for in each row."""
        return self._positions

    @property
    def scratch(self) -> int:
        """The position that padding writes to."""
        return self._positions

    def make_room(self, tokens: int) -> None:
        """Make rows at least this long.

        Raises:
            SlabFull: there is no room for it.
        """
        if tokens > self._positions:
            self._grow(self._rows, whole_blocks(tokens))

    def shrink(self) -> None:
        """Give back memory only where there is more than the limit: moving costs the graphs."""
        if self.limit is not None and self.cells + self._state_cells() > self.limit:
            super().shrink()

    def begin_static(self, slots: Tensor, span: int) -> None:
        """Instead of `begin`: a pass over the first rows whose places are read when it runs.

        Args:
            slots: [B, N] positions to write, on the device; that of padding is `scratch`.
            span: S, key positions that are read.
        """
        rows, nodes = slots.shape
        row_numbers = torch.arange(rows, device=slots.device)
        self._first, self._last, self._span = 0, rows, span
        self._starts = ()  # no Python number says where to write
        self._slots = slots
        self._places = row_numbers[:, None].expand(rows, nodes).flatten(), slots.flatten()

    @property
    def _padded_slots(self) -> Tensor:
        """As the parent's, moved once and not in every layer."""
        if self._slots is None:
            self._slots = super()._padded_slots.to(self._device)
        return self._slots

    @property
    def _node_places(self) -> tuple[Tensor, Tensor]:
        """As the parent's, moved once and not in every layer."""
        if self._places is None:
            rows, slots = super()._node_places
            self._places = rows.to(self._device), slots.to(self._device)
        return self._places

    @property
    def _device(self) -> torch.device:
        return self._keys[0].device

    def _new_buffer(self, states: Tensor) -> Tensor:
        _, heads, _, width = states.shape
        self._addresses = None
        return states.new_zeros(self._rows, heads, self._positions + 1, width)

    def _fit(self, rows: int, positions: int) -> None:
        try:
            super()._fit(rows, doubled(positions))
        except SlabFull:
            super()._fit(rows, positions)

    def _resize(self, rows: int, positions: int) -> None:
        self.version += 1
        try:
            super()._resize(rows, positions + 1)
        finally:
            self._positions -= 1
