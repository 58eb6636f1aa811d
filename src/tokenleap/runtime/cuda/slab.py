"""`StaticSlab`: the KV slab of a GPU, whose buffers stay where they are while it does not grow.

A graph reads and writes the addresses that it was captured with. So memory is allocated in advance,
and doubled when it is too small. Then `version` changes, and graphs captured before are dropped.
Tensors on the device say which slots a pass writes to. Each row has one more position than its
capacity, after everything that attention reads. Padding writes there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenleap.runtime.attention import KEY_BLOCK
from tokenleap.runtime.cuda.buckets import doubled
from tokenleap.runtime.kv_slab import KVSlab, SlabFull, whole_blocks

__all__ = ["StaticSlab"]


class StaticSlab(KVSlab):
    """A `KVSlab` for captured passes; other passes can use it, too.

    Args:
        positions: positions per row to begin with, rounded up to whole key blocks.
    """

    def __init__(self, rows: int = 4, positions: int = KEY_BLOCK) -> None:
        super().__init__()
        self._rows, self._positions = rows, whole_blocks(positions)
        self.version = 0

    @property
    def allocated(self) -> bool:
        """Whether there are buffers. The first pass makes them."""
        return bool(self._keys)

    @property
    def rows(self) -> int:
        """Rows that are allocated."""
        return self._rows

    @property
    def positions(self) -> int:
        """Positions that are allocated per row, without `scratch`."""
        return self._positions

    @property
    def scratch(self) -> int:
        """The position that padding writes to."""
        return self._positions

    def shrink(self) -> None:
        """Free memory only if there is more than `limit`: when buffers move, graphs are lost."""
        if self.limit is not None and self.cells + self._state_cells() > self.limit:
            super().shrink()

    def begin_static(self, slots: Tensor, span: int) -> None:
        """Prepare a pass over the first rows that reads its slots from a tensor when it runs.

        Args:
            slots: [B, N] the slots to write to, on the device; `scratch` for padding.
        """
        rows, nodes = slots.shape
        row_numbers = torch.arange(rows, device=slots.device)
        self._first, self._last, self._span = 0, rows, span
        self._starts = ()  # the slots below say where to write
        self._slots = slots
        self._places = row_numbers[:, None].expand(rows, nodes).flatten(), slots.flatten()

    @property
    def _padded_slots(self) -> Tensor:
        """See `KVSlab`; moved to the device once per pass, not in every layer."""
        if self._slots is None:
            self._slots = super()._padded_slots.to(self._device)
        return self._slots

    @property
    def _node_places(self) -> tuple[Tensor, Tensor]:
        """See `KVSlab`; moved to the device once per pass, not in every layer."""
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
