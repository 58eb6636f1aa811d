"""The source side of attention: what the rows of a pass read through cross-attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenleap.runtime.attention import key_span
from tokenleap.runtime.inputs import PassInputs
from tokenleap.runtime.kv_slab import KVSlab
from tokenleap.runtime.source_network import RowState

__all__ = ["CrossKeys", "CrossStates", "are_same", "padded_state", "states_of"]


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


def padded_state(keys: Tensor, values: Tensor, encoded: Tensor) -> RowState:
    """The state of a source with n positions.

    Args:
        keys: [L, H, n, D].
        values: [L, H, n, D].
        encoded: see `RowState`.
    """
    positions = keys.shape[2]
    mask = keys.new_zeros(positions)
    return _widened(RowState(keys, values, mask, encoded), key_span(positions))


def _widened(state: RowState, span: int) -> RowState:
    """The same state with more padding."""
    missing = span - len(state.mask)
    if not missing:
        return state
    keys, values = (F.pad(part, (0, 0, 0, missing)) for part in (state.keys, state.values))
    mask = F.pad(state.mask, (0, missing), value=-torch.inf)
    return RowState(keys, values, mask, state.encoded)


class CrossStates:
    """Puts together the states of the rows of a pass; those of several rows are copied once.

    Rows come and go between passes, but most passes are over the same rows as the one before.
    """

    def __init__(self) -> None:
        self._states: list[RowState | None] = []
        self._joined: CrossKeys | None = None

    def of(self, inputs: PassInputs, slab: KVSlab) -> CrossKeys:
        """What the rows of a pass read. Rows without nodes need not have read a source."""
        states = states_of(inputs, slab)
        if self._joined is None or not are_same(states, self._states):
            self._states, self._joined = states, _join(states)
        return self._joined


def states_of(inputs: PassInputs, slab: KVSlab) -> list[RowState | None]:
    """What each row of a pass reads; None for rows that have not read a source."""
    rows = range(inputs.first, inputs.first + len(inputs.rows))
    return [RowState(*found) if (found := slab.state(row)) else None for row in rows]


def are_same(found: Sequence[RowState | None], known: Sequence[RowState | None]) -> bool:
    """Whether these are the same tensors."""
    if len(found) != len(known):
        return False
    pairs = zip(found, known, strict=True)
    return all(
        a is b or (a is not None and b is not None and a.keys is b.keys and a.values is b.values)
        for a, b in pairs
    )


def _join(states: Sequence[RowState | None]) -> CrossKeys:
    span = max(len(state.mask) for state in states if state is not None)
    some = next(state for state in states if state is not None)
    full = [_widened(state or _nothing_like(some), span) for state in states]
    if len(full) == 1:
        (only,) = full
        return CrossKeys(
            only.keys.unsqueeze(1), only.values.unsqueeze(1), only.mask[None, None, None]
        )
    keys, values = (
        torch.stack(parts, dim=1)
        for parts in ([state.keys for state in full], [state.values for state in full])
    )
    return CrossKeys(keys, values, torch.stack([state.mask for state in full])[:, None, None])


def _nothing_like(state: RowState) -> RowState:
    """The state of a row that has no nodes. It sees a key, since a softmax over none is NaN."""
    keys, values, mask = (torch.zeros_like(part) for part in state[:3])
    return RowState(keys, values, mask, state.encoded)
