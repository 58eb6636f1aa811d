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
from foretoken.runtime.network import (
    LOGITS,
    GrowingNetwork,
    GrownTree,
    GrowthLimit,
    GrowthPlan,
    Need,
    Network,
    PassOutput,
)
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
                (output,) = self._forward([key], [chain(chunk)], [0], need, own)
                for layer, hidden in output.hidden.items():
                    chunks[layer].append(hidden)
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
                (a drafter grows its tree level by level). None means those that the row keeps.
            need: what to return.
            states: per row, the states [n + 1 - num_computed, E] of the nodes computed, for a
                drafting head.

        Returns:
            Per row, the output for the n + 1 - num_computed nodes computed. It is valid until the
            next pass.

        Raises:
            SlabFull: there is no room for the nodes. Nothing was written.
        """
        computed = num_computed or [self.kept(key) for key in keys]
        outputs = self._forward(keys, trees, computed, need, states)
        if self.device.type == "cuda":  # so that callers can time the pass
            torch.cuda.synchronize(self.device)
        return outputs

    @torch.inference_mode()
    def grow(
        self,
        keys: Sequence[int],
        pending: Sequence[Sequence[int]],
        plan: GrowthPlan,
        limits: Sequence[GrowthLimit],
        token_ids: Tensor | None = None,
        states: Sequence[Tensor] | None = None,
    ) -> list[GrownTree] | None:
        """Draft a tree of most probable tokens per row, in one call (see `GrowingNetwork`).

        The KV of pending and drafted nodes is written behind the committed tokens, as by `verify`.

        Args:
            keys: the rows, in any order.
            pending: per row, the tokens behind the committed ones; the last one is the root.
            plan: how all trees grow.
            limits: per row, where its tree ends.
            token_ids: [V] the tokens that logits stand for; None if these are 0, 1, ...
            states: per row, the states [n, E] of the pending tokens, for a drafting head.

        Returns:
            Per row, its tree; None if the network cannot do this.

        Raises:
            SlabFull: there is no room for the nodes. Nothing was written.
        """
        if not isinstance(self.network, GrowingNetwork):
            return None
        trees = [chain(tokens) for tokens in pending]
        behind = [limit.scored for limit in limits]
        inputs = self._inputs(keys, trees, [0] * len(keys), states, behind)
        order = self._order(keys)
        ordered = [limits[index] for index in order]
        grown = self.network.grow(inputs, self._slab, plan, ordered, token_ids)
        self.num_passes += max(tree.depth for tree in grown)
        by_key = {keys[index]: tree for index, tree in zip(order, grown, strict=True)}
        return [by_key[key] for key in keys]

    def _forward(
        self,
        keys: Sequence[int],
        trees: Sequence[TokenTree],
        num_computed: Sequence[int],
        need: Need,
        states: Sequence[Tensor] | None,
    ) -> list[PassOutput]:
        """Run one pass; return the output of each row's nodes."""
        inputs = self._inputs(keys, trees, num_computed, states, [0] * len(keys))
        self.num_passes += 1
        output = self.network.forward(inputs, self._slab, need)
        counts = [len(row) for row in inputs.rows]
        scored = [count if need.last is None else min(count, need.last) for count in counts]
        parts = list(zip(_slices(counts), _slices(scored), strict=True))
        return [output.rows(*parts[self._row(key) - inputs.first]) for key in keys]

    def _inputs(
        self,
        keys: Sequence[int],
        trees: Sequence[TokenTree],
        num_computed: Sequence[int],
        states: Sequence[Tensor] | None,
        behind: Sequence[int],
    ) -> PassInputs:
        """Prepare a pass, with room in the slab for as many more nodes per row as `behind` says.

        A pass covers adjacent rows, so that the slab need not copy any. Rows in between that have
        no tree take part as padding, unless the network leaves padding out. KV of padding is never
        committed.
        """
        lengths = self._slab.lengths
        work = {
            self._row(key): (tree, skipped)
            for key, tree, skipped in zip(keys, trees, num_computed, strict=True)
        }
        rows = range(min(work), max(work) + 1)
        nodes = [
            tree_nodes(*work[row], lengths[row])
            if row in work
            else RowNodes(lengths[row] + self._slab.kept[row])
            for row in rows
        ]
        starts, counts = [row.start for row in nodes], [len(row) for row in nodes]
        num_nodes = max(counts)
        if len(rows) == 1:
            num_nodes = max(num_nodes, self.network.least_nodes)
        added = [len(tree) + more for tree, more in zip(trees, behind, strict=True)]
        end = max(self.cached(key) + count for key, count in zip(keys, added, strict=True))
        span = self._slab.begin(rows.start, starts, counts, max(num_nodes, end - max(starts)))
        ordered = None if states is None else _joined([states[i] for i in self._order(keys)])
        return PassInputs(nodes, rows.start, num_nodes, span, self.dtype, self.device, ordered)

    def _order(self, keys: Sequence[int]) -> list[int]:
        """Indices of these keys in the order of the slab's rows."""
        return sorted(range(len(keys)), key=lambda index: self._row(keys[index]))


def _joined(states: Sequence[Tensor]) -> Tensor:
    return states[0] if len(states) == 1 else torch.cat(list(states))


def _slices(counts: Sequence[int]) -> list[slice]:
    """The places of several groups that lie one behind the other."""
    return [slice(end - count, end) for count, end in zip(counts, accumulate(counts), strict=True)]
