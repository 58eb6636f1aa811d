"""The KV slab: preallocated keys and values of all rows, with commit and rollback.

Row r of every layer holds the KV of one request's tokens in order. A forward pass writes the new
nodes behind the committed ones; `commit` keeps the accepted path, and whatever lies behind the
committed length is overwritten by the next pass. Rows in use are always the first ones, so that a
pass over all of them is a view and never a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from transformers import Cache

from foretoken.runtime.attention import KEY_BLOCK

__all__ = ["KVBlock", "KVSlab", "OverBudget", "SlabFull", "is_out_of_memory", "whole_blocks"]

KVBlock: TypeAlias = tuple[tuple[Tensor, Tensor], ...]
"""Keys and values [G, n, D] of n positions of one row, of every layer."""


class SlabFull(Exception):  # noqa: N818 - the engine makes room and tries again
    """The slab cannot grow. Nothing has been written, and what it holds is as it was."""


class OverBudget(SlabFull):
    """It cannot because of its `limit`, whatever memory there is."""


class KVSlab(Cache):
    """KV of all rows, as the `past_key_values` of a Transformers module.

    Capacity grows on demand: positions in blocks of `KEY_BLOCK` (law 7 needs whole blocks), rows
    by doubling. Buffers are made when the first pass shows the shapes: [rows, G, S, D] per layer.

    Attributes:
        lengths: committed tokens of each row.
        limit: most cells (rows x positions) to grow to; None grows as long as there is memory.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.lengths: list[int] = []
        self.limit: int | None = None
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        self._rows = 1
        self._positions = KEY_BLOCK
        self._first, self._last = 0, 0
        self._span = 0
        self._starts: Sequence[int] = ()
        self._counts: Sequence[int] = ()
        self._num_nodes = 0
        self._slots: Tensor | None = None
        self._places: tuple[Tensor, Tensor] | None = None
        self._addresses: list[tuple[int, int, int, int]] | None = None

    # Rows

    @torch.inference_mode()
    def add_row(self) -> int:
        """A fresh row behind the others; its index.

        Raises:
            SlabFull: there is no room for it.
        """
        if len(self.lengths) == self._rows:
            self._fit(self._rows + 1, self._positions_in_use)
        self.lengths.append(0)
        return len(self.lengths) - 1

    @torch.inference_mode()
    def remove_row(self, row: int) -> int:
        """Free a row; the last row moves into its place.

        Returns:
            Index of the row that moved (equal to `row` where none had to).
        """
        last = len(self.lengths) - 1
        if row != last:
            self.copy_row(last, row)
        self.lengths.pop()
        return last

    @torch.inference_mode()
    def copy_row(self, source: int, row: int) -> None:
        """Give `row` the committed KV of `source` in place of its own."""
        length = self.lengths[source]
        for buffers in (self._keys, self._values):
            for buffer in buffers.values():
                buffer[row, :, :length] = buffer[source, :, :length]
        self.lengths[row] = length

    def commit(self, row: int, nodes: Sequence[int]) -> None:
        """Keep these nodes of the last pass, in this order; the others are discarded.

        Args:
            row: the row.
            nodes: indices into the row's tree, ascending, the root (0) first.
        """
        start = self.lengths[row]
        if nodes[-1] != len(nodes) - 1:  # a chain already lies in order
            self._move_together(row, start, nodes)
        self.lengths[row] = start + len(nodes)

    @torch.inference_mode()
    def _move_together(self, row: int, start: int, nodes: Sequence[int]) -> None:
        source = torch.tensor(nodes) + start
        for buffers in (self._keys, self._values):
            for buffer in buffers.values():
                kept = buffer[row, :, source.to(buffer.device)]
                buffer[row, :, start : start + len(nodes)] = kept

    def rollback(self, row: int, length: int) -> None:
        """Forget everything behind the first `length` tokens."""
        assert 0 <= length <= self.lengths[row]
        self.lengths[row] = length

    # One forward pass

    def begin(
        self, first: int, starts: Sequence[int], counts: Sequence[int], num_nodes: int
    ) -> int:
        """Prepare a pass over adjacent rows.

        Args:
            first: the first row.
            starts: per row, the slot of its first new node: behind the committed tokens, and behind
                nodes of earlier passes that stay.
            counts: new nodes per row.
            num_nodes: most of them, padding included.

        Returns:
            S, the number of key positions that `update` will return, a multiple of `KEY_BLOCK`.
        """
        self._span = whole_blocks(max(starts) + num_nodes)
        if self._span > self._positions:
            self._grow(self._rows, self._span)
        self._first, self._last = first, first + len(starts)
        self._starts, self._counts, self._num_nodes = starts, counts, num_nodes
        self._slots = self._places = None
        return self._span

    @property
    def _padded_slots(self) -> Tensor:
        """[B, N] slots of a pass over several rows, padding included."""
        if self._slots is None:
            self._slots = torch.tensor(self._starts)[:, None] + torch.arange(self._num_nodes)
        return self._slots

    @property
    def _node_places(self) -> tuple[Tensor, Tensor]:
        """Rows and slots [T] of the nodes of a pass over several rows."""
        if self._places is None:
            counts = torch.tensor(self._counts)
            inside = torch.cat([torch.arange(count) for count in self._counts])
            starts = torch.tensor(self._starts).repeat_interleave(counts)
            self._places = torch.arange(len(counts)).repeat_interleave(counts), starts + inside
        return self._places

    def reserve(self, layers: Sequence[int], like: Tensor) -> None:
        """Make the buffers of these layers, for a network that writes them by address.

        Args:
            layers: which.
            like: [1, G, 1, D] of the right dtype.
        """
        for layer in layers:
            if layer not in self._keys:
                self._keys[layer], self._values[layer] = (self._new_buffer(like) for _ in range(2))

    @property
    def addresses(self) -> list[tuple[int, int, int, int]]:
        """Of each layer: where keys and values lie, and the positions of a row in either."""
        if self._addresses is None:
            pairs = [(self._keys[layer], self._values[layer]) for layer in sorted(self._keys)]
            self._addresses = [
                (keys.data_ptr(), values.data_ptr(), keys.shape[2], values.shape[2])
                for keys, values in pairs
            ]
        return self._addresses

    def write(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Write a layer's new keys and values of the nodes [T, G, D]; all back, [B, G, S, D]."""
        if layer not in self._keys:
            shape = (1, keys.shape[1], 1, keys.shape[2])
            self._keys[layer] = self._new_buffer(keys.new_empty(shape))
            self._values[layer] = self._new_buffer(values.new_empty(shape))
        return (
            self._write_nodes(self._keys[layer], keys),
            self._write_nodes(self._values[layer], values),
        )

    def _write_nodes(self, buffer: Tensor, states: Tensor) -> Tensor:
        rows = buffer[self._first : self._last]  # [B, G, all positions, D]
        if len(self._starts) == 1:
            start = self._starts[0]
            rows[0, :, start : start + len(states)] = states.transpose(0, 1)
        else:
            node_rows, slots = self._node_places
            # Indexing dimensions 0 and 2 puts them first: [T, G, D].
            rows[node_rows, :, slots] = states
        return rows[:, :, : self._span]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write a layer's new keys and values [B, G, N, D]; all of them back, [B, G, S, D]."""
        if layer_idx not in self._keys:
            self._keys[layer_idx] = self._new_buffer(key_states)
            self._values[layer_idx] = self._new_buffer(value_states)
        return (
            self._write(self._keys[layer_idx], key_states),
            self._write(self._values[layer_idx], value_states),
        )

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens of the first row of the pass; modules use it only where no mask is passed."""
        return self.lengths[self._first] if self.lengths else 0

    def _write(self, buffer: Tensor, states: Tensor) -> Tensor:
        rows = buffer[self._first : self._last]  # [B, G, all positions, D]
        if len(self._starts) == 1:
            start = self._starts[0]
            rows[:, :, start : start + states.shape[2]] = states
        else:
            row_index = torch.arange(len(rows), device=buffer.device)[:, None]  # [B, 1]
            slots = self._padded_slots.to(buffer.device)  # [B, N]
            # Indexing dimensions 0 and 2 puts them first: [B, N, G, D].
            rows[row_index, :, slots] = states.transpose(1, 2)
        return rows[:, :, : self._span]

    def _new_buffer(self, states: Tensor) -> Tensor:
        _, heads, _, width = states.shape
        self._addresses = None
        # Zeros, not empty: a masked position still enters a product, and NaN times 0 is NaN.
        return states.new_zeros(self._rows, heads, self._positions, width)

    def _grow(self, rows: int, positions: int) -> None:
        """Room for this many positions in every row in use."""
        assert rows == self._rows, "rows are added one by one"
        self._fit(max(1, len(self.lengths)), max(positions, self._positions_in_use))

    # Capacity

    @property
    def cell_bytes(self) -> int:
        """Bytes of one position of one row, all layers together; 0 before the first pass."""
        buffers = (*self._keys.values(), *self._values.values())
        return sum(b.shape[1] * b.shape[3] * b.element_size() for b in buffers)

    @property
    def cells(self) -> int:
        """Rows x positions there is memory for."""
        return self._rows * self._positions

    def has_room(self, rows: int, tokens: int) -> bool:
        """Whether the limit allows this many rows, the longest of this many tokens."""
        return self.limit is None or rows * whole_blocks(tokens) <= self.limit

    @torch.inference_mode()
    def shrink(self) -> None:
        """Give back the memory of what is not in use."""
        self._resize(max(1, len(self.lengths)), self._positions_in_use)

    def read(self, row: int, start: int, stop: int) -> KVBlock:
        """A copy of the KV of these committed positions."""
        assert stop <= self.lengths[row]
        return tuple(
            (self._keys[layer][row, :, start:stop].clone(), values[row, :, start:stop].clone())
            for layer, values in self._values.items()
        )

    @torch.inference_mode()
    def append(self, row: int, block: KVBlock) -> None:
        """Commit KV that `read` gave, behind what the row has.

        Raises:
            SlabFull: there is no room for it.
        """
        start = self.lengths[row]
        stop = start + block[0][0].shape[1]
        if stop > self._positions:
            self._fit(len(self.lengths), whole_blocks(max(stop, *self.lengths)))
        for layer, (keys, values) in zip(self._values, block, strict=True):
            self._keys[layer][row, :, start:stop] = keys
            self._values[layer][row, :, start:stop] = values
        self.lengths[row] = stop

    @property
    def _positions_in_use(self) -> int:
        return whole_blocks(max(self.lengths, default=0))

    def _fit(self, rows: int, positions: int) -> None:
        """Grow to at least this size, generously where that can be had.

        Raises:
            SlabFull: not even this much can be had.
        """
        ample = self._rows if rows <= self._rows else max(rows, 2 * self._rows)
        longest = max(positions, self._positions)
        shapes = ((ample, longest), (rows, longest), (rows, positions))
        allowed = [s for s in shapes if self.limit is None or s[0] * s[1] <= self.limit]
        if not allowed:
            raise OverBudget(f"{rows} sequences of {positions} positions are over the budget")
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
        """Layer by layer, so that at no time there is more than one layer twice.

        A failure leaves layers of different sizes, all of which hold what is in use.
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
    """Whether there was no room: on a CPU PyTorch says so only in words."""
    if isinstance(error, SlabFull | MemoryError | torch.OutOfMemoryError):
        return True
    words = ("can't allocate memory", "not enough memory")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)
