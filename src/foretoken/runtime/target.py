"""`Target`: one causal LM with its KV slab, which verifies the trees of many rows in one pass.

The decoding loop calls prefill, verify, commit and rollback. A draft model is a second `Target`;
only its caller differs. This file does not know about sampling, acceptance or drafting. `rows.py`
manages the rows, `probing.py` checks the model, and `profiling.py` measures what passes cost.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor
from transformers import PreTrainedModel

from foretoken.core.tree import TokenTree, chain
from foretoken.models.support import check_supported, context_length
from foretoken.runtime.choose import network_for, slab_for
from foretoken.runtime.inputs import PassInputs, RowNodes, tree_nodes
from foretoken.runtime.network import LOGITS, Need, Network, PassOutput
from foretoken.runtime.probing import probe
from foretoken.runtime.rows import Rows

__all__ = ["Target"]

PREFILL_CHUNK = 256
"""Prompt tokens per pass: many enough to keep the kernels busy, few enough for a small mask."""


class Target(Rows):
    """A model that verifies token trees.

    Args:
        model: a loaded causal LM; it is not changed and may be used elsewhere.
        max_model_len: most tokens of a row, prompt included; None means the model's own limit.
        quantization: see `network_for`.
        runtime: see `network_for`.

    Attributes:
        bit_exact: whether the checks at construction found the same bits for every number of nodes
            (invariant 7).
        exact_trees: whether this holds for nodes of trees, too.
        num_passes: number of forward passes so far.

    Raises:
        ConfigError: `max_model_len`, `quantization` or `runtime` is not possible.
        CompatibilityError: the architecture is not supported; the message says why.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        max_model_len: int | None = None,
        quantization: str | None = None,
        runtime: str = "auto",
    ) -> None:
        length = context_length(model.config, max_model_len)
        check_supported(model, length)
        self.device = model.device
        self.dtype = model.dtype
        config = model.config.get_text_config()
        self.vocab_size, self.hidden_size = int(config.vocab_size), int(config.hidden_size)
        self.network = network_for(model, quantization, runtime)
        super().__init__(slab_for(self.network, length), length)
        self.num_passes = 0
        self.bit_exact = probe(self, model, quantized=quantization is not None)
        self.exact_trees = self.bit_exact and self.network.exact_trees
        self.num_passes = 0

    def with_network(self, network: Network) -> Target:
        """A target with the same rows and KV, and another network over the same layers.

        The KV that it writes stays uncommitted. The next pass of this target overwrites it.
        """
        other = copy.copy(self)
        other.network = network
        other.num_passes = 0
        return other

    @torch.inference_mode()
    def prefill(
        self, key: int, tokens: Sequence[int], hidden_layers: tuple[int, ...] = ()
    ) -> Mapping[int, Tensor]:
        """Compute and commit the KV of these tokens in chunks, without logits.

        Args:
            key: the row.
            tokens: [n] what follows the row's committed tokens.
            hidden_layers: the layers whose hidden states are returned (see `Need`).

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
                output, _ = self._forward([key], [chain(chunk)], [0], need)
                for layer, states in output.hidden.items():
                    chunks[layer].append(states[: len(chunk)])
                self.commit(key, range(len(chunk)))
        except Exception:
            self.rollback(key, before)
            raise
        return {layer: torch.cat(states) for layer, states in chunks.items() if states}

    @torch.inference_mode()
    def verify(
        self,
        keys: Sequence[int],
        trees: Sequence[TokenTree],
        num_computed: Sequence[int] | None = None,
        need: Need = LOGITS,
    ) -> list[PassOutput]:
        """One forward pass over one tree per row.

        The KV of all nodes is written behind the committed tokens. `commit` then keeps a path.

        Args:
            keys: the rows, in any order.
            trees: a tree per row; its root is the row's first token that is not committed.
            num_computed: per row, how many of the tree's first nodes the row's last pass computed
                (a drafter grows its tree level by level). None means 0.
            need: what to return.

        Returns:
            Per row, the output for each of the n + 1 - num_computed nodes computed. It is valid
            until the next pass.

        Raises:
            SlabFull: there is no room for the nodes. Nothing was written.
        """
        computed = num_computed or [0] * len(trees)
        output, starts = self._forward(keys, trees, computed, need)
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
        inputs = PassInputs(nodes, rows.start, num_nodes, span, self.dtype, self.device)
        self.num_passes += 1
        output = self.network.forward(inputs, self._slab, need)
        starts = accumulate(counts, initial=0)
        return output, dict(zip(self._keys[rows.start : rows.stop], starts, strict=False))
