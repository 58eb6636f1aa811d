"""The prefix cache: KV of the beginnings of earlier prompts, so that it is computed once.

A prompt is cut into blocks of `BLOCK` tokens. A block is known by its tokens and the block before
it, as the KV of a token depends on everything before it: a chain of blocks is a prefix. (vLLM's
automatic prefix caching; Kwon et al., "Efficient Memory Management for Large Language Model Serving
with PagedAttention", section 4.4.) What is kept are copies; the least recently used go first. Their
bits are those that would be computed (law 7).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from foretoken.cache import KVBlock
from foretoken.errors import ConfigError
from foretoken.memory import MIB
from foretoken.target import Target

__all__ = ["BLOCK", "PrefixCache"]

BLOCK = 64
"""Tokens per block: few enough that short prompts share some."""

_Key = tuple[int, tuple[int, ...]]
"""Number of the block before, and the block's tokens."""

_NO_BLOCK = -1


@dataclass(frozen=True)
class _Entry:
    number: int
    kv: KVBlock


class PrefixCache:
    """Blocks of KV of one target.

    Args:
        target: whose KV it is.
        num_bytes: most memory to take.

    Raises:
        ConfigError: that is less than one block.
    """

    def __init__(self, target: Target, num_bytes: int) -> None:
        block_bytes = BLOCK * target.cell_bytes
        self._most = num_bytes // block_bytes
        if self._most < 1:
            raise ConfigError(
                f"prefix_cache_memory: {BLOCK} tokens of this model take {block_bytes / MIB:.2f} "
                f"MiB, got {num_bytes / MIB:.2f} MiB; give more, or enable_prefix_caching=False."
            )
        self._target = target
        # Least recently used first, and a block before the one it continues: whatever is dropped,
        # no block is left that cannot be reached.
        self._entries: OrderedDict[_Key, _Entry] = OrderedDict()
        self._numbers = count()

    def __len__(self) -> int:
        """Number of blocks."""
        return len(self._entries)

    def restore(self, key: int, tokens: Sequence[int]) -> int:
        """Give an empty row the KV of the longest prefix that is known.

        Args:
            key: the row.
            tokens: what its KV is wanted of.

        Returns:
            The number of tokens found.

        Raises:
            SlabFull: the row cannot hold them; it may have some of them.
        """
        found, _ = self._find(tokens)
        for known in found:
            self._target.append(key, self._entries[known].kv)
        self._touch(found)
        return BLOCK * len(found)

    def store(self, key: int, tokens: Sequence[int]) -> None:
        """Keep the whole blocks of a row that begins with these tokens, as many as there may be."""
        found, parent = self._find(tokens)
        self._touch(found)
        for start in range(len(found) * BLOCK, len(tokens) - BLOCK + 1, BLOCK):
            if len(found) == self._most:
                break
            if len(self._entries) == self._most:
                self._entries.popitem(last=False)
            known = (parent, tuple(tokens[start : start + BLOCK]))
            parent = next(self._numbers)
            self._entries[known] = _Entry(parent, self._target.read(key, start, start + BLOCK))
            found.append(known)
            self._touch(found)

    def clear(self) -> None:
        """Forget everything."""
        self._entries.clear()

    def _find(self, tokens: Sequence[int]) -> tuple[list[_Key], int]:
        """The known blocks that the tokens begin with, and the number of the last."""
        found: list[_Key] = []
        parent = _NO_BLOCK
        for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
            known = (parent, tuple(tokens[start : start + BLOCK]))
            if known not in self._entries:
                break
            parent = self._entries[known].number
            found.append(known)
        return found, parent

    def _touch(self, chain: Sequence[_Key]) -> None:
        for known in reversed(chain):
            self._entries.move_to_end(known)
