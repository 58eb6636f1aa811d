"""Token tree verification without tree attention: every path is a batch row with its own KV.

SpecInfer (Miao et al.) calls this sequence-based decoding and compares tree attention with it, and
SpecTr (Sun et al.) verifies k drafts this way. A row is an ordinary causal pass, without branches
or tree masks, so k paths compute a shared prefix k times and copy the context k times. Tests use it
as the oracle of `Target.verify`, and `benchmarks/tree_cost.py` measures what a tree saves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor

from tokenleap.core.tree import TokenTree, chain
from tokenleap.runtime.network import LOGITS, Need, PassOutput
from tokenleap.runtime.passes import INTERNAL_KEY
from tokenleap.runtime.target import Target

__all__ = ["RowsVerifier"]


@dataclass(frozen=True)
class _Path:
    """A path from the root to a leaf, and the key of the row that verifies it."""

    key: int
    nodes: tuple[int, ...]


class RowsVerifier:
    """Verifies and commits like `Target`, with one batch row per path.

    The target opens and closes the rows. The first path takes the request's own row and the others
    take forks of it. The forks stay open until every request of the pass has committed.

    Attributes:
        num_positions: positions computed so far: the lengths of all paths, root included.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self._paths: dict[int, list[_Path]] = {}  # by key of requests that have not committed
        self._forks: list[int] = []
        self._fork_keys = count(INTERNAL_KEY, -1)
        self.num_positions = 0
        self.num_copied = 0

    @torch.inference_mode()
    def verify(
        self,
        keys: Sequence[int],
        trees: Sequence[TokenTree],
        num_computed: Sequence[int] | None = None,
        need: Need = LOGITS,
    ) -> list[PassOutput]:
        """One forward pass over all paths of all trees; see `Target.verify`.

        Returns:
            The logits after every node of each tree, [n+1, V]; for a node on several paths, those
            of the first path.
        """
        self.close()
        self._paths = {key: self._open(key, tree) for key, tree in zip(keys, trees, strict=True)}
        paths = [path for key in keys for path in self._paths[key]]
        chains = [
            chain([tree.tokens[node] for node in path.nodes])
            for key, tree in zip(keys, trees, strict=True)
            for path in self._paths[key]
        ]
        self.num_positions += sum(map(len, chains))
        assert num_computed is None
        assert need == LOGITS, "a node may be on several paths"
        outputs = iter(self._target.verify([path.key for path in paths], chains))
        return [
            PassOutput(
                _by_node(len(tree), [(path, next(outputs).scores) for path in self._paths[key]])
            )
            for key, tree in zip(keys, trees, strict=True)
        ]

    def commit(self, key: int, nodes: Sequence[int], kept: Sequence[int] = ()) -> None:
        """Keep the KV of these nodes, root included; `key` takes over the row of their path."""
        assert not kept, "a path in a row of its own has no other nodes to keep"
        path = tuple(nodes)
        row = next(p.key for p in self._paths.pop(key) if p.nodes[: len(path)] == path)
        self._target.commit(row, range(len(path)))
        if row != key:
            self._target.fork(row, key)
        if not self._paths:
            self.close()

    def close(self) -> None:
        """Close all forks and roll back what was not committed."""
        # Closing a row moves the last row into its place, with only its committed KV. So the forks
        # are closed together, the newest first: then none of them is moved.
        self._paths = {}
        while self._forks:
            self._target.remove(self._forks.pop())

    def _open(self, key: int, tree: TokenTree) -> list[_Path]:
        leaves = [node for node in range(len(tree)) if not tree.children[node]]
        rows = [key, *(self._fork(key) for _ in leaves[1:])]
        return [_Path(row, (0, *tree.path(leaf))) for row, leaf in zip(rows, leaves, strict=True)]

    def _fork(self, key: int) -> int:
        fork = next(self._fork_keys)
        self._target.fork(key, fork)
        self._forks.append(fork)
        self.num_copied += self._target.cached(key)
        return fork


def _by_node(num_nodes: int, scored: Sequence[tuple[_Path, Tensor]]) -> Tensor:
    """Logits by node, [n+1, V], from the logits of the paths."""
    logits = scored[0][1].new_empty(num_nodes, scored[0][1].shape[1])
    for path, rows in reversed(scored):
        logits[list(path.nodes)] = rows
    return logits
