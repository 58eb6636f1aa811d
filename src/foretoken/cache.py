"""The KV slab: preallocated keys and values of all rows, with commit and rollback.

Row r of every layer holds the KV of one request's tokens in order. A forward pass writes the new
nodes behind the committed ones; `commit` keeps the accepted path, and whatever lies behind the
committed length is overwritten by the next pass. Rows in use are always the first ones, so that a
pass over all of them is a view and never a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from foretoken.runtime.attention import KEY_BLOCK

__all__ = ["KVSlab"]


class KVSlab(Cache):
    """KV of all rows, as the `past_key_values` of a Transformers module.

    Capacity grows on demand: positions in blocks of `KEY_BLOCK` (law 7 needs whole blocks), rows
    by doubling. Buffers are made when the first pass shows the shapes: [rows, G, S, D] per layer.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.lengths: list[int] = []
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        self._rows = 1
        self._positions = KEY_BLOCK
        self._first, self._last = 0, 0
        self._span = 0
        self._starts: list[int] = []
        self._slots: Tensor | None = None

    # Rows

    @torch.inference_mode()
    def add_row(self) -> int:
        """A fresh row behind the others; its index."""
        self.lengths.append(0)
        if len(self.lengths) > self._rows:
            self._grow(2 * self._rows, self._positions)
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

    @torch.inference_mode()
    def commit(self, row: int, nodes: Sequence[int]) -> None:
        """Keep these nodes of the last pass, in this order; the others are discarded.

        Args:
            row: the row.
            nodes: indices into the row's tree, ascending, the root (0) first.
        """
        start = self.lengths[row]
        if list(nodes) != list(range(len(nodes))):  # a chain already lies in order
            source = torch.tensor(nodes) + start
            for buffers in (self._keys, self._values):
                for buffer in buffers.values():
                    kept = buffer[row, :, source.to(buffer.device)]
                    buffer[row, :, start : start + len(nodes)] = kept
        self.lengths[row] = start + len(nodes)

    def rollback(self, row: int, length: int) -> None:
        """Forget everything behind the first `length` tokens."""
        assert 0 <= length <= self.lengths[row]
        self.lengths[row] = length

    # One forward pass

    def begin(self, rows: range, num_nodes: int, known: Sequence[int]) -> int:
        """Prepare a pass over adjacent rows that writes `num_nodes` nodes in each.

        Args:
            rows: the rows of the pass.
            num_nodes: nodes written per row.
            known: per row, nodes of earlier passes that lie behind the committed tokens and stay;
                the new ones are written behind them.

        Returns:
            S, the number of key positions that `update` will return, a multiple of `KEY_BLOCK`.
        """
        self._starts = [self.lengths[row] + skip for row, skip in zip(rows, known, strict=True)]
        needed = max(self._starts) + num_nodes
        self._span = -(-needed // KEY_BLOCK) * KEY_BLOCK
        if self._span > self._positions:
            self._grow(self._rows, self._span)
        self._first, self._last = rows.start, rows.stop
        # [B, N] positions to write; one row is written as a slice instead.
        starts = torch.tensor(self._starts)[:, None]
        self._slots = None if len(rows) == 1 else starts + torch.arange(num_nodes)
        return self._span

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
        if self._slots is None:
            start = self._starts[0]
            rows[:, :, start : start + states.shape[2]] = states
        else:
            row_index = torch.arange(len(rows), device=buffer.device)[:, None]  # [B, 1]
            slots = self._slots.to(buffer.device)  # [B, N]
            # Indexing dimensions 0 and 2 puts them first: [B, N, G, D].
            rows[row_index, :, slots] = states.transpose(1, 2)
        return rows[:, :, : self._span]

    def _new_buffer(self, states: Tensor) -> Tensor:
        _, heads, _, width = states.shape
        # Zeros, not empty: a masked position still enters a product, and NaN times 0 is NaN.
        return states.new_zeros(self._rows, heads, self._positions, width)

    def _grow(self, rows: int, positions: int) -> None:
        for buffers in (self._keys, self._values):
            for layer, old in buffers.items():
                grown = old.new_zeros(rows, old.shape[1], positions, old.shape[3])
                grown[: old.shape[0], :, : old.shape[2]] = old
                buffers[layer] = grown
        self._rows, self._positions = rows, positions
