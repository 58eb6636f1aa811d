"""The prefix cache: KV of the beginnings of earlier prompts, so that it is computed once.

A prompt is cut into blocks of `BLOCK` tokens. A block is identified by its tokens and the block
before it, as the KV of a token depends on everything before it: a chain of blocks is a prefix.
(vLLM's automatic prefix caching; Kwon et al., "Efficient Memory Management for Large Language Model
Serving with PagedAttention", section 4.4.) The cache holds copies and evicts the least recently
used first. Their bits are those of newly computed KV (invariant 7).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor

from foretoken.core.memory import MIB
from foretoken.errors import ConfigError
from foretoken.runtime.kv_slab import KVBlock
from foretoken.runtime.target import Target

__all__ = ["BLOCK", "PrefixCache"]

BLOCK = 64
"""Tokens per block: few enough that short prompts share some."""

_Key = tuple[int, tuple[int, ...]]
"""Number of the block before, and the block's tokens."""

_NO_BLOCK = -1


@dataclass(frozen=True)
class _Entry:
    """A block: its number, its KV, and the hidden states that drafters asked for."""

    number: int
    kv: KVBlock
    hidden: Mapping[int, Tensor]  # layer id -> [BLOCK, E]

    @property
    def hidden_bytes(self) -> int:
        return sum(states.nbytes for states in self.hidden.values())


class PrefixCache:
    """Blocks of KV of one target.

    Args:
        target: whose KV it is.
        num_bytes: most memory to take, hidden states included.

    Raises:
        ConfigError: that is less than one block.
    """

    def __init__(self, target: Target, num_bytes: int) -> None:
        self._block_bytes = BLOCK * target.cell_bytes
        if num_bytes < self._block_bytes:
            raise ConfigError(
                f"prefix_cache_memory: {BLOCK} tokens of this model take "
                f"{self._block_bytes / MIB:.2f} MiB, got {num_bytes / MIB:.2f} MiB; give more, or "
                "enable_prefix_caching=False."
            )
        self._target = target
        self._num_bytes = num_bytes
        self._hidden_bytes = 0
        # Least recently used first, and a block before the one it continues: whatever is dropped,
        # no block is left that cannot be reached.
        self._entries: OrderedDict[_Key, _Entry] = OrderedDict()
        self._numbers = count()

    def __len__(self) -> int:
        """Number of blocks."""
        return len(self._entries)

    def restore(
        self, key: int, tokens: Sequence[int], layers: tuple[int, ...] = ()
    ) -> tuple[int, Mapping[int, Tensor]]:
        """Give an empty row the KV of the longest cached prefix.

        Args:
            key: the row.
            tokens: the prompt to look up.
            layers: whose hidden states are needed, too; a block without them counts as missing.

        Returns:
            The number of tokens found, n, and layer id -> [n, E].

        Raises:
            SlabFull: the row cannot hold them; it is empty.
        """
        found = self._find(tokens, layers)
        try:
            for known in found:
                self._target.append(key, self._entries[known].kv)
        except BaseException:
            self._target.rollback(key, 0)
            raise
        self._touch(found)
        hidden = {
            layer: torch.cat([self._entries[known].hidden[layer] for known in found])
            for layer in layers
            if found
        }
        return BLOCK * len(found), hidden

    def store(
        self, key: int, tokens: Sequence[int], hidden: Mapping[int, Tensor] | None = None
    ) -> None:
        """Keep the whole blocks of a row that begins with these tokens, as far as there is room.

        Args:
            key: the row.
            tokens: n of them.
            hidden: layer id -> [n, E]; blocks that are known without these states gain them.
        """
        states = hidden or {}
        kept: list[_Key] = []
        parent = _NO_BLOCK
        for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
            known = (parent, tuple(tokens[start : start + BLOCK]))
            block = {layer: each[start : start + BLOCK] for layer, each in states.items()}
            entry = self._entries.get(known)
            if entry is None or block.keys() - entry.hidden.keys():
                entry = self._made(key, start, entry, block)
                if not self._make_room(known, entry, kept):
                    break
                self._put(known, entry)
            kept.append(known)
            parent = entry.number
            self._touch(kept)

    def clear(self) -> None:
        """Forget everything."""
        self._entries.clear()
        self._hidden_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Memory taken."""
        return len(self._entries) * self._block_bytes + self._hidden_bytes

    def _made(
        self, key: int, start: int, entry: _Entry | None, hidden: Mapping[int, Tensor]
    ) -> _Entry:
        """A new block, or a known one with more hidden states."""
        # Copies: slices would keep the whole prompt's states alive.
        states = {layer: each.clone() for layer, each in hidden.items()}
        if entry is not None:
            return _Entry(entry.number, entry.kv, {**states, **entry.hidden})
        kv = self._target.read(key, start, start + BLOCK)
        return _Entry(next(self._numbers), kv, states)

    def _make_room(self, known: _Key, entry: _Entry, kept: Sequence[_Key]) -> bool:
        """Drop the least recently used blocks; whether there is room without touching `kept`."""
        old = self._entries.get(known)
        more = entry.hidden_bytes - old.hidden_bytes if old else entry.hidden_bytes
        more += 0 if old else self._block_bytes
        protected = {*kept, known}
        while self.num_bytes + more > self._num_bytes:
            oldest = next(iter(self._entries), None)
            if oldest is None or oldest in protected:
                return False
            self._hidden_bytes -= self._entries.pop(oldest).hidden_bytes
        return True

    def _put(self, known: _Key, entry: _Entry) -> None:
        old = self._entries.get(known)
        self._hidden_bytes += entry.hidden_bytes - (old.hidden_bytes if old else 0)
        self._entries[known] = entry

    def _find(self, tokens: Sequence[int], layers: tuple[int, ...]) -> list[_Key]:
        """The known blocks that the tokens begin with, those that have these hidden states."""
        found: list[_Key] = []
        parent = _NO_BLOCK
        for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
            known = (parent, tuple(tokens[start : start + BLOCK]))
            entry = self._entries.get(known)
            if entry is None or not entry.hidden.keys() >= set(layers):
                break
            parent = entry.number
            found.append(known)
        return found

    def _touch(self, chain: Sequence[_Key]) -> None:
        for known in reversed(chain):
            self._entries.move_to_end(known)
