"""`Passes`: forward passes of one network over the rows of its KV slab.

`Target` runs a language model with it, and a drafting head (`drafters/heads/`) is a small network
of its own kind. This file does not know about models, sampling, acceptance or drafting.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Self

import torch
from torch import Tensor

from tokenleap.core.config import MIB
from tokenleap.core.references import Source
from tokenleap.core.tree import TokenTree, chain
from tokenleap.errors import ConfigError
from tokenleap.runtime.attention import KEY_BLOCK, ROW_MULTIPLE
from tokenleap.runtime.growth_plan import GrowthPlan
from tokenleap.runtime.inputs import PassInputs, RowNodes, StateRows, masked_nodes, tree_nodes
from tokenleap.runtime.kv_slab import KVBlock, KVSlab, whole_blocks
from tokenleap.runtime.network import (
    LOGITS,
    GrowingNetwork,
    GrownTree,
    GrowthLimit,
    Need,
    Network,
    PassOutput,
    RowState,
    SourceNetwork,
)

INTERNAL_KEY = -1
"""Rows that belong to no request, such as those of checks and measurements, have this key and
smaller ones. Requests have keys from 0."""

MARGIN = ROW_MULTIPLE - 1  # positions after a row's tokens that padding may write to


class Rows:
    """The rows of a KV slab by their keys: request ids, or `INTERNAL_KEY` and below."""

    def __init__(self, slab: KVSlab, max_model_len: int) -> None:
        self.max_model_len = max_model_len
        self._slab = slab
        self._keys: list[int] = []  # key of each slab row

    def add(self, key: int) -> None:
        assert key not in self._keys
        self._slab.add_row()
        self._keys.append(key)

    def remove(self, key: int) -> None:
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
        return len(self._keys)

    def cached(self, key: int) -> int:
        """Number of tokens whose KV is committed."""
        return self._slab.lengths[self._row(key)]

    def kept(self, key: int) -> int:
        """Nodes whose KV the row keeps for its next tree (see `KVSlab.commit`)."""
        return self._slab.kept[self._row(key)]

    @property
    def longest(self) -> int:
        """Slots in use in the longest row: committed tokens and kept nodes."""
        return self._slab.longest

    def commit(self, key: int, nodes: Sequence[int], kept: Sequence[int] = ()) -> None:
        """See `KVSlab.commit`."""
        self._slab.commit(self._row(key), nodes, kept)

    def rollback(self, key: int, length: int) -> None:
        self._slab.rollback(self._row(key), length)

    def read(self, key: int, start: int, stop: int) -> KVBlock:
        """A copy of the KV at the committed positions `start` to `stop` - 1."""
        return self._slab.read(self._row(key), start, stop)

    def append(self, key: int, block: KVBlock) -> None:
        """Commit KV that `read` returned, instead of computing it again."""
        self._slab.append(self._row(key), block)

    def set_state(self, key: int, state: Sequence[Tensor]) -> None:
        self._slab.set_state(self._row(key), state)

    def state(self, key: int) -> Sequence[Tensor]:
        return self._slab.state(self._row(key))

    def _row(self, key: int) -> int:
        return self._keys.index(key)

    # Memory

    def limit_memory(self, num_bytes: int) -> None:
        cells = num_bytes // self._slab.cell_bytes
        if cells < (fewest := self._slab.row_multiple * self._slab.least_positions):
            least = fewest * self._slab.cell_bytes / MIB
            raise ConfigError(
                f"kv_cache_memory: one sequence of this model takes at least {least:.1f} MiB, got "
                f"{num_bytes / MIB:.1f} MiB."
            )
        self._slab.limit = cells
        if self._slab.cells > cells:
            self._slab.shrink()

    def shrink(self) -> None:
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
        """Whether the memory limit allows this many rows, the longest of this many tokens."""
        return self._slab.has_room(rows, tokens + MARGIN, state_bytes)

    @property
    def slab(self) -> KVSlab:
        return self._slab

    @property
    def cell_bytes(self) -> int:
        return self._slab.cell_bytes


class SourceRows(Rows):
    def __init__(self, network: Network, slab: KVSlab, max_model_len: int) -> None:
        super().__init__(slab, max_model_len)
        self.network = network
        self._probe_state: RowState | None = None

    @property
    def source_network(self) -> SourceNetwork | None:
        """None of a decoder-only model."""
        return self.network if isinstance(self.network, SourceNetwork) else None

    @property
    def reads_source(self) -> bool:
        return self.source_network is not None

    def add(self, key: int) -> None:
        """Open an empty row. Rows of checks and measurements read the network's `probe_source`."""
        super().add(key)
        network = self.source_network
        if network is None or key > INTERNAL_KEY:
            return
        if self._probe_state is None:
            self._probe_state = self._encoded(network.probe_source)
        try:
            self.set_state(key, self._probe_state)
        except Exception:
            self.remove(key)
            raise

    def encode(self, key: int, source: Source) -> None:
        """Read a source: run the encoder, and give the row the state that its decoder reads."""
        self.set_state(key, self._encoded(source))

    @torch.inference_mode()
    def encoded(self, key: int, source: Source) -> Tensor:
        """[n, E] what the encoder makes of a source: of this row, if it has that, else anew."""
        if key in self and self.has_source(key) and len(kept := self.row_state(key).encoded):
            return kept
        return self._needed_source_network().encoded(source)

    @torch.inference_mode()
    def read_encoded(self, key: int, encoded: Tensor) -> None:
        """Give the row the state that its decoder reads of another model's encoder [n, E]."""
        self.set_state(key, self._needed_source_network().read(encoded))

    def row_state(self, key: int) -> RowState:
        return RowState(*self.state(key))

    def has_source(self, key: int) -> bool:
        """True of a decoder-only model."""
        return not self.reads_source or bool(self.state(key))

    def state_bytes(self, source: Source | None) -> int:
        """Bytes of the state of a row that has read this source; 0 of a decoder-only model."""
        network = self.source_network
        return 0 if network is None or source is None else network.state_bytes(source)

    @torch.inference_mode()
    def _encoded(self, source: Source) -> RowState:
        return self._needed_source_network().encode(source)

    def _needed_source_network(self) -> SourceNetwork:
        network = self.source_network
        assert network is not None, "a decoder-only model reads no source"
        return network


PREFILL_CHUNK = 256
"""Prompt tokens per pass: many enough to keep the kernels busy, few enough for a small mask."""

SCORED_CHUNK = 64
"""The same if all of them have logits, of which each takes the size of the vocabulary."""


@dataclass(frozen=True)
class Bucket:
    """The shape of all passes, for kernels that are chosen by shape: bits are then equal.

    A pass is over so many rows, each with so many nodes, and reads all of the context. What is
    missing is padding; what does not fit is computed in several passes.
    """

    rows: int
    nodes: int = 32

    @staticmethod
    def of(max_num_seqs: int) -> Bucket:
        """128 nodes in all: where reading the weights still takes most of a pass's time."""
        return Bucket(min(max_num_seqs, 4))


class Passes(SourceRows):
    """A network with its KV slab: prefill, verify, commit, rollback."""

    def __init__(
        self,
        network: Network,
        max_model_len: int,
        dtype: torch.dtype,
        device: torch.device,
        bucket: Bucket | None = None,
    ) -> None:
        slab = KVSlab()
        super().__init__(network, slab, max_model_len)
        self.dtype, self.device, self.bucket = dtype, device, bucket
        if bucket is not None:
            slab.row_multiple = bucket.rows
            slab.least_positions = whole_blocks(max_model_len + bucket.nodes)
            slab.shrink()  # to these sizes
        self.num_passes = 0

    def with_network(self, network: Network) -> Self:
        """The same rows and KV under another network over the same layers.

        The KV that it writes stays uncommitted. The next pass of the original overwrites it.
        """
        other = copy.copy(self)
        other.network = network
        other.num_passes = 0
        return other

    def allocate(self, states: Tensor | None = None) -> None:
        """Make one pass, so that the KV slab knows the size of a token's KV."""
        self.add(INTERNAL_KEY)
        self.prefill(INTERNAL_KEY, [0], states=states)
        self.remove(INTERNAL_KEY)
        self.num_passes = 0

    @torch.inference_mode()
    def prefill(
        self,
        key: int,
        tokens: Sequence[int],
        hidden_layers: tuple[int, ...] = (),
        states: Tensor | None = None,
        read_logits: Callable[[Tensor], object] | None = None,
    ) -> Mapping[int, Tensor]:
        """Compute and commit the KV of these tokens in chunks; returns layer id -> [n, E].

        `states` [n, E] are for a drafting head. `read_logits` is given the logits [chunk, V] of
        each chunk, valid until it returns; with None they are not computed.
        """
        need = Need(logits=read_logits is not None, hidden=hidden_layers)
        size = PREFILL_CHUNK if read_logits is None else SCORED_CHUNK
        chunks: dict[int, list[Tensor]] = {layer: [] for layer in hidden_layers}
        before = self.cached(key)
        try:
            for start in range(0, len(tokens), size):
                chunk = tokens[start : start + size]
                own = None if states is None else [StateRows(states, start, len(chunk))]
                nodes = [tree_nodes(chain(chunk), 0, self.cached(key))]
                (output,) = self._forward([key], nodes, need, own)
                for layer, hidden in output.hidden.items():
                    chunks[layer].append(hidden)
                self.commit(key, range(len(chunk)))
                if read_logits is not None:
                    read_logits(output.scores)
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
        states: Sequence[StateRows] | None = None,
    ) -> list[PassOutput]:
        """One forward pass over one tree per row, whose KV is written after the committed tokens.

        `commit` then keeps a path.

        Args:
            num_computed: per row, how many of the tree's first nodes the row's last pass computed
                (a drafter grows its tree level by level). None means those that the row keeps.
            states: per row, those of the nodes computed, for a drafting head.

        Returns:
            Per row, the output for the n + 1 - num_computed nodes computed, until the next pass.
        """
        computed = num_computed or [self.kept(key) for key in keys]
        outputs = self._forward(keys, self._tree_nodes(keys, trees, computed), need, states)
        if self.device.type == "cuda":  # so that callers can time the pass
            torch.cuda.synchronize(self.device)
        return outputs

    @torch.inference_mode()
    def fill(
        self,
        keys: Sequence[int],
        pending: Sequence[Sequence[int]],
        num_masks: Sequence[int],
        mask_token: int,
    ) -> list[Tensor]:
        """One pass over the pending tokens of each row and a block of masks after them.

        Every mask sees the committed tokens, the pending ones, and all masks of its row. The KV of
        masks must not be committed. Returns per row the logits [num_masks, V], valid until the next
        pass.
        """
        nodes = [
            masked_nodes(tokens, mask_token, count, self.cached(key))
            for key, tokens, count in zip(keys, pending, num_masks, strict=True)
        ]
        outputs = self._forward(keys, nodes, Need(last=max(num_masks)), None)
        return [out.scores[-count:] for out, count in zip(outputs, num_masks, strict=True)]

    @torch.inference_mode()
    def grow(
        self,
        keys: Sequence[int],
        pending: Sequence[Sequence[int]],
        plan: GrowthPlan,
        limits: Sequence[GrowthLimit],
        token_ids: Tensor | None = None,
        states: Sequence[StateRows] | None = None,
    ) -> list[GrownTree] | None:
        """Draft a tree per row, in one call (see `GrowingNetwork`); KV is written as by `verify`.

        `token_ids` [V] are the tokens that logits stand for, if not 0, 1, ...; `states` per row [n,
        E].
        """
        if not isinstance(self.network, GrowingNetwork):
            return None
        trees = [chain(tokens) for tokens in pending]
        behind = [limit.scored for limit in limits]
        nodes = self._tree_nodes(keys, trees, [0] * len(keys))
        inputs = self._inputs(keys, nodes, states, behind)
        order = self._order(keys)
        ordered = [limits[index] for index in order]
        grown = self.network.grow(inputs, self._slab, plan, ordered, token_ids)
        self.num_passes += max(tree.levels for tree in grown)
        by_key = {keys[index]: tree for index, tree in zip(order, grown, strict=True)}
        return [by_key[key] for key in keys]

    def _tree_nodes(
        self, keys: Sequence[int], trees: Sequence[TokenTree], num_computed: Sequence[int]
    ) -> list[RowNodes]:
        return [
            tree_nodes(tree, skipped, self.cached(key))
            for key, tree, skipped in zip(keys, trees, num_computed, strict=True)
        ]

    def _forward(
        self,
        keys: Sequence[int],
        nodes: Sequence[RowNodes],
        need: Need,
        states: Sequence[StateRows] | None,
    ) -> list[PassOutput]:
        if self.bucket is not None:
            assert states is None, "a target reads tokens"
            return self._in_bucket(self.bucket, keys, nodes, need)
        inputs = self._inputs(keys, nodes, states, [0] * len(keys))
        self.num_passes += 1
        output = self.network.forward(inputs, self._slab, need)
        counts = [len(row) for row in inputs.rows]
        if counts == [inputs.nodes] and need.last is None:
            return [output]
        scored = [count if need.last is None else min(count, need.last) for count in counts]
        parts = list(zip(_slices(counts), _slices(scored), strict=True))
        return [output.rows(*parts[self._row(key) - inputs.first]) for key in keys]

    def _in_bucket(
        self, bucket: Bucket, keys: Sequence[int], nodes: Sequence[RowNodes], need: Need
    ) -> list[PassOutput]:
        """Passes of the bucket's shape: by groups of rows, and each row's nodes in parts."""
        work = {self._row(key): row for key, row in zip(keys, nodes, strict=True)}
        parts: dict[int, list[PassOutput]] = {index: [] for index in work}
        for first in sorted({index // bucket.rows * bucket.rows for index in work}):
            group = range(first, first + bucket.rows)
            longest = max(len(work[index]) for index in group if index in work)
            for begin in range(0, longest, bucket.nodes):
                output = self._bucket_pass(bucket, group, work, begin, replace(need, last=None))
                for place, index in enumerate(group):
                    count = len(work[index].tokens[begin:][: bucket.nodes]) if index in work else 0
                    if count:
                        own = slice(place * bucket.nodes, place * bucket.nodes + count)
                        parts[index].append(output.rows(own, own))
        return [_whole(parts[self._row(key)], need.last) for key in keys]

    def _bucket_pass(
        self,
        bucket: Bucket,
        group: range,
        work: Mapping[int, RowNodes],
        begin: int,
        need: Need,
    ) -> PassOutput:
        """One pass over a group of rows, from each row's node `begin` on."""
        lengths, kept = self._slab.lengths, self._slab.kept
        ends = [lengths[i] + kept[i] if i < len(lengths) else 0 for i in group]
        given = [work.get(i, RowNodes(end)) for i, end in zip(group, ends, strict=True)]
        rows = [row.part(min(begin, len(row)), bucket.nodes) for row in given]
        starts, counts = [row.start for row in rows], [bucket.nodes] * bucket.rows
        span = self._slab.begin(group.start, starts, counts, bucket.nodes)
        inputs = PassInputs(rows, group.start, bucket.nodes, span, self.dtype, self.device)
        self.num_passes += 1
        return self.network.forward(inputs, self._slab, need)

    def _inputs(
        self,
        keys: Sequence[int],
        nodes: Sequence[RowNodes],
        states: Sequence[StateRows] | None,
        behind: Sequence[int],
    ) -> PassInputs:
        """Prepare a pass, with room in the slab for as many more nodes per row as `behind` says.

        A pass covers adjacent rows, so that the slab need not copy any. Rows in between that have
        no nodes take part as padding, unless the network leaves padding out.
        """
        lengths = self._slab.lengths
        work = {self._row(key): row for key, row in zip(keys, nodes, strict=True)}
        indices = range(min(work), max(work) + 1)
        kept = self._slab.kept
        rows = [work.get(index) or RowNodes(lengths[index] + kept[index]) for index in indices]
        starts, counts = [row.start for row in rows], [len(row) for row in rows]
        num_nodes = max(counts)
        if len(rows) == 1:
            num_nodes = max(num_nodes, self.network.least_nodes)
        ends = [row.start + len(row) + more for row, more in zip(nodes, behind, strict=True)]
        least = max(num_nodes, max(ends) - max(starts))
        span = self._slab.begin(indices.start, starts, counts, least)
        ordered = None if states is None else _joined([states[i] for i in self._order(keys)])
        return PassInputs(rows, indices.start, num_nodes, span, self.dtype, self.device, ordered)

    def _order(self, keys: Sequence[int]) -> list[int]:
        """Indices of these keys in the order of the slab's rows."""
        return sorted(range(len(keys)), key=lambda index: self._row(keys[index]))


def _whole(parts: Sequence[PassOutput], last: int | None) -> PassOutput:
    """The output of a row's nodes from that of its parts; `last` as in `Need`."""
    first = parts[0]
    hidden = {layer: torch.cat([part.hidden[layer] for part in parts]) for layer in first.hidden}
    if first.logits is None:
        return PassOutput(None, hidden=hidden)
    logits = torch.cat([part.scores for part in parts])
    return PassOutput(logits if last is None else logits[-last:], hidden=hidden)


def _joined(states: Sequence[StateRows]) -> StateRows:
    return states[0] if len(states) == 1 else StateRows.of(torch.cat([s.tensor for s in states]))


def _slices(counts: Sequence[int]) -> list[slice]:
    return [slice(end - count, end) for count, end in zip(counts, accumulate(counts), strict=True)]
