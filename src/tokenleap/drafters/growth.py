"""`Growth`: the tree that is being drafted for one request, by `ModelDrafter`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tokenleap.control import Budget
from tokenleap.core.distribution import Distribution
from tokenleap.core.tree import Draft, TokenTree
from tokenleap.drafters.drawing import Drawn
from tokenleap.drafters.shapes import Node, Shape
from tokenleap.request import Request
from tokenleap.runtime.network import GrowthDraw

__all__ = ["Growth"]


@dataclass
class Growth:
    """The tree being drafted for one request."""

    request: Request
    budget: Budget
    pending: list[int]
    nodes: list[Node] = field(default_factory=list)
    """All drafted nodes, parents first."""
    scored: list[Node] = field(default_factory=list)
    """Nodes that the model has scored or scores in the next pass."""
    frontier: list[Node | None] = field(default_factory=lambda: [None])
    """Nodes that get children after the next pass; None is the root."""
    draws: list[tuple[Node, Distribution]] = field(default_factory=list)
    """All draws in order, where draws of the same token share a node."""
    num_computed: int = 0
    """Nodes of `tree()` that earlier passes computed."""
    at_once: GrowthDraw | None = None
    """How one call draws the tokens; None if it takes the most probable ones."""

    def tree(self) -> TokenTree:
        """The pending tokens as a chain, and the scored nodes below its last token, the root."""
        root = len(self.pending) - 1
        index = {id(node): root + 1 + i for i, node in enumerate(self.scored)}
        parents = [index[id(n.parent)] if n.parent else root for n in self.scored]
        tokens = (*self.pending, *(node.token for node in self.scored))
        return TokenTree(tokens, (*range(-1, root), *parents))

    def output_to(self, node: Node | None) -> list[int]:
        """All output tokens on the path to a node: the committed ones and the drafted ones."""
        path: list[int] = []
        while node is not None:
            path.append(node.token)
            node = node.parent
        return [*self.request.output_ids, *reversed(path)]

    @property
    def size(self) -> int:
        """What counts against the budget's number of nodes.

        It is the number of draws: which draws belong to the draft must not depend on their tokens
        (invariant 2), whether these are equal or not.
        """
        return max(len(self.nodes), len(self.draws))

    def draft(self, shape: Shape) -> Draft:
        """The nodes that the shape keeps."""
        limit = self.budget.nodes
        draws = self.draws[:limit]
        nodes = list(dict.fromkeys(node for node, _ in draws)) or shape.kept(self.nodes, limit)
        index = {id(node): i for i, node in enumerate(nodes, 1)}
        parents = [index[id(node.parent)] if node.parent else 0 for node in nodes]
        tree = TokenTree((self.request.root, *(n.token for n in nodes)), (-1, *parents))
        if draws:
            return Draft.drawn(tree, [(index[id(node)], q) for node, q in draws])
        path_probs = () if shape.branches else tuple(node.path_prob for node in nodes)
        return Draft(tree, tuple(node.distribution for node in nodes), path_probs=path_probs)

    def children(self, node: Node | None, drawn: Sequence[Drawn], *, shared: bool) -> list[Node]:
        """New nodes below a node, not yet added to the tree.

        Args:
            node: the parent; None for the root.
            drawn: its children.
            shared: whether equal draws share a node, and are kept in `draws`.
        """
        ranks = () if node is None else node.ranks
        path_prob = 1.0 if node is None else node.path_prob
        children = []
        for rank, (token, distribution, token_prob) in enumerate(drawn):
            child = Node(token, distribution, node, (*ranks, rank), path_prob * token_prob)
            child.stopped = self.budget.stops_below(token_prob, child.path_prob)
            children.append(child)
        return self._without_repeats(children) if shared else children

    def _without_repeats(self, drawn: Sequence[Node]) -> list[Node]:
        """One node for each token that was drawn for a node; `draws` gets all draws."""
        nodes: dict[int, Node] = {}
        for node in drawn:
            self.draws.append((nodes.setdefault(node.token, node), node.distribution))
        return list(nodes.values())
