"""The token tree: what a drafter proposes for one row, and what the target verifies.

Node 0 is always the *root*: the last committed token, whose KV is not in the cache yet (invariant
1). Nodes 1 to n are drafted; a parent comes before its children. A chain is a tree of width 1, and
a tree of the root alone is plain autoregressive decoding (invariant 3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from operator import lt

from foretoken.core.distribution import Distribution, OneHots

__all__ = ["Draft", "TokenTree", "chain"]


@dataclass(frozen=True)
class TokenTree:
    """Tokens and the parent of each; immutable, so that everything derived is computed once.

    Args:
        tokens: token ids of all nodes, root first.
        parents: index of each node's parent; -1 for the root, and `parents[i] < i` otherwise.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        assert len(self.tokens) == len(self.parents) > 0, "a tree has a root"
        assert self.parents[0] == -1, "node 0 is the root"
        assert min(self.parents[1:], default=0) >= 0, "node 0 is the only root"
        assert all(map(lt, self.parents, count())), "parents come first"

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def num_drafted(self) -> int:
        """Nodes without the root."""
        return len(self.tokens) - 1

    @cached_property
    def is_chain(self) -> bool:
        """Whether every node is the only child of the node before it."""
        return self.parents == tuple(range(-1, len(self.parents) - 1))

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Distance of each node from the root (root: 0)."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        return tuple(depths)

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """Children of each node, in the order in which they were drafted."""
        if self.is_chain:
            return (*zip(range(1, len(self.tokens)), strict=True), ())
        lists: list[list[int]] = [[] for _ in self.tokens]
        for node, parent in enumerate(self.parents[1:], 1):
            lists[parent].append(node)
        return tuple(tuple(nodes) for nodes in lists)

    def path(self, node: int) -> tuple[int, ...]:
        """Drafted nodes from below the root down to `node`, both ends included."""
        nodes: list[int] = []
        while node > 0:
            nodes.append(node)
            node = self.parents[node]
        return tuple(reversed(nodes))

    def path_tokens(self, node: int) -> list[int]:
        """Tokens of `path(node)`: what stands between the root and the position after `node`."""
        return [self.tokens[i] for i in self.path(node)]

    @cached_property
    def sights(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Who sees whom, in short: of each node (m, others).

        It sees nodes 0 to m - 1 and the others, ascending: its ancestors and itself.
        """
        sights: list[tuple[int, tuple[int, ...]]] = []
        for node, parent in enumerate(self.parents):
            seen, others = sights[parent] if node else (0, ())
            sights.append((seen, (*others, node)) if others or node > seen else (node + 1, ()))
        return tuple(sights)


def chain(tokens: Sequence[int]) -> TokenTree:
    """A tree of width 1: the root followed by the drafted tokens, each the child of the last."""
    return TokenTree(tuple(tokens), tuple(range(-1, len(tokens) - 1)))


@dataclass(frozen=True)
class Draft:
    """A drafter's proposal for one row.

    Args:
        tree: the root and the drafted nodes.
        q: the distribution each drafted node was drawn from, given its ancestors and its earlier
            siblings (invariant 2): `q[i - 1]` belongs to node `i`. A node that was not drawn at
            random has a one-hot distribution.
        features: of a guess that was looked up, what each drafted node was guessed by
            (`control.evidence`): controllers learn how often that is right. Else none.
    """

    tree: TokenTree
    q: Sequence[Distribution]
    features: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        assert len(self.q) == self.tree.num_drafted, "every drafted node has a distribution"
        assert len(self.features) in (0, len(self.q)), "all nodes have features, or none has"

    @staticmethod
    def empty(root: int) -> Draft:
        """Nothing to say: the step becomes a plain one-token step."""
        return Draft(chain([root]), ())

    @staticmethod
    def deterministic(tree: TokenTree, features: tuple[int, ...] = ()) -> Draft:
        """A draft that was not sampled: every distribution is one-hot at its token."""
        return Draft(tree, OneHots(tree.tokens[1:]), features)

    def only(self, nodes: Sequence[int]) -> Draft:
        """The draft with these drafted nodes alone; every one comes after its parent."""
        tree = self.tree
        if len(nodes) == tree.num_drafted:
            return self
        places = {0: 0, **{node: place for place, node in enumerate(nodes, 1)}}
        tokens = [tree.tokens[node] for node in nodes]
        parents = (-1, *(places[tree.parents[node]] for node in nodes))
        certain = isinstance(self.q, OneHots)
        return Draft(
            TokenTree((tree.tokens[0], *tokens), parents),
            OneHots(tokens) if certain else tuple(self.q[node - 1] for node in nodes),
            tuple(self.features[node - 1] for node in nodes) if self.features else (),
        )

    def q_of(self, node: int) -> Distribution:
        """The distribution drafted node `node` (1 to n) was drawn from."""
        assert 1 <= node <= self.tree.num_drafted
        return self.q[node - 1]
