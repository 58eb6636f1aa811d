"""The prefix cache: KV of earlier prompts, for later prompts that begin with the same tokens.

A prompt is cut into blocks of `BLOCK` tokens. The KV of a token depends on all tokens before it. A
block is therefore identified by its own tokens and by the block before it, and a chain of blocks is
a prefix (vLLM's automatic prefix caching; Kwon et al., "Efficient Memory Management for Large
Language Model Serving with PagedAttention", section 4.4). The cache holds copies, with the same
bits as newly computed KV (invariant 7). It evicts the least recently used blocks first.

The KV of an encoder-decoder depends on its source as well, so the source stands in the place of the
block before the first one, together with the salt of the request (`Scope`): requests with different
salts find nothing of one another. The cache also keeps what the encoder made of the last sources.
They take longer to compute than blocks, so blocks are evicted before them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import count
from typing import TypeAlias

import torch
from torch import Tensor

from tokenleap.core.config import MIB
from tokenleap.core.references import Source
from tokenleap.errors import ConfigError
from tokenleap.runtime.kv_slab import KVBlock
from tokenleap.runtime.network import RowState
from tokenleap.runtime.target import Target

BLOCK = 64
"""Tokens per block: few, so that short prompts have whole blocks to share."""

Beginning: TypeAlias = tuple[str, Source | None]
"""Stands before the first block of a prompt: the salt of its request, and what its encoder reads
(None for a decoder-only model)."""

_NOTHING: Beginning = ("", None)

_Parent: TypeAlias = int | Beginning
"""Stands before a block: another one, by its number, or the beginning."""

_Key: TypeAlias = tuple[_Parent, tuple[int, ...]]
"""Identifies a block: what is before it, and the block's own tokens."""


@dataclass(frozen=True)
class _Entry:
    """A cached block: its number, its KV, and the hidden states that drafters asked for."""

    number: int
    kv: KVBlock
    hidden: Mapping[int, Tensor]  # layer id -> [BLOCK, E]
    num_bytes: int


class PrefixCache:
    """Cached blocks of KV of one target.

    Attributes:
        num_bytes: memory of all blocks, hidden states included, and of all sources.
    """

    def __init__(self, target: Target, num_bytes: int) -> None:
        self._block_bytes = BLOCK * target.cell_bytes
        if num_bytes < self._block_bytes:
            raise ConfigError(
                f"prefix_cache_memory: {BLOCK} tokens of this model take "
                f"{self._block_bytes / MIB:.2f} MiB, got {num_bytes / MIB:.2f} MiB: raise it, or "
                "set enable_prefix_caching=False."
            )
        self._target = target
        self._most_bytes = num_bytes
        self.num_bytes = 0
        # Least recently used first.
        self._states: OrderedDict[Beginning, RowState] = OrderedDict()
        # Least recently used first, and each block before its predecessor in the prompt. Eviction
        # from the front therefore never leaves a block whose predecessor is gone.
        self._entries: OrderedDict[_Key, _Entry] = OrderedDict()
        self._numbers = count()

    def __len__(self) -> int:
        """Number of cached blocks and sources."""
        return len(self._entries) + len(self._states)

    def restore(
        self,
        key: int,
        tokens: Sequence[int],
        layers: tuple[int, ...] = (),
        beginning: Beginning = _NOTHING,
    ) -> tuple[int, Mapping[int, Tensor]]:
        """Copy the KV of the longest cached prefix into an empty row.

        Returns:
            The number n of tokens found, and layer id -> [n, E] hidden states.
        """
        found = self._find(tokens, layers, beginning)
        try:
            for block_id in found:
                self._target.append(key, self._entries[block_id].kv)
        except BaseException:
            self._target.rollback(key, 0)
            raise
        self._mark_used(found)
        hidden = {
            layer: torch.cat([self._entries[block_id].hidden[layer] for block_id in found])
            for layer in layers
            if found
        }
        return BLOCK * len(found), hidden

    def store(
        self,
        key: int,
        tokens: Sequence[int],
        hidden: Mapping[int, Tensor] | None = None,
        beginning: Beginning = _NOTHING,
    ) -> None:
        """Cache the whole blocks of a prompt, as many as there is room for.

        Args:
            hidden: layer id -> [n, E] hidden states. Blocks cached without them gain them.
        """
        states = hidden or {}
        kept: dict[_Key, None] = {}  # in order
        parent: _Parent = beginning
        for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
            block_id = (parent, tuple(tokens[start : start + BLOCK]))
            kept[block_id] = None
            block = {layer: each[start : start + BLOCK] for layer, each in states.items()}
            entry = self._entries.get(block_id)
            if entry is not None:
                self._entries.move_to_end(block_id)
            if entry is None or block.keys() - entry.hidden.keys():
                old_bytes = 0 if entry is None else entry.num_bytes
                entry = self._new_entry(key, start, entry, block)
                more = entry.num_bytes - old_bytes
                if not self._make_room(more, kept.keys()):
                    break
                self._entries[block_id] = entry
                self.num_bytes += more
            parent = entry.number
        self._mark_used([block_id for block_id in kept if block_id in self._entries])

    def state_of(self, beginning: Beginning) -> RowState | None:
        """The encoder's output for a source; None if it is not cached."""
        if beginning not in self._states:
            return None
        self._states.move_to_end(beginning)
        return self._states[beginning]

    def keep_state(self, beginning: Beginning, state: RowState) -> None:
        """Cache what the encoder made of a source, if there is room for it."""
        more = _num_bytes(state)
        if more <= self._most_bytes and beginning not in self._states:
            self._make_room(more, frozenset())
            self._states[beginning] = state
            self.num_bytes += more

    def clear(self) -> None:
        """Drop everything."""
        self._entries.clear()
        self._states.clear()
        self.num_bytes = 0

    def _new_entry(
        self, key: int, start: int, entry: _Entry | None, hidden: Mapping[int, Tensor]
    ) -> _Entry:
        """A new block, or the cached one with more hidden states."""
        # Cloned, because slices would keep the whole prompt's states in memory.
        states = {layer: each.clone() for layer, each in hidden.items()}
        if entry is None:
            number, kv = next(self._numbers), self._target.read(key, start, start + BLOCK)
        else:
            number, kv, states = entry.number, entry.kv, {**states, **entry.hidden}
        return _Entry(number, kv, states, self._block_bytes + _num_bytes(states.values()))

    def _make_room(self, more: int, protected: Set[_Key]) -> bool:
        """Evict the others until `more` bytes fit; returns whether they do."""
        while self.num_bytes + more > self._most_bytes:
            oldest = next(iter(self._entries), None)
            if oldest is not None and oldest not in protected:
                self.num_bytes -= self._entries.pop(oldest).num_bytes
            elif self._states:
                self.num_bytes -= _num_bytes(self._states.popitem(last=False)[1])
            else:
                return False
        return True

    def _find(
        self, tokens: Sequence[int], layers: tuple[int, ...], beginning: Beginning
    ) -> list[_Key]:
        """The cached blocks at the beginning of the tokens, up to one without the hidden states."""
        found: list[_Key] = []
        parent: _Parent = beginning
        for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
            block_id = (parent, tuple(tokens[start : start + BLOCK]))
            entry = self._entries.get(block_id)
            if entry is None or not entry.hidden.keys() >= set(layers):
                break
            parent = entry.number
            found.append(block_id)
        return found

    def _mark_used(self, chain: Sequence[_Key]) -> None:
        """Mark the blocks of a prefix as just used, in the order that `_entries` needs."""
        for block_id in reversed(chain):
            self._entries.move_to_end(block_id)


def _num_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
