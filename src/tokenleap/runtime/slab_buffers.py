"""The memory of a KV slab: buffers that grow on demand, within a budget.

Each layer has a buffer of keys and one of values, [rows, G, S, D]. They are made when the first
pass shows the sizes. Positions are added in whole blocks of `KEY_BLOCK`, which invariant 7 needs.
Rows are doubled.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import add

import torch
from torch import Tensor

from tokenleap.runtime.attention import KEY_BLOCK

__all__ = ["OverBudget", "SlabBuffers", "SlabFull", "is_out_of_memory", "whole_blocks"]


class SlabFull(Exception):  # noqa: N818 - the engine makes room and tries again
    """The slab cannot grow. Nothing was written, and its contents are unchanged."""


class OverBudget(SlabFull):
    """The slab cannot grow because of its `limit`, although there may be memory."""


class SlabBuffers:
    """The keys and values of all rows and layers, and the state of rows.

    Attributes:
        lengths: committed tokens of each row.
        kept: how many nodes behind them each row keeps for its next tree.
        limit: most cells (rows x positions) to allocate. Row state counts as the cells that would
            take its bytes. With None, the slab grows as long as there is memory.
    """

    def __init__(self) -> None:
        self.lengths: list[int] = []
        self.kept: list[int] = []
        self.limit: int | None = None
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        self._states: list[Sequence[Tensor]] = []  # by row
        self._rows = 1
        self._positions = KEY_BLOCK
        self._addresses: list[tuple[int, int, int, int]] | None = None

    @property
    def state_bytes(self) -> int:
        """Bytes of all rows' state. A tensor that several rows share counts once."""
        tensors = {id(tensor): tensor for state in self._states for tensor in state}
        return sum(tensor.nbytes for tensor in tensors.values())

    def _state_cells(self, more_bytes: int = 0) -> int:
        """The cells of `limit` that row state takes."""
        taken = self.state_bytes + more_bytes
        return -(-taken // self.cell_bytes) if taken and self.cell_bytes else 0

    def has_room(self, rows: int, tokens: int, state_bytes: int = 0) -> bool:
        """Whether `limit` allows this many rows, the longest of this many tokens.

        Args:
            rows: number of rows, those in use included.
            tokens: tokens of the longest row.
            state_bytes: bytes of row state that is to be added.
        """
        if self.limit is None:
            return True
        return rows * whole_blocks(tokens) + self._state_cells(state_bytes) <= self.limit

    def reserve(self, layers: Sequence[int], like: Tensor) -> None:
        """Make the buffers of these layers, for a network that writes to their addresses.

        Args:
            layers: the layers' indices.
            like: [1, G, 1, D] in the dtype and on the device of the buffers.
        """
        for layer in layers:
            if layer not in self._keys:
                self._keys[layer], self._values[layer] = (self._new_buffer(like) for _ in range(2))

    @property
    def addresses(self) -> list[tuple[int, int, int, int]]:
        """By layer: the addresses of keys and values, and the positions per row of both."""
        if self._addresses is None:
            pairs = [(self._keys[layer], self._values[layer]) for layer in sorted(self._keys)]
            self._addresses = [
                (keys.data_ptr(), values.data_ptr(), keys.shape[2], values.shape[2])
                for keys, values in pairs
            ]
        return self._addresses

    def _new_buffer(self, states: Tensor) -> Tensor:
        _, heads, _, width = states.shape
        self._addresses = None
        # Not `empty`: a masked position still enters a product, and NaN times 0 is NaN.
        return states.new_zeros(self._rows, heads, self._positions, width)

    def _grow(self, positions: int) -> None:
        """Make room for this many positions in every row in use."""
        self._fit(max(1, len(self.lengths)), max(positions, self._positions_in_use))

    @property
    def cell_bytes(self) -> int:
        """Bytes of one position of one row, all layers together; 0 before the first pass."""
        buffers = (*self._keys.values(), *self._values.values())
        return sum(b.shape[1] * b.shape[3] * b.element_size() for b in buffers)

    @property
    def held_bytes(self) -> int:
        """Bytes of everything, used or not."""
        return self.cells * self.cell_bytes + self.state_bytes

    @property
    def cells(self) -> int:
        """Cells (rows x positions) that are allocated."""
        return self._rows * self._positions

    @torch.inference_mode()
    def shrink(self) -> None:
        """Free the memory that no row uses."""
        self._resize(max(1, len(self.lengths)), self._positions_in_use)

    @property
    def longest(self) -> int:
        """Slots in use in the longest row: committed tokens and kept nodes."""
        return max(map(add, self.lengths, self.kept), default=0)

    @property
    def _positions_in_use(self) -> int:
        return whole_blocks(self.longest)

    def _fit(self, rows: int, positions: int) -> None:
        """Grow to at least this size, and to twice the rows if possible.

        Raises:
            SlabFull: not even this size is possible.
        """
        ample = self._rows if rows <= self._rows else max(rows, 2 * self._rows)
        longest = max(positions, self._positions)
        shapes = ((ample, longest), (rows, longest), (rows, positions))
        left = None if self.limit is None else self.limit - self._state_cells()
        allowed = [s for s in shapes if left is None or s[0] * s[1] <= left]
        if not allowed:
            raise OverBudget(f"{rows} sequences of {positions} positions exceed the KV budget")
        for index, shape in enumerate(allowed, 1):
            try:
                return self._resize(*shape)
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                if index == len(allowed):
                    raise SlabFull(str(error).splitlines()[0]) from error
        return None

    def _resize(self, rows: int, positions: int) -> None:
        """Replace the buffers one by one, so that never more than one is in memory twice.

        After a failure, buffers have different sizes, and all of them still hold what is in use.
        """
        self._addresses = None
        buffers = [(kv, layer) for kv in (self._keys, self._values) for layer in kv]
        if not buffers:
            self._rows, self._positions = rows, positions
            return
        try:
            for kv, layer in buffers:
                kv[layer] = _resized(kv[layer], rows, positions)
        finally:
            shapes = [kv[layer].shape for kv, layer in buffers]
            self._rows = min(shape[0] for shape in shapes)
            self._positions = min(shape[2] for shape in shapes)


def _resized(old: Tensor, rows: int, positions: int) -> Tensor:
    if (old.shape[0], old.shape[2]) == (rows, positions):
        return old
    new = old.new_zeros(rows, old.shape[1], positions, old.shape[3])
    kept_rows, kept = min(rows, old.shape[0]), min(positions, old.shape[2])
    new[:kept_rows, :, :kept] = old[:kept_rows, :, :kept]
    return new


def whole_blocks(tokens: int) -> int:
    """Positions that a row of this many tokens takes: whole key blocks, at least one."""
    return max(1, -(-tokens // KEY_BLOCK)) * KEY_BLOCK


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error means that memory is short; on a CPU, only PyTorch's message says so."""
    if isinstance(error, SlabFull | MemoryError | torch.OutOfMemoryError):
        return True
    words = ("can't allocate memory", "not enough memory")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)
