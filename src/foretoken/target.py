"""Target: one causal LM with its KV slab, verifying trees of many rows in one pass.

The loop knows it as prefill, verify, commit, rollback. A draft model is a second `Target`: what
differs is who calls it. This file does not know about sampling, acceptance or drafting.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor
from transformers import PreTrainedModel

from foretoken.cache import KVBlock
from foretoken.control.costs import CostCurve
from foretoken.errors import CompatibilityError, ConfigError
from foretoken.memory import MIB
from foretoken.runtime.attention import KEY_BLOCK, ROW_MULTIPLE
from foretoken.runtime.cuda import slab_for
from foretoken.runtime.inputs import PassInputs, RowNodes, tree_nodes
from foretoken.runtime.network import Network, network_for
from foretoken.support import check_supported, context_length
from foretoken.tree import TokenTree, chain

__all__ = ["Target"]

PREFILL_CHUNK = 256
"""Prompt tokens per pass: enough to keep the kernels busy, little enough for the mask."""

_PROBE_KEY = -1
"""Row of the target's own measurements, and the keys below it; requests have keys from 0."""

_MARGIN = ROW_MULTIPLE - 1
"""Positions behind a row's tokens that padding may write to."""

_COST_SIZES = (1, 2, 4, 8, 16, 32, 64)
_COST_ROWS = (4, 16)
_COST_CONTEXT = 128
_COST_ROUNDS = 5
_COST_SECONDS = 2.0

_PROBE_TOLERANCE = {True: 1e-3, False: 0.25}
"""Mean error over the logits' spread, in float32 and in 16 bits: rounding stays below, ignoring a
mask or a position does not."""

_ROUNDING_TOLERANCE = 0.8
"""The same for rounded weights; what has nothing in common is at 1.1."""


class Target:
    """A model that scores token trees.

    Rows are named by the caller's keys (request ids) and may join and leave between passes.

    Args:
        model: a loaded causal LM; it is left as it is and may be used elsewhere.
        max_model_len: most tokens of a row, prompt included; None takes the model's own limit.
        quantization: see `network_for`.
        runtime: see `network_for`.

    Raises:
        ConfigError: `max_model_len`, `quantization` or `runtime` is out of range.
        CompatibilityError: the architecture cannot be served; the message says why.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        max_model_len: int | None = None,
        quantization: str | None = None,
        runtime: str = "auto",
    ) -> None:
        self.max_model_len = context_length(model.config, max_model_len)
        check_supported(model, self.max_model_len)
        self.device = model.device
        self.dtype = model.dtype
        self.vocab_size = int(model.config.get_text_config().vocab_size)
        self.network = network_for(model, quantization, runtime)
        self._slab = slab_for(self.network, self.max_model_len)
        self._keys: list[int] = []  # key of each slab row
        self._scored: dict[int, slice] = {}  # where each row's logits were among the last
        self.num_passes = 0
        self.bit_exact = self._probe(model, rounded=quantization is not None)
        self.exact_trees = self.bit_exact and self.network.exact_trees

    def with_network(self, network: Network) -> Target:
        """This target's rows and KV under another network over the same layers.

        What it writes stays uncommitted, to be overwritten by the next pass of this target.
        """
        other = copy.copy(self)
        other.network = network
        other.num_passes = 0
        return other

    # Rows

    def add(self, key: int) -> None:
        """Open an empty row."""
        assert key not in self._keys
        self._slab.add_row()
        self._keys.append(key)

    def remove(self, key: int) -> None:
        """Close a row and free its slot."""
        row = self._keys.index(key)
        moved = self._slab.remove_row(row)
        self._keys[row] = self._keys[moved]
        self._keys.pop()

    def fork(self, key: int, new_key: int) -> None:
        """Give row `new_key`, opened if it is not there, a copy of the committed KV of `key`."""
        if new_key not in self:
            self.add(new_key)
        self._slab.copy_row(self._keys.index(key), self._keys.index(new_key))

    def __contains__(self, key: int) -> bool:
        return key in self._keys

    def cached(self, key: int) -> int:
        """Number of tokens whose KV is committed."""
        return self._slab.lengths[self._keys.index(key)]

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
                f"kv_cache_memory: one sequence of this model takes {least:.1f} MiB at least, got "
                f"{num_bytes / MIB:.1f} MiB."
            )
        self._slab.limit = cells
        if self._slab.cells > cells:
            self._slab.shrink()

    @property
    def most_tokens(self) -> int:
        """Most tokens of a row that has all the memory to itself."""
        if self._slab.limit is None:
            return self.max_model_len
        return min(self.max_model_len, self._slab.limit // KEY_BLOCK * KEY_BLOCK - _MARGIN)

    def has_room(self, rows: int, tokens: int) -> bool:
        """Whether the memory holds so many rows, the longest of so many tokens."""
        return self._slab.has_room(rows, tokens + _MARGIN)

    @property
    def cell_bytes(self) -> int:
        """Bytes of one token's KV."""
        return self._slab.cell_bytes

    def read(self, key: int, start: int, stop: int) -> KVBlock:
        """A copy of the KV of these tokens."""
        return self._slab.read(self._keys.index(key), start, stop)

    def append(self, key: int, block: KVBlock) -> None:
        """Commit KV that `read` gave, instead of computing it again."""
        self._slab.append(self._keys.index(key), block)

    # Passes

    @torch.inference_mode()
    def prefill(self, key: int, tokens: Sequence[int]) -> None:
        """Compute and commit the KV of these tokens, in chunks; no logits."""
        for start in range(0, len(tokens), PREFILL_CHUNK):
            part = tokens[start : start + PREFILL_CHUNK]
            self._forward([key], [chain(part)], [0], scored=False)
            self.commit(key, range(len(part)))

    @torch.inference_mode()
    def verify(
        self, keys: Sequence[int], trees: Sequence[TokenTree], known: Sequence[int] | None = None
    ) -> list[Tensor]:
        """One forward pass over one tree per row.

        The KV of all nodes is written behind the committed tokens; `commit` says what stays.

        Args:
            keys: rows, in any order.
            trees: what follows each row's committed tokens.
            known: per row, how many of the tree's first nodes the row's last pass has computed
                already (a drafter grows its tree level by level); None computes all.

        Returns:
            Per row the logits after every node computed, [n + 1 - known, V].
        """
        known = known or [0] * len(trees)
        logits, starts = self._forward(keys, trees, known, scored=True)
        self._scored = {
            key: slice(starts[key], starts[key] + len(tree) - skip)
            for key, tree, skip in zip(keys, trees, known, strict=True)
        }
        assert logits is not None
        if self.device.type == "cuda":  # what is timed as verification is to be verification
            torch.cuda.synchronize(self.device)
        return [logits[self._scored[key]] for key in keys]

    def likeliest(self, key: int) -> Sequence[int] | None:
        """Of every node computed for a row in the last pass that gave logits the best token.

        That is the token of the largest logit, the first of equals; None where the network did not
        see it on the way.
        """
        tokens = self.network.likeliest
        return None if tokens is None else tokens[self._scored[key]]

    def commit(self, key: int, nodes: Sequence[int]) -> None:
        """Keep the KV of these nodes of the last pass, root included, in this order."""
        self._slab.commit(self._keys.index(key), nodes)

    def rollback(self, key: int, length: int) -> None:
        """Forget the KV behind the first `length` tokens."""
        self._slab.rollback(self._keys.index(key), length)

    def _forward(
        self,
        keys: Sequence[int],
        trees: Sequence[TokenTree],
        known: Sequence[int],
        *,
        scored: bool,
    ) -> tuple[Tensor | None, dict[int, int]]:
        """Logits [T, V] of all rows' nodes, None if not wanted, and where those of a key begin.

        The slab serves adjacent rows without copying, so rows in between that have no tree ride
        along: as padding where attention is computed, and not at all where a network leaves
        padding out. KV of padding is never committed.
        """
        work = {
            self._keys.index(key): (tree, skip)
            for key, tree, skip in zip(keys, trees, known, strict=True)
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
        logits = self.network.forward(inputs, self._slab, scored=scored)
        starts = accumulate(counts, initial=0)
        return logits, dict(zip(self._keys[rows.start : rows.stop], starts, strict=False))

    # Measurement

    @torch.inference_mode()
    def measure_costs(self, most_rows: int = max(_COST_ROWS)) -> CostCurve:
        """Seconds of a pass by number of positions and of rows: medians of a few rounds of all.

        In rounds, because the next second of a machine with other tenants may be twice as fast.
        Takes half a second for a small model. For a large one what was not measured by
        `_COST_SECONDS` is left out: the curve is extended and corrected as it is used.

        Args:
            most_rows: more rows than these are not tried.

        Raises:
            SlabFull: there is no memory for it.
        """
        keys = [_PROBE_KEY - row for row in range(max(_COST_ROWS))]
        others = len(self._keys)
        self.add(keys[0])
        try:
            self.prefill(keys[0], [0] * min(_COST_CONTEXT, self.max_model_len // 2))
            cached = self.cached(keys[0])
            sizes = [(1, size) for size in _COST_SIZES if size < self.max_model_len - cached]
            for rows in _COST_ROWS:
                if rows <= most_rows and self.has_room(others + rows, cached + 1):
                    for key in keys[1:rows]:
                        if key not in self:
                            self.fork(keys[0], key)
                    sizes.append((rows, rows))
            seconds = self._seconds(keys, sizes)
        finally:
            for key in keys:
                if key in self:
                    self.remove(key)
            self._slab.shrink()
        curve = CostCurve({nodes: taken for (rows, nodes), taken in seconds.items() if rows == 1})
        for (rows, nodes), taken in seconds.items():
            if rows > 1:
                curve.observe(nodes, taken, rows)
        return curve

    def _seconds(
        self, keys: Sequence[int], sizes: Sequence[tuple[int, int]]
    ) -> dict[tuple[int, int], float]:
        """Of passes over so many rows and nodes: those that half the time was enough to warm up."""
        times: dict[tuple[int, int], list[float]] = {}
        began = time.perf_counter()

        def run(rows: int, nodes: int) -> float:
            start = time.perf_counter()
            self.verify(keys[:rows], [chain([0] * (nodes // rows))] * rows)
            return time.perf_counter() - start

        for size in sizes:
            if not times or time.perf_counter() - began < _COST_SECONDS / 2:
                run(*size)
                times[size] = []
        for _ in range(_COST_ROUNDS):
            for size, taken in times.items():
                if not taken or time.perf_counter() - began < _COST_SECONDS:
                    taken.append(run(*size))
        return {size: statistics.median(taken) for size, taken in times.items()}

    # Construction-time check

    @torch.inference_mode()
    def _probe(self, model: PreTrainedModel, *, rounded: bool) -> bool:
        """Check trees against the model's own forward pass, and whether law 7 holds here.

        Args:
            model: the module.
            rounded: whether other weights than its own run, which are to agree with themselves.

        Returns:
            Whether logits had the same bits for every number of nodes tried.

        Raises:
            CompatibilityError: a branch of a tree is not scored like the same tokens in a row.
        """
        stride = max(1, self.vocab_size // 7)
        a, b, c, d, e = (i * stride % self.vocab_size for i in range(5))
        tree = TokenTree((b, c, d, e), (-1, 0, 0, 2))  # a b c  and  a b d e
        try:
            scored = self._score([a], tree)
            inputs = torch.tensor([[a, b, d, e]], device=self.device)
            own = model(input_ids=inputs).logits[0, 1:]
            in_a_row = self._score([a], chain([b, d, e]))
        except (RuntimeError, TypeError, IndexError, AttributeError) as error:
            raise CompatibilityError(
                f"{type(model).__name__} cannot be run with a 4-D mask, position ids and an "
                f"external KV cache: {str(error).splitlines()[0]}"
            ) from error
        branch = scored[[0, 2, 3]]
        if rounded and not _error(in_a_row, own) <= _ROUNDING_TOLERANCE:
            raise CompatibilityError(
                f"{type(model).__name__} with rounded weights has little in common with itself: "
                "use a finer quantization, or none."
            )
        expected = in_a_row if rounded else own
        if not _error(branch, expected) <= _PROBE_TOLERANCE[self.dtype == torch.float32]:
            raise CompatibilityError(
                f"{type(model).__name__} does not score a branch of a token tree as it scores the "
                "same tokens in a row: it ignores the 4-D mask or the position ids."
            )
        self.num_passes = 0
        if self.network.exact_trees and not torch.equal(branch, in_a_row):
            return False
        return self._same_bits(([a, b, c, d, e] * 4)[: self.max_model_len])

    def _score(self, context: Sequence[int], tree: TokenTree) -> Tensor:
        """[n+1, V] of a tree after a context, in a row of its own."""
        self.add(_PROBE_KEY)
        try:
            self.prefill(_PROBE_KEY, context)
            return self.verify([_PROBE_KEY], [tree])[0].clone()
        finally:
            self.remove(_PROBE_KEY)

    def _same_bits(self, tokens: Sequence[int]) -> bool:
        if len(tokens) < 4:
            return False  # nothing to compare
        wide = self._score(tokens[:2], chain(tokens[2:]))
        narrow = self._score(tokens[:2], chain(tokens[2:3]))
        middle = self._score(tokens[:3], chain(tokens[3:9]))
        return torch.equal(wide[:1], narrow) and torch.equal(wide[1 : 1 + len(middle)], middle)


def _error(found: Tensor, expected: Tensor) -> float:
    """Mean error over the spread of what was expected."""
    return float((found.float() - expected.float()).abs().mean() / expected.float().std())
