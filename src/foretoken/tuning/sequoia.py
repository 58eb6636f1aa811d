"""Optimal trees for a measured acceptance: which nodes are worth drafting.

Chen et al., "Sequoia: Scalable, Robust, and Hardware-aware Speculative Decoding". The *positional
acceptance vector* a says how drafts fare: a[i] is the probability that of a node's children the one
of rank i (0-based) is accepted, wherever in the tree the node stands. A node is then reached with
the product of its path's entries, and a pass yields as many tokens as nodes are reached:

    E(tree) = sum over its nodes, root included, of the product of a[rank] along the path

The best tree of n nodes is found by a dynamic program over the subtrees: a node's children of rank
i and above share what the child of rank i leaves to them.

    V(l, m)    = 1 + C(l, 0, m)
    C(l, i, m) = max(0, max over s = 1..m of a[i] V(l - 1, s - 1) + C(l, i + 1, m - s))

V(l, m) is the value of a node with at most m nodes in at most l levels below it; C(l, i, m) is what
its children from rank i on add. A child needs those ranked before it, so that vectors which do not
fall are served too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from foretoken.analysis.domain import cost, count
from foretoken.drafters.tree_file import closed
from foretoken.errors import ConfigError

if TYPE_CHECKING:
    from foretoken.runtime.costs import CostCurve

__all__ = [
    "BestSize",
    "BestTree",
    "Path",
    "acceptance_vector",
    "best_size",
    "best_tree",
    "best_widths",
    "expected_tokens",
]

Path: TypeAlias = tuple[int, ...]
"""A node by the ranks of its ancestors below the root and its own."""

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]

SUM_TOLERANCE = 1e-6


@dataclass(frozen=True)
class BestTree:
    """A tree and its worth.

    Args:
        paths: all drafted nodes, parents and elder siblings first; none where nothing is gained.
        expected_tokens: expected tokens per pass, the bonus token included.
    """

    paths: tuple[Path, ...]
    expected_tokens: float

    @property
    def num_nodes(self) -> int:
        """Drafted nodes."""
        return len(self.paths)

    @property
    def depth(self) -> int:
        """Levels, each a pass of the drafting model."""
        return max(map(len, self.paths), default=0)


@dataclass(frozen=True)
class BestSize:
    """How large a tree buys most tokens per second.

    Args:
        nodes: drafted nodes; 0 where plain decoding is best.
        depth: levels.
        expected_tokens: expected tokens per pass of the best tree of this size.
        seconds: of its drafting and its verification.
    """

    nodes: int
    depth: int
    expected_tokens: float
    seconds: float


def acceptance_vector(values: Sequence[float]) -> Floats:
    """A positional acceptance vector, [K].

    Raises:
        ConfigError: an entry is no probability, there is none, or they sum to more than 1 (at most
            one child of a node is accepted).
    """
    vector = np.asarray(values, dtype=np.float64)
    if vector.ndim != 1 or not len(vector) or not np.all((vector >= 0) & (vector <= 1)):
        raise ConfigError(
            f"acceptance vector: must be probabilities between 0 and 1, got {list(values)}."
        )
    if vector.sum() > 1 + SUM_TOLERANCE:
        raise ConfigError(
            f"acceptance vector: must sum to at most 1, as one child at most is accepted, got "
            f"{vector.sum():.6g}."
        )
    return vector


def expected_tokens(paths: Sequence[Sequence[int]], acceptance: Sequence[float]) -> float:
    """E(tree) by its definition: the oracle of the dynamic program.

    Args:
        paths: nodes by their ranks; beginnings of paths and elder siblings belong to the tree.
        acceptance: the positional acceptance vector; ranks beyond it are never accepted.
    """
    by_rank = dict(enumerate(acceptance_vector(acceptance).tolist()))
    reached = (prod(by_rank.get(rank, 0.0) for rank in path) for path in closed(paths))
    return 1 + float(sum(reached))


def best_tree(acceptance: Sequence[float], max_nodes: int, max_depth: int) -> BestTree:
    """The tree with the greatest expected number of tokens per pass.

    Nodes that add nothing are left out, so that it may be smaller than allowed.

    Args:
        acceptance: the positional acceptance vector, [K]; no node gets more than K children.
        max_nodes: most drafted nodes, at least 1.
        max_depth: most levels, at least 1.

    Raises:
        ConfigError: an argument is out of range.
    """
    table = _Table.solved(acceptance_vector(acceptance), max_nodes, max_depth)
    paths = sorted(table.paths(max_depth, max_nodes), key=lambda path: (len(path), path))
    return BestTree(tuple(paths), float(table.values[max_depth, max_nodes]))


def best_size(
    acceptance: Sequence[float],
    costs: CostCurve,
    max_nodes: int,
    max_depth: int,
    draft_cost: float,
) -> BestSize:
    """The number of nodes and levels whose best tree yields most tokens per second.

    A pass over n nodes computes n + 1 positions; every level takes one pass of the drafting model.
    Of equals the smaller tree wins, and no tree at all is among the choices.

    Args:
        acceptance: the positional acceptance vector.
        costs: seconds of a target pass by positions.
        max_nodes: most drafted nodes, at least 1.
        max_depth: most levels, at least 1.
        draft_cost: seconds of drafting a level, taken for the same at every level.

    Raises:
        ConfigError: an argument is out of range.
    """
    values = _Table.solved(acceptance_vector(acceptance), max_nodes, max_depth).values
    drafting = cost("draft_cost", draft_cost) * np.arange(max_depth + 1)  # [D+1]
    verifying = np.array([costs(1 + nodes) for nodes in range(max_nodes + 1)])  # [N+1]
    seconds = drafting[:, None] + verifying
    rates = np.where(_needed(values), values / seconds, 0)
    depth, nodes = divmod(int(rates.argmax()), max_nodes + 1)
    return BestSize(nodes, depth, float(values[depth, nodes]), float(seconds[depth, nodes]))


def best_widths(
    acceptance: Sequence[float], max_nodes: int, max_depth: int
) -> tuple[tuple[int, ...], float]:
    """The best tree whose nodes of a level all have the same number of children, and its value.

    E = 1 + S(w1) (1 + S(w2) (1 + ...)) with S(w) the sum of the first w entries of the vector.

    Args:
        acceptance: the positional acceptance vector.
        max_nodes: most drafted nodes, at least 1.
        max_depth: most levels, at least 1.

    Returns:
        Children per level, as the field `tree` takes them, and expected tokens per pass.
    """
    sums = np.cumsum(acceptance_vector(acceptance)).tolist()

    @cache
    def best(nodes: int, depth: int) -> tuple[float, tuple[int, ...]]:
        found: tuple[float, tuple[int, ...]] = (1.0, ())
        for width in range(1, min(nodes, len(sums)) + 1) if depth else ():
            below, widths = best(nodes // width - 1, depth - 1)
            found = max(found, (1 + sums[width - 1] * below, (width, *widths)), key=_value)
        return found

    value, widths = best(count("max_nodes", max_nodes, 1), count("max_depth", max_depth, 1))
    return widths, value


def _value(found: tuple[float, tuple[int, ...]]) -> float:
    return found[0]


@dataclass(frozen=True)
class _Table:
    """The solved dynamic program for D levels, K ranks and N nodes.

    Args:
        values: V, [D+1, N+1].
        sizes: [D+1, K, N+1] how many of m nodes the child of this rank gets for itself and what is
            below it, where m are left for it and its younger siblings; 0 is no child.
    """

    values: Floats
    sizes: Ints

    @staticmethod
    def solved(acceptance: Floats, max_nodes: int, max_depth: int) -> _Table:
        nodes, depth = count("max_nodes", max_nodes, 1), count("max_depth", max_depth, 1)
        values = np.ones((depth + 1, nodes + 1))
        sizes = np.zeros((depth + 1, len(acceptance), nodes + 1), dtype=np.int64)
        for level in range(1, depth + 1):
            added = np.zeros(nodes + 1)  # C of the rank after the present one
            for rank in reversed(range(len(acceptance))):
                gains = acceptance[rank] * values[level - 1, :-1]
                added, sizes[level, rank] = _shared(gains, added)
            values[level] += added
        return _Table(values, sizes)

    def paths(self, depth: int, nodes: int, above: Path = ()) -> Iterator[Path]:
        """Nodes below `above`, which has this many levels and nodes to itself."""
        for rank, sizes in enumerate(self.sizes[depth]):
            size = int(sizes[nodes])
            if not size:
                return
            yield (*above, rank)
            yield from self.paths(depth - 1, size - 1, (*above, rank))
            nodes -= size


def _shared(gains: Floats, added: Floats) -> tuple[Floats, Ints]:
    """Share m = 0..N nodes between a child and its younger siblings.

    Args:
        gains: [N] what the child adds with 1 to N nodes to itself.
        added: [N+1] what its younger siblings add with 0 to N nodes.

    Returns:
        [N+1] what they add together, and [N+1] the nodes of the child: as few as do, or 0.
    """
    size = len(gains)
    left = np.arange(size + 1)[:, None] - np.arange(1, size + 1)  # [N+1, N] m - s, from -N
    padded = np.concatenate([added, np.full(size, -np.inf)])
    totals = gains + padded[left]  # negative indices count from the end: -inf
    best = totals.argmax(axis=1)
    highest = totals[np.arange(size + 1), best]
    gained = highest > 0
    return np.where(gained, highest, 0), np.where(gained, best + 1, 0)


def _needed(values: Floats) -> NDArray[np.bool_]:
    """[D+1, N+1] where the best tree has all of these levels and nodes: fewer would be worth less.

    A size that is not used up would be charged for nodes that are not there.
    """
    needed = np.zeros(values.shape, dtype=np.bool_)
    needed[1:, 1:] = (values[1:, 1:] > values[1:, :-1]) & (values[1:, 1:] > values[:-1, 1:])
    needed[0, 0] = True
    return needed
