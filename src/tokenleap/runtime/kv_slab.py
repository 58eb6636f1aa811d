"""The KV slab: preallocated keys and values of all rows, with commit and rollback.

Row r of each layer holds the KV of one request's tokens in order. A pass writes the KV of its nodes
after the committed tokens. `commit` keeps that of the accepted path, and the next pass overwrites
the rest. It may also keep the KV of nodes that are not committed, after the committed tokens: they
are the first nodes of the row's next tree, and need not be computed again (beam search). The rows
in use are always the first ones, so a pass over all of them needs only a view.

A row may also carry state that is written once and never rolled back, such as the keys and values
of an encoder-decoder's cross-attention. It is moved, copied and freed with its row.

`passes.py` manages the rows. During a pass, `lean.py` calls `write`, Transformers modules call
`update`, and native code writes to the addresses of the buffers.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from math import prod
from mmap import ACCESS_COPY, mmap
from operator import add
from typing import Any, TypeAlias

import torch
from torch import Tensor
from transformers import Cache

from tokenleap.runtime.attention import KEY_BLOCK

# The memory of a KV slab: buffers that grow on demand, within a budget.
#
# Each layer has a buffer of keys and one of values, [rows, G, S, D]. They are made when the first
# pass shows the sizes. Positions are added in whole blocks of `KEY_BLOCK`, which invariant 7 needs.
# Rows are doubled.


class SlabFull(Exception):  # noqa: N818 - the engine makes room and tries again
    """The slab cannot grow. Nothing was written, and its contents are unchanged."""


class OverBudget(SlabFull):
    """The slab cannot grow because of its `limit`, although there may be memory."""


class SlabBuffers:
    """The keys and values of all rows and layers, and the state of rows.

    `kept` is how many nodes after its tokens each row keeps for its next tree. `limit` is the most
    cells (rows x positions) to allocate, if any. Row state counts as the cells that would take its
    bytes. `least_positions` are in every row, and passes read no fewer; rows are allocated in
    multiples of `row_multiple`.
    """

    def __init__(self) -> None:
        self.lengths: list[int] = []
        self.kept: list[int] = []
        self.limit: int | None = None
        self.row_multiple, self.least_positions = 1, KEY_BLOCK
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        self._states: list[Sequence[Tensor]] = []  # by row
        self._rows = 1
        self._positions = KEY_BLOCK
        self._written = 0  # positions that passes may have written to
        self._addresses: array[int] | None = None
        # Native code that does what `_move_together` does, given `addresses`.
        self.mover: Callable[[array[int], int, int, Sequence[int]], object] | None = None

    @property
    def state_bytes(self) -> int:
        """Bytes of all rows' state. A tensor that several rows share counts once."""
        tensors = {id(tensor): tensor for state in self._states for tensor in state}
        return sum(tensor.nbytes for tensor in tensors.values())

    def _state_cells(self, more_bytes: int = 0) -> int:
        taken = self.state_bytes + more_bytes
        return -(-taken // self.cell_bytes) if taken and self.cell_bytes else 0

    def has_room(self, rows: int, tokens: int, state_bytes: int = 0) -> bool:
        """Whether `limit` allows this many rows, the longest of this many tokens."""
        if self.limit is None:
            return True
        rows, positions = self._whole(rows, whole_blocks(tokens))
        return rows * positions + self._state_cells(state_bytes) <= self.limit

    def _whole(self, rows: int, positions: int) -> tuple[int, int]:
        multiple = self.row_multiple
        return -(-rows // multiple) * multiple, max(positions, self.least_positions)

    def reserve(self, layers: Sequence[int], like: Tensor) -> None:
        """Make the buffers of these layers, for a network that writes to their addresses.

        `like` is [..., G, D] in the dtype and on the device of the buffers.
        """
        for layer in layers:
            if layer not in self._keys:
                self._keys[layer], self._values[layer] = (self._new_buffer(like) for _ in range(2))

    @property
    def addresses(self) -> array[int]:
        """Four numbers a layer: the addresses of keys and values, and the slots per row of both."""
        if self._addresses is None:
            self._addresses = array("q")
            for layer in sorted(self._keys):
                keys, values = self._keys[layer], self._values[layer]
                places = keys.data_ptr(), values.data_ptr()
                self._addresses.extend((*places, keys.shape[2], values.shape[2]))
        return self._addresses

    def _new_buffer(self, states: Tensor) -> Tensor:
        heads, width = states.shape[-2:]
        self._addresses = None
        return _zeros(states, self._rows, heads, self._positions, width)

    def _grow(self, positions: int) -> None:
        self._fit(max(1, len(self.lengths)), max(positions, self._positions_in_use))

    @property
    def cell_bytes(self) -> int:
        """Bytes of one position of one row, all layers together; 0 before the first pass."""
        buffers = (*self._keys.values(), *self._values.values())
        return sum(b.shape[1] * b.shape[3] * b.element_size() for b in buffers)

    @property
    def held_bytes(self) -> int:
        return self.cells * self.cell_bytes + self.state_bytes

    @property
    def cells(self) -> int:
        return self._rows * self._positions

    @torch.inference_mode()
    def shrink(self) -> None:
        self._resize(*self._whole(max(1, len(self.lengths)), self._positions_in_use))
        self._written = self.longest

    @property
    def longest(self) -> int:
        """Slots in use in the longest row: committed tokens and kept nodes."""
        return max(map(add, self.lengths, self.kept), default=0)

    @property
    def _positions_in_use(self) -> int:
        return whole_blocks(self.longest)

    def _fit(self, rows: int, positions: int) -> None:
        rows, positions = self._whole(rows, positions)
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
            used = len(self.lengths), self._written
            for kv, layer in buffers:
                kv[layer] = _resized(kv[layer], rows, positions, used)
        finally:
            shapes = [kv[layer].shape for kv, layer in buffers]
            self._rows = min(shape[0] for shape in shapes)
            self._positions = min(shape[2] for shape in shapes)


def _resized(old: Tensor, rows: int, positions: int, used: tuple[int, int]) -> Tensor:
    if (old.shape[0], old.shape[2]) == (rows, positions):
        return old
    new = _zeros(old, rows, old.shape[1], positions, old.shape[3])
    kept_rows, kept = min(rows, old.shape[0], used[0]), min(positions, old.shape[2], used[1])
    new[:kept_rows, :, :kept] = old[:kept_rows, :, :kept]
    return new


def _zeros(like: Tensor, *shape: int) -> Tensor:
    """Zeros, since a masked position still enters a product, and NaN times 0 is NaN.

    On a CPU, what was never written to takes no memory.
    """
    if like.device.type != "cpu":
        return like.new_zeros(shape)
    try:
        memory = mmap(-1, prod(shape) * like.element_size(), access=ACCESS_COPY)
    except OSError as error:
        raise MemoryError(f"can't allocate memory for KV: {error}") from error
    return torch.frombuffer(memory, dtype=like.dtype).view(shape)


def whole_blocks(tokens: int) -> int:
    """Positions that a row of this many tokens takes: whole key blocks, at least one."""
    return max(1, -(-tokens // KEY_BLOCK)) * KEY_BLOCK


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error means that memory is short; on a CPU, only PyTorch's message says so."""
    if isinstance(error, SlabFull | MemoryError | torch.OutOfMemoryError):
        return True
    words = ("can't allocate memory", "not enough memory")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)


KVBlock: TypeAlias = tuple[tuple[Tensor, Tensor], ...]
"""The KV of n positions of one row: keys and values [G, n, D] of each layer."""


class KVSlab(SlabBuffers, Cache):
    """The KV of all rows. Transformers modules take it as their `past_key_values`."""

    def __init__(self) -> None:
        Cache.__init__(self, layers=[])
        SlabBuffers.__init__(self)
        self._first, self._last = 0, 0
        self._span = 0
        self._starts: Sequence[int] = ()
        self._counts: Sequence[int] = ()
        self._num_nodes = 0
        self._known_places: dict[bool, tuple[Tensor, Tensor]] = {}

    # Rows

    @torch.inference_mode()
    def add_row(self) -> int:
        """Open an empty row after the others and return its index."""
        if len(self.lengths) == self._rows:
            self._fit(self._rows + 1, self._positions_in_use)
        self.lengths.append(0)
        self.kept.append(0)
        self._states.append(())
        return len(self.lengths) - 1

    @torch.inference_mode()
    def remove_row(self, row: int) -> int:
        """Free a row. The last row moves into its place; returns the index that this one had."""
        last = len(self.lengths) - 1
        if row != last:
            self.copy_row(last, row)
        self.lengths.pop()
        self.kept.pop()
        self._states.pop()
        return last

    @torch.inference_mode()
    def wipe_row(self, row: int) -> None:
        """Zero a row that may hold NaN: masked positions still enter products, and NaN spreads."""
        for buffers in (self._keys, self._values):
            for buffer in buffers.values():
                buffer[row] = 0

    @torch.inference_mode()
    def copy_row(self, source: int, row: int) -> None:
        self.lengths[row], self.kept[row] = self.lengths[source], self.kept[source]
        stop = self.lengths[row] + self.kept[row]
        for buffers in (self._keys, self._values):
            for buffer in buffers.values():
                buffer[row, :, :stop] = buffer[source, :, :stop]
        self._states[row] = self._states[source]

    def set_state(self, row: int, state: Sequence[Tensor]) -> None:
        """Give a row its state: tensors that are written once and never rolled back."""
        before, self._states[row] = self._states[row], tuple(state)
        if not self.has_room(len(self.lengths), self.longest):
            self._states[row] = before
            raise OverBudget(
                f"row state of {sum(t.nbytes for t in state)} bytes exceeds the KV budget"
            )
        if self.limit is not None and self.cells + self._state_cells() > self.limit:
            self.shrink()  # unused buffers take memory that the state needs

    def state(self, row: int) -> Sequence[Tensor]:
        return self._states[row]

    def commit(self, row: int, nodes: Sequence[int], kept: Sequence[int] = ()) -> None:
        """Keep the KV of these nodes of the last pass, in this order, and discard the others.

        Both are indices into the row's tree, ascending. `nodes` starts with the root (0), and is
        empty only if `kept` is not, or if the row ends. `kept` ones, after them, are the first
        nodes of the next tree.
        """
        start = self.lengths[row]
        together = [*nodes, *kept] if kept else nodes
        if together and together[-1] != len(together) - 1:  # a chain already lies in order
            if self.mover is None:
                self._move_together(row, start, together)
            else:
                self.mover(self.addresses, row, start, together)
        self.lengths[row], self.kept[row] = start + len(nodes), len(kept)

    @torch.inference_mode()
    def _move_together(self, row: int, start: int, nodes: Sequence[int]) -> None:
        source = torch.tensor(nodes) + start
        for buffers in (self._keys, self._values):
            for buffer in buffers.values():
                moved = buffer[row, :, source.to(buffer.device)]
                buffer[row, :, start : start + len(nodes)] = moved

    def rollback(self, row: int, length: int) -> None:
        assert 0 <= length <= self.lengths[row]
        self.lengths[row], self.kept[row] = length, 0

    # One forward pass

    def begin(
        self, first: int, starts: Sequence[int], counts: Sequence[int], num_nodes: int
    ) -> int:
        """Prepare a pass over B adjacent rows; returns S, the slots that `write` will return.

        `starts` are the slots of the rows' first new nodes, after the committed tokens and the
        nodes of earlier passes that are still needed. S is a multiple of `KEY_BLOCK`.
        """
        self._span = max(self.least_positions, whole_blocks(max(starts) + num_nodes))
        if self._span > self._positions:
            self._grow(self._span)
        self._first, self._last = first, first + len(starts)
        if self._last > self._rows:
            self._fit(self._last, self._positions_in_use)
        self._starts, self._counts, self._num_nodes = starts, counts, num_nodes
        self._written = max(self._written, max(starts) + num_nodes)
        self._known_places = {}
        return self._span

    def write(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Write a layer's new keys and values; return all of them, [B, G, S, D].

        They are [T, G, D], or [B, N, G, D] with padding.
        """
        return self._write(self._keys, keys, layer), self._write(self._values, values, layer)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write a layer's new keys and values [B, G, N, D]; return all of them, [B, G, S, D]."""
        return self.write(key_states.transpose(1, 2), value_states.transpose(1, 2), layer_idx)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Committed tokens of the pass's first row. Modules use it only if they get no mask."""
        return self.lengths[self._first] if self.lengths else 0

    def _write(self, buffers: dict[int, Tensor], states: Tensor, layer: int) -> Tensor:
        if layer not in buffers:
            buffers[layer] = self._new_buffer(states)
        rows = buffers[layer][self._first : self._last]  # [B, G, all positions, D]
        if len(self._starts) == 1:
            new = states.flatten(0, -3).transpose(0, 1)  # [G, T, D]
            start = self._starts[0]
            rows[0, :, start : start + new.shape[1]] = new
        else:
            # Indexing dimensions 0 and 2 puts them first.
            node_rows, slots = self._places(padded=states.dim() == 4)
            rows[node_rows, :, slots] = states
        return rows[:, :, : self._span]

    def _places(self, *, padded: bool) -> tuple[Tensor, Tensor]:
        """Rows, from the first of the pass, and slots of the nodes: [T], or [B, N] with padding."""
        if padded not in self._known_places:
            inside = torch.arange(self._num_nodes)
            slots = torch.tensor(self._starts)[:, None] + inside
            rows = torch.arange(len(slots))[:, None].expand_as(slots)
            if not padded:
                nodes = inside < torch.tensor(self._counts)[:, None]
                rows, slots = rows[nodes], slots[nodes]
            device = next(iter(self._keys.values())).device
            self._known_places[padded] = rows.to(device), slots.to(device)
        return self._known_places[padded]

    def read(self, row: int, start: int, stop: int) -> KVBlock:
        """A copy of a row's KV at the committed positions `start` to `stop` - 1."""
        assert stop <= self.lengths[row]
        return tuple(
            (self._keys[layer][row, :, start:stop].clone(), values[row, :, start:stop].clone())
            for layer, values in self._values.items()
        )

    @torch.inference_mode()
    def append(self, row: int, block: KVBlock) -> None:
        start = self.lengths[row]
        stop = start + block[0][0].shape[1]
        if stop > self._positions:
            self._fit(len(self.lengths), whole_blocks(max(stop, self.longest)))
        self._written = max(self._written, stop)
        for layer, (keys, values) in zip(self._values, block, strict=True):
            self._keys[layer][row, :, start:stop] = keys
            self._values[layer][row, :, start:stop] = values
        self.lengths[row], self.kept[row] = stop, 0
