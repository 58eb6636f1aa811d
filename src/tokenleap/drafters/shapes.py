"""Shapes of drafted trees: which nodes get children, how many, and which nodes are kept.

`ModelDrafter` grows its trees by a `Shape`, and `TreeOptions` (`tree_options.py`) chooses the
shape. A shape does not know models. It decides by the nodes' ranks and probabilities.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from tokenleap.runtime.growth_plan import GrowthPlan

if TYPE_CHECKING:
    from tokenleap.control import Budget
    from tokenleap.core.distribution import Distribution

__all__ = ["Chain", "Dynamic", "Node", "Paths", "Shape", "Widths"]


@dataclass(eq=False)
class Node:
    """A node of a tree that is being drafted.

    Args:
        token: its token id.
        distribution: the q it was drawn from.
        parent: its parent; None for a child of the root.
        ranks: [depth] the rank of each node on the path down to it: the number of its earlier
            siblings.
        path_prob: the drafter's probability of the path down to it.
        stopped: whether the budget allows no nodes below it (`Budget.stops_below`).
    """

    token: int
    distribution: Distribution
    parent: Node | None
    ranks: tuple[int, ...]
    path_prob: float = 1.0
    stopped: bool = field(default=False)

    @property
    def depth(self) -> int:
        """Distance from the root."""
        return len(self.ranks)


class Shape(ABC):
    """How a tree grows, level by level."""

    prunes: ClassVar[bool] = False
    """Whether `kept` chooses among more nodes than the budget allows. Growth then does not end when
    the budget's number of nodes is reached."""

    @abstractmethod
    def width(self, ranks: tuple[int, ...]) -> int:
        """Number of children of the node with these ranks (`Node.ranks`); () is the root."""

    def frontier(self, level: Sequence[Node]) -> list[Node]:
        """The nodes of a new level that get children in the next pass."""
        return [node for node in level if self.width(node.ranks)]

    def kept(self, nodes: Sequence[Node], limit: int) -> list[Node]:
        """The nodes of the draft: at most `limit`, parents first, with all their ancestors."""
        return list(nodes[:limit])

    def plan(self, depth: int) -> GrowthPlan | None:
        """How trees of this depth grow, for networks that grow them in one call.

        None if that depends on the ranks of nodes.
        """
        return None

    def positions(self, budget: Budget) -> int:
        """Most nodes that the model scores while a tree grows; each takes a KV slot."""
        return max(0, budget.nodes)

    def level_sizes(self, limit: int) -> list[int]:
        """Nodes at depths 1, 2, ... of a full tree with at most `limit` nodes."""
        sizes: list[int] = []
        level: list[tuple[int, ...]] = [()]
        while (left := limit - sum(sizes)) > 0:
            level = [(*ranks, rank) for ranks in level for rank in range(self.width(ranks))][:left]
            if not level:
                break
            sizes.append(len(level))
        return sizes

    @property
    def branches(self) -> bool:
        """Whether a node may have several children."""
        return True


class Chain(Shape):
    """One child per node, as deep as the budget allows."""

    def width(self, ranks: tuple[int, ...]) -> int:
        """See `Shape.width`."""
        return 1

    def plan(self, depth: int) -> GrowthPlan:
        """See `Shape.plan`."""
        return GrowthPlan((1,) * depth)

    def positions(self, budget: Budget) -> int:
        """See `Shape.positions`."""
        return budget.chain

    @property
    def branches(self) -> bool:
        """False: a chain has no branches."""
        return False


class Widths(Shape):
    """Every node at depth d has `widths[d]` children.

    Args:
        widths: children per node at depths 0 (the root), 1, ...
    """

    def __init__(self, widths: Sequence[int]) -> None:
        self._widths = tuple(widths)

    def width(self, ranks: tuple[int, ...]) -> int:
        """See `Shape.width`."""
        return self._widths[len(ranks)] if len(ranks) < len(self._widths) else 0

    def plan(self, depth: int) -> GrowthPlan:
        """See `Shape.plan`."""
        return GrowthPlan(self._widths[:depth])

    @property
    def num_nodes(self) -> int:
        """Nodes of the full tree, without the root."""
        total, level = 0, 1
        for width in self._widths:
            level *= width
            total += level
        return total

    @property
    def branches(self) -> bool:
        """Whether any width is above 1."""
        return any(width > 1 for width in self._widths)


class Paths(Shape):
    """A static tree, given as a list of paths of ranks as in Medusa and EAGLE.

    Args:
        paths: each names one node; [0, 2] is the third child of the root's first child. The
            ancestors of a named node, and the earlier siblings of all these nodes, belong to the
            tree too.
    """

    def __init__(self, paths: Sequence[Sequence[int]]) -> None:
        self._widths: dict[tuple[int, ...], int] = {}
        for path in paths:
            for depth, rank in enumerate(path):
                above = tuple(path[:depth])
                self._widths[above] = max(self._widths.get(above, 0), rank + 1)

    def width(self, ranks: tuple[int, ...]) -> int:
        """See `Shape.width`."""
        return self._widths.get(ranks, 0)

    @property
    def num_nodes(self) -> int:
        """Nodes of the full tree, without the root."""
        return sum(self._widths.values())

    @property
    def branches(self) -> bool:
        """Whether any width is above 1."""
        return any(width > 1 for width in self._widths.values())


class Dynamic(Shape):
    """Grow where the drafter is confident, then keep the most probable nodes.

    Li et al., "EAGLE-2". At every level, the `top_k` nodes with the highest path probability get
    `top_k` children each. At the end the nodes with the highest path probability are kept. They
    form a tree, because no node has a higher path probability than its parent.

    Args:
        top_k: nodes expanded per level, and children of each.
        depth: number of levels.
    """

    prunes: ClassVar[bool] = True

    def __init__(self, top_k: int, depth: int) -> None:
        self._top_k = top_k
        self._depth = depth

    def width(self, ranks: tuple[int, ...]) -> int:
        """See `Shape.width`."""
        return self._top_k if len(ranks) < self._depth else 0

    def plan(self, depth: int) -> GrowthPlan:
        """See `Shape.plan`."""
        return GrowthPlan((self._top_k,) * min(depth, self._depth), beam=self._top_k)

    def positions(self, budget: Budget) -> int:
        """See `Shape.positions`: `top_k` nodes of every level except the last."""
        return self._top_k * max(0, min(budget.depth, self._depth) - 1)

    def level_sizes(self, limit: int) -> list[int]:
        """See `Shape.level_sizes`: an estimate, since the drafter's probabilities decide.

        It is made as if pruning kept a node of every level, and otherwise the levels near the root.
        """
        levels = min(self._depth, limit)
        full = [self._top_k, *[self._top_k**2] * (levels - 1)]
        sizes: list[int] = []
        for level, size in enumerate(full[:levels], 1):
            sizes.append(min(size, limit - sum(sizes) - (levels - level)))
        return sizes

    def frontier(self, level: Sequence[Node]) -> list[Node]:
        """The `top_k` nodes of a level with the highest path probability."""
        best = sorted(super().frontier(level), key=lambda node: -node.path_prob)
        return best[: self._top_k]

    def kept(self, nodes: Sequence[Node], limit: int) -> list[Node]:
        """The nodes with the highest path probability; on a tie those closer to the root."""
        best = sorted(nodes, key=lambda node: (-node.path_prob, node.depth))[:limit]
        return sorted(best, key=lambda node: node.depth)
