"""`Rows`: the rows of a KV slab, addressed by keys. `Passes` adds passes to it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tokenleap.core.memory import MIB
from tokenleap.errors import ConfigError
from tokenleap.runtime.attention import KEY_BLOCK, ROW_MULTIPLE
from tokenleap.runtime.kv_slab import KVBlock, KVSlab

__all__ = ["INTERNAL_KEY", "Rows"]

INTERNAL_KEY = -1
"""Rows that belong to no request, such as those of checks and measurements, have this key and
smaller ones. Requests have keys from 0."""

MARGIN = ROW_MULTIPLE - 1
"""Positions behind a row's tokens that padding may write to."""


class Rows:
    """The rows of a KV slab by their keys: request ids, or `INTERNAL_KEY` and below.

    Args:
        slab: holds the rows' KV.
        max_model_len: most tokens of a row.
    """

    def __init__(self, slab: KVSlab, max_model_len: int) -> None:
        self.max_model_len = max_model_len
        self._slab = slab
        self._keys: list[int] = []  # key of each slab row

    def add(self, key: int) -> None:
        """Open an empty row.

        Raises:
            SlabFull: there is no room for it.
        """
        assert key not in self._keys
        self._slab.add_row()
        self._keys.append(key)

    def remove(self, key: int) -> None:
        """Close a row."""
        row = self._row(key)
        moved = self._slab.remove_row(row)
        self._keys[row] = self._keys[moved]
        self._keys.pop()

    def wipe(self, key: int) -> None:
        """Zero a row that may hold NaN, before another request gets its memory."""
        self._slab.wipe_row(self._row(key))

    def fork(self, key: int, new_key: int) -> None:
        """Copy the KV of `key` to the row `new_key`, which is opened if needed."""
        if new_key not in self:
            self.add(new_key)
        self._slab.copy_row(self._row(key), self._row(new_key))

    def __contains__(self, key: int) -> bool:
        return key in self._keys

    @property
    def num_rows(self) -> int:
        """Rows in use."""
        return len(self._keys)

    def cached(self, key: int) -> int:
        """Number of tokens whose KV is committed."""
        return self._slab.lengths[self._row(key)]

    def kept(self, key: int) -> int:
        """Number of nodes whose KV the row keeps for its next tree (see `KVSlab.commit`)."""
        return self._slab.kept[self._row(key)]

    @property
    def longest(self) -> int:
        """Slots in use in the longest row: committed tokens and kept nodes."""
        return self._slab.longest

    def commit(self, key: int, nodes: Sequence[int], kept: Sequence[int] = ()) -> None:
        """Keep the KV of these nodes of the last pass (see `KVSlab.commit`)."""
        self._slab.commit(self._row(key), nodes, kept)

    def rollback(self, key: int, length: int) -> None:
        """Discard the KV behind the first `length` tokens."""
        self._slab.rollback(self._row(key), length)

    def read(self, key: int, start: int, stop: int) -> KVBlock:
        """A copy of the KV at the committed positions `start` to `stop` - 1."""
        return self._slab.read(self._row(key), start, stop)

    def append(self, key: int, block: KVBlock) -> None:
        """Commit KV that `read` returned, instead of computing it again."""
        self._slab.append(self._row(key), block)

    def set_state(self, key: int, state: Sequence[Tensor]) -> None:
        """Give a row tensors that are written once and never rolled back (see `KVSlab`)."""
        self._slab.set_state(self._row(key), state)

    def state(self, key: int) -> Sequence[Tensor]:
        """The row's state; empty if it has none."""
        return self._slab.state(self._row(key))

    def _row(self, key: int) -> int:
        return self._keys.index(key)

    # Memory

    def limit_memory(self, num_bytes: int) -> None:
        """Keep the KV slab within this many bytes.

        Raises:
            ConfigError: not even one sequence would fit.
        """
        cells = num_bytes // self._slab.cell_bytes
        if cells < KEY_BLOCK:
            least = KEY_BLOCK * self._slab.cell_bytes / MIB
            raise ConfigError(
                f"kv_cache_memory: one sequence of this model takes at least {least:.1f} MiB, got "
                f"{num_bytes / MIB:.1f} MiB."
            )
        self._slab.limit = cells
        if self._slab.cells > cells:
            self._slab.shrink()

    def shrink(self) -> None:
        """Free the memory that no row uses."""
        self._slab.shrink()

    @property
    def most_tokens(self) -> int:
        """Most tokens of a row that has all memory to itself."""
        return self.most_tokens_beside(0)

    def most_tokens_beside(self, state_bytes: int) -> int:
        """The same for a row whose state takes so many bytes; 0 or less if there is no room."""
        if self._slab.limit is None:
            return self.max_model_len
        taken = -(-state_bytes // self._slab.cell_bytes) if state_bytes else 0
        cells = self._slab.limit - taken
        return min(self.max_model_len, cells // KEY_BLOCK * KEY_BLOCK - MARGIN)

    def has_room(self, rows: int, tokens: int, state_bytes: int = 0) -> bool:
        """Whether the memory limit allows this many rows, the longest of this many tokens.

        Args:
            rows: number of rows, those in use included.
            tokens: tokens of the longest row.
            state_bytes: bytes of row state that is to be added.
        """
        return self._slab.has_room(rows, tokens + MARGIN, state_bytes)

    @property
    def slab(self) -> KVSlab:
        """What holds the rows."""
        return self._slab

    @property
    def cell_bytes(self) -> int:
        """Bytes of one token's KV."""
        return self._slab.cell_bytes
