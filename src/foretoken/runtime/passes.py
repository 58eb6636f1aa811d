"""`Passes`: forward passes of one network over the rows of its KV slab.

`Target` runs a causal LM with it, and a drafting head (`drafters/heads/`) is a small network of its
own kind. This file does not know about models, sampling, acceptance or drafting. `rows.py` manages
the rows.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Self

import torch
from torch import Tensor

from foretoken.core.tree import TokenTree, chain
from foretoken.runtime.choose import slab_for
from foretoken.runtime.inputs import PassInputs, RowNodes, tree_nodes
from foretoken.runtime.network import LOGITS, Need, Network, PassOutput
from foretoken.runtime.rows import Rows

__all__ = ["Passes"]

PREFILL_CHUNK = 256
"""Prompt tokens per pass: many enough to keep the kernels busy, few enough for a small mask."""


class Passes(Rows):
    """A network with its KV slab: prefill, verify, commit, rollback.

    Args:
        network: computes the passes.
        max_model_len: most tokens of a row.
        dtype: of the KV.
        device: where it runs.

    Attributes:
        num_passes: number of forward passes so far.
    """

    def __init__(
        self, network: Network, max_model_len: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(slab_for(network, max_model_len), max_model_len)
        self.network, self.dtype, self.device = network, dtype, device
        self.num_passes = 0

    def with_network(self, network: Network) -> Self:
        """The same rows and KV under another network over the same layers.

        The KV that it writes stays uncommitted. The next pass of the original overwrites it.
        """
        other = copy.copy(self)
        other.network = network
        other.num_passes = 0
        return other

    @torch.inference_mode()
    def prefill(
        self,
        key: int,
        tokens: Sequence[int],
        hidden_layers: tuple[int, ...] = (),
        states: Tensor | None = None,
    ) -> Mapping[int, Tensor]:
        """Compute and commit the KV of these tokens in chunks, without logits.

        Args:
            key: the row.
            tokens: [n] what follows the row's committed tokens.
            hidden_layers: the layers whose hidden states are returned (see `Need`).
            states: [n, E] their states, for a drafting head.

        Returns:
            Layer id -> [n, E].

        Raises:
            SlabFull: there is no room for them. Then none is committed, because the hidden states
                of the first ones would be lost.
        """
        need = Need(logits=False, hidden=hidden_layers)
        chunks: dict[int, list[Tensor]] = {layer: [] for layer in hidden_layers}
        before = self.cached(key)
        try:
            for start in range(0, len(tokens), PREFILL_CHUNK):
                chunk = tokens[start : start + PREFILL_CHUNK]
                own = None if states is None else [states[start : start + len(chunk)]]
                output, _ = self._forward([key], [chain(chunk)], [0], need, own)
                for layer, hidden in output.hidden.items():
                    chunks[layer].append(hidden[: len(chunk)])
                self.commit(key, range(len(chunk)))
        except Exception:
            self.rollback(key, before)
            raise
        return {layer: torch.cat(parts) for layer, parts in chunks.items() if parts}

    @torch.inference_mode()
    def verify(
        self,
        keys: Sequence[int],
        trees: Sequence[TokenTree],
        num_computed: Sequence[int] | None = None,
        need: Need = LOGITS,
        states: Sequence[Tensor] | None = None,
    ) -> list[PassOutput]:
        """One forward pass over one tree per row.

        The KV of all nodes is written behind the committed tokens. `commit` then keeps a path.

        Args:
            keys: the rows, in any order.
            trees: a tree per row; its root is the row's first token that is not committed.
            num_computed: per row, how many of the tree's first nodes the row's last pass computed
                (a drafter grows its tree level by level). None means 0.
            need: what to return.
            states: per row, the states [n + 1 - num_computed, E] of the nodes computed, for a
                drafting head.

        Returns:
            Per row, the output for each of the n + 1 - num_computed nodes computed. It is valid
            until the next pass.

        Raises:
            SlabFull: there is no room for the nodes. Nothing was written.
        """
        computed = num_computed or [0] * len(trees)
        output, starts = self._forward(keys, trees, computed, need, states)
        if self.device.type == "cuda":  # so that callers can time the pass
            torch.cuda.synchronize(self.device)
        return [
            output.rows(slice(starts[key], starts[key] + len(tree) - skipped))
            for key, tree, skipped in zip(keys, trees, computed, strict=True)
        ]

    def _forward(
        self,
        keys: Sequence[int],
        trees: Sequence[TokenTree],
        num_computed: Sequence[int],
        need: Need,
        states: Sequence[Tensor] | None,
    ) -> tuple[PassOutput, dict[int, int]]:
        """Run one pass; return the output for all rows' nodes, and each key's first node in it.

        A pass covers adjacent rows, so that the slab need not copy any. Rows in between that have
        no tree take part as padding, unless the network leaves padding out. KV of padding is never
        committed.
        """
        work = {
            self._row(key): (tree, skipped)
            for key, tree, skipped in zip(keys, trees, num_computed, strict=True)
        }
        rows = range(min(work), max(work) + 1)
        nodes = [
            tree_nodes(*work[row], self._slab.lengths[row])
            if row in work
            else RowNodes(self._slab.lengths[row])
            for row in rows
        ]
        counts = [len(row) for row in nodes]
        num_nodes = max(counts)
        if len(rows) == 1:
            num_nodes = max(num_nodes, self.network.least_nodes)
        span = self._slab.begin(rows.start, [row.start for row in nodes], counts, num_nodes)
        ordered = None if states is None else self._by_row(keys, states)
        inputs = PassInputs(nodes, rows.start, num_nodes, span, self.dtype, self.device, ordered)
        self.num_passes += 1
        output = self.network.forward(inputs, self._slab, need)
        starts = accumulate(counts, initial=0)
        return output, dict(zip(self._keys[rows.start : rows.stop], starts, strict=False))

    def _by_row(self, keys: Sequence[int], states: Sequence[Tensor]) -> Tensor:
        """[T, E] the states of all rows' nodes, in the order of the slab's rows."""
        if len(keys) == 1:
            return states[0]
        order = sorted(range(len(keys)), key=lambda index: self._row(keys[index]))
        return torch.cat([states[index] for index in order])
