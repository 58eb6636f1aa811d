"""Shapes of drafted trees: which nodes get children, how many, and which are kept.

A shape knows nothing of models: it is shown nodes with their probabilities and their ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Annotated, Any, ClassVar, Literal, Self

from annotated_types import Ge, Le, Len
from pydantic import field_validator, model_validator

from foretoken.control import Budget
from foretoken.core.distribution import Distribution
from foretoken.core.params import GREEDY_BELOW
from foretoken.drafters.base import DrafterOptions
from foretoken.drafters.tree_file import MAX_NODES, TreeFile, is_tree_file

__all__ = ["Chain", "Dynamic", "Node", "Paths", "Shape", "TreeOptions", "Widths", "shape_of"]


@dataclass(eq=False)
class Node:
    """A node of a tree that is being drafted.

    Args:
        token: the token.
        distribution: the distribution it was drawn from.
        parent: the node above it; None for the root's children.
        ranks: how many earlier siblings it and each of its ancestors have, from the top.
        path_prob: the drafter's probability of the path down to it.
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
    """Whether `kept` chooses among more nodes than the budget has, so that growth goes on."""

    @abstractmethod
    def width(self, ranks: tuple[int, ...]) -> int:
        """How many children the node with these ranks gets; () is the root."""

    def frontier(self, level: Sequence[Node]) -> list[Node]:
        """Nodes of a new level below which to go on."""
        return [node for node in level if self.width(node.ranks)]

    def kept(self, nodes: Sequence[Node], limit: int) -> list[Node]:
        """At most `limit` nodes for the draft, parents first; with a node its ancestors."""
        return list(nodes[:limit])

    def positions(self, budget: Budget) -> int:
        """Most nodes that are scored, and so take positions of KV, while a tree grows."""
        return max(0, budget.nodes)

    def level_sizes(self, limit: int) -> list[int]:
        """How many nodes each level of a full tree has, `limit` in all."""
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
    """One child each, as deep as the budget goes."""

    def width(self, ranks: tuple[int, ...]) -> int:
        """See `Shape.width`."""
        return 1

    def positions(self, budget: Budget) -> int:
        """See `Shape.positions`."""
        return budget.chain

    @property
    def branches(self) -> bool:
        """Never."""
        return False


class Widths(Shape):
    """Every node at depth d has `widths[d]` children."""

    def __init__(self, widths: Sequence[int]) -> None:
        self._widths = tuple(widths)

    def width(self, ranks: tuple[int, ...]) -> int:
        """See `Shape.width`."""
        return self._widths[len(ranks)] if len(ranks) < len(self._widths) else 0

    @property
    def num_nodes(self) -> int:
        """Sum over the levels of the product of widths."""
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
    """Given as a list of paths of ranks, as Medusa and EAGLE give theirs.

    Args:
        paths: [0, 2] is the third child of the root's first child. A path's beginnings, and the
            siblings ranked before it, belong to the tree.
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
        """Sum of all widths."""
        return sum(self._widths.values())

    @property
    def branches(self) -> bool:
        """Whether any width is above 1."""
        return any(width > 1 for width in self._widths.values())


class Dynamic(Shape):
    """Grow where the drafter is confident, then keep the most probable nodes.

    Li et al., "EAGLE-2": in every level the `top_k` best nodes by path probability are expanded by
    `top_k` children each; at the end all nodes are ranked by path probability and the best kept. As
    no path is more probable than its beginning, what is kept is a tree.

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

    def positions(self, budget: Budget) -> int:
        """See `Shape.positions`: of every level but the last those that are expanded."""
        return self._top_k * max(0, min(budget.depth, self._depth) - 1)

    def level_sizes(self, limit: int) -> list[int]:
        """See `Shape.level_sizes`: as if of too many nodes the shallower ones were kept."""
        full = [self._top_k, *[self._top_k**2] * (self._depth - 1)]
        left = [max(0, limit - above) for above in accumulate(full, initial=0)]
        return [min(nodes, room) for nodes, room in zip(full, left, strict=False) if room]

    def frontier(self, level: Sequence[Node]) -> list[Node]:
        """The most probable of a level."""
        best = sorted(super().frontier(level), key=lambda node: -node.path_prob)
        return best[: self._top_k]

    def kept(self, nodes: Sequence[Node], limit: int) -> list[Node]:
        """The most probable nodes; of equals the shallower, so that parents come first."""
        best = sorted(nodes, key=lambda node: (-node.path_prob, node.depth))[:limit]
        return sorted(best, key=lambda node: node.depth)


class TreeOptions(DrafterOptions):
    """How a model drafts: options shared by the methods that draft with one.

    Args:
        draft_temperature: temperature of the draft; None takes the request's, 0 drafts the argmax.
        tree: None is a chain; [4, 2, 2, 1] gives the root four children, each of them two, and so
            on; [[0], [0, 0], [1]] names the nodes by their ranks; "dynamic" grows EAGLE-2's tree; a
            `Path`, or text that ends in .json, is a file written by `foretoken tree`, read here.
        tree_top_k: for "dynamic", nodes expanded per level and children of each.
        tree_depth: for "dynamic", the number of levels.
        expansion: how children are chosen: `top_k` takes the most probable (q is one-hot), `sample`
            draws without replacement, `sample_with_replacement` independently; `auto` is `sample`
            for sampled requests and `top_k` for greedy ones.
    """

    draft_temperature: Annotated[float, Ge(0), Le(100)] | None = None
    tree: (
        Literal["dynamic"]
        | Annotated[tuple[Annotated[int, Ge(1), Le(64)], ...], Len(1)]
        | Annotated[tuple[tuple[Annotated[int, Ge(0), Le(63)], ...], ...], Len(1)]
        | None
    ) = None
    tree_top_k: Annotated[int, Ge(1), Le(64)] = 4
    tree_depth: Annotated[int, Ge(1), Le(64)] = 5
    expansion: Literal["auto", "top_k", "sample", "sample_with_replacement"] = "auto"

    @model_validator(mode="before")
    @classmethod
    def _tree_of_a_file(cls, fields: Any) -> Any:
        if isinstance(fields, dict) and is_tree_file(fields.get("tree")):
            return {**fields, "tree": TreeFile.load(fields["tree"]).paths}
        return fields

    @field_validator("tree")
    @classmethod
    def _not_too_large(cls, value: object) -> object:
        if isinstance(value, tuple):
            if () in value:
                raise ValueError("a path needs at least one rank")
            nodes = _static(value).num_nodes
            if nodes > MAX_NODES:
                raise ValueError(f"the tree has {nodes} nodes, more than {MAX_NODES}")
        return value

    @model_validator(mode="after")
    def _dynamic_trees_are_not_sampled(self) -> Self:
        # Its last selection drops nodes for their probability, which the drafting invariant forbids
        # for nodes that were drawn.
        if self.tree == "dynamic" and self.expansion not in ("auto", "top_k"):
            raise ValueError(f"tree 'dynamic' takes expansion 'top_k', not '{self.expansion}'.")
        return self

    @model_validator(mode="after")
    def _nothing_is_ignored(self) -> Self:
        if self.tree != "dynamic":
            for name in ("tree_top_k", "tree_depth"):
                if name in self.model_fields_set:
                    raise ValueError(f"{name} is for tree 'dynamic': remove it.")
        if self.draft_temperature is not None and (
            self.tree == "dynamic" or self.expansion == "top_k"
        ):
            raise ValueError("draft_temperature has no effect where children are the top-k.")
        return self

    def takes_most_probable(self, temperature: float) -> bool:
        """Whether children are the top-k for a draft of this temperature, rather than drawn."""
        if self.expansion == "auto":
            return self.tree == "dynamic" or temperature < GREEDY_BELOW
        return self.expansion == "top_k"

    def default_num_speculative_tokens(self) -> int | None:
        """All nodes of a static tree; None for shapes that fit any number."""
        return _static(self.tree).num_nodes if isinstance(self.tree, tuple) else None


def _static(tree: tuple[int, ...] | tuple[tuple[int, ...], ...]) -> Widths | Paths:
    if isinstance(tree[0], tuple):
        return Paths([path for path in tree if isinstance(path, tuple)])
    return Widths([width for width in tree if isinstance(width, int)])


def shape_of(options: TreeOptions) -> Shape:
    """The shape these options ask for; without one, a chain."""
    if options.tree is None:
        return Chain()
    if isinstance(options.tree, tuple):
        return _static(options.tree)
    return Dynamic(options.tree_top_k, options.tree_depth)
