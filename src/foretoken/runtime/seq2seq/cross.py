"""The source side of attention: what the rows of a pass read through cross-attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.runtime.attention import key_span
from foretoken.runtime.inputs import PassInputs
from foretoken.runtime.kv_slab import KVSlab
from foretoken.runtime.network import RowState

__all__ = ["CrossKeys", "CrossStates", "padded_state"]


@dataclass(frozen=True)
class CrossKeys:
    """The cross-attention of B rows, over a span of S source positions with padding.

    Args:
        keys: [L, B, H, S, D].
        values: [L, B, H, S, D].
        mask: [B, 1, 1, S], added to the scores.
    """

    keys: Tensor
    values: Tensor
    mask: Tensor


def padded_state(keys: Tensor, values: Tensor) -> RowState:
    """The state of a source with n positions, from its keys and values [L, H, n, D]."""
    positions = keys.shape[2]
    mask = keys.new_zeros(positions)
    return _widened((keys, values, mask), key_span(positions))


def _widened(state: RowState, span: int) -> RowState:
    """The same state with more padding."""
    keys, values, mask = state
    missing = span - len(mask)
    if not missing:
        return state
    keys, values = (F.pad(part, (0, 0, 0, missing)) for part in (keys, values))
    return keys, values, F.pad(mask, (0, missing), value=-torch.inf)


class CrossStates:
    """Puts together the states of the rows of a pass; those of several rows are copied once.

    Rows come and go between passes, but most passes are over the same rows as the one before.
    """

    def __init__(self) -> None:
        self._states: list[RowState | None] = []
        self._joined: CrossKeys | None = None

    def of(self, inputs: PassInputs, slab: KVSlab) -> CrossKeys:
        """What the rows of a pass read. Rows without nodes need not have read a source."""
        rows = range(inputs.first, inputs.first + len(inputs.rows))
        states = [_row_state(slab, row) for row in rows]
        if self._joined is None or not _same(states, self._states):
            self._states, self._joined = states, _join(states)
        return self._joined


def _row_state(slab: KVSlab, row: int) -> RowState | None:
    found = slab.state(row)
    if not found:
        return None
    keys, values, mask = found
    return keys, values, mask


def _same(found: Sequence[RowState | None], known: Sequence[RowState | None]) -> bool:
    """Whether these are the same tensors."""
    if len(found) != len(known):
        return False
    pairs = zip(found, known, strict=True)
    return all(
        a is b or (a is not None and b is not None and a[0] is b[0] and a[1] is b[1])
        for a, b in pairs
    )


def _join(states: Sequence[RowState | None]) -> CrossKeys:
    span = max(len(state[2]) for state in states if state is not None)
    some = next(state for state in states if state is not None)
    full = [_widened(state or _nothing_like(some), span) for state in states]
    if len(full) == 1:
        keys, values, mask = (part.unsqueeze(0) for part in full[0])
        return CrossKeys(keys.transpose(0, 1), values.transpose(0, 1), mask[:, None, None])
    keys, values = (torch.stack([state[part] for state in full], dim=1) for part in (0, 1))
    return CrossKeys(keys, values, torch.stack([state[2] for state in full])[:, None, None])


def _nothing_like(state: RowState) -> RowState:
    """The state of a row that has no nodes. It sees a key, since a softmax over none is NaN."""
    keys, values, mask = (torch.zeros_like(part) for part in state)
    return keys, values, mask
