"""The token tree: a drafter proposes it for one row, and the target verifies it.

Node 0 is always the *root*: the last committed token, whose KV is not in the cache yet (invariant
1). Nodes 1 to n are drafted, and a parent comes before its children. A chain is a tree of width 1.
A tree of the root alone is plain autoregressive decoding (invariant 3).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from operator import lt

from tokenleap.core.distribution import Distribution, OneHots


@dataclass(frozen=True)
class TokenTree:
    """Tokens with the parent of each.

    It is immutable, so derived properties are computed once.

    Args:
        tokens: [1 + n] token ids of all nodes, root first.
        parents: [1 + n] index of each node's parent; -1 for the root, and `parents[i] < i` for the
            others.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        assert len(self.tokens) == len(self.parents) > 0, "a tree has a root"
        assert self.parents[0] == -1, "node 0 is the root"
        assert min(self.parents[1:], default=0) >= 0, "node 0 is the only root"
        assert all(map(lt, self.parents, count())), "a parent comes before its children"

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def num_drafted(self) -> int:
        """Number of drafted nodes: all but the root."""
        return len(self.tokens) - 1

    @cached_property
    def is_chain(self) -> bool:
        """Whether every node is the only child of the node before it."""
        return self.parents == tuple(range(-1, len(self.parents) - 1))

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """[1 + n] distance of each node from the root; 0 for the root."""
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
        """Drafted nodes from the root's child down to `node`, both included; empty for node 0."""
        nodes: list[int] = []
        while node > 0:
            nodes.append(node)
            node = self.parents[node]
        return tuple(reversed(nodes))

    def walk(self, tokens: Iterable[int]) -> list[int]:
        """The nodes of a path of tokens from the root's child on, as far as the tree has it."""
        nodes = [0]
        for token in tokens:
            same = (node for node in self.children[nodes[-1]] if self.tokens[node] == token)
            if (node := next(same, None)) is None:
                break
            nodes.append(node)
        return nodes[1:]

    def path_tokens(self, node: int) -> list[int]:
        """Tokens of `path(node)`: all tokens after the root, up to and including `node`."""
        return [self.tokens[i] for i in self.path(node)]

    @cached_property
    def visibility(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """For each node, the nodes that it attends to: its ancestors and itself.

        Returns:
            [1 + n] pairs (m, others): the node attends to nodes 0 to m - 1, and to `others` in
            ascending order. This is the tree's attention mask in short form.
        """
        visibility: list[tuple[int, tuple[int, ...]]] = []
        for node, parent in enumerate(self.parents):
            prefix, others = visibility[parent] if node else (0, ())
            if others or node > prefix:
                visibility.append((prefix, (*others, node)))
            else:
                visibility.append((node + 1, ()))
        return tuple(visibility)

    def visibility_from(self, first: int) -> Sequence[tuple[int, tuple[int, ...]]]:
        """`visibility` of the nodes from `first` on. A large tree may have few of them."""
        return [self._visible(n) for n in range(first, len(self))] if first else self.visibility

    def _visible(self, node: int) -> tuple[int, tuple[int, ...]]:
        path = (0, *self.path(node))
        prefix = next((i for i, ancestor in enumerate(path) if ancestor != i), len(path))
        return prefix, path[prefix:]


def chain(tokens: Sequence[int]) -> TokenTree:
    """A tree of width 1: `tokens[0]` is the root, and each token is the child of the one before."""
    return TokenTree(tuple(tokens), tuple(range(-1, len(tokens) - 1)))


class GrowingTree:
    """A tree to which nodes are added one by one, and whose children are found by their tokens."""

    def __init__(self, root: int) -> None:
        self.tokens, self.parents = [root], [-1]
        self._children: dict[tuple[int, int], int] = {}  # (node, token) -> its first such child

    def __len__(self) -> int:
        return len(self.tokens)

    def child(self, parent: int, token: int) -> int | None:
        """The first child with this token."""
        return self._children.get((parent, token))

    def add(self, parent: int, token: int) -> int:
        """Add a node, whether the parent has a child with this token or not."""
        node = len(self.tokens)
        self.tokens.append(token)
        self.parents.append(parent)
        self._children.setdefault((parent, token), node)
        return node

    def tree(self) -> TokenTree:
        """The tree as it is now."""
        return TokenTree(tuple(self.tokens), tuple(self.parents))


@dataclass(frozen=True)
class Draft:
    """A drafter's proposal for one row.

    Args:
        tree: the root and the n drafted nodes.
        q: [n] the distribution each drafted node was drawn from, given its ancestors and its
            earlier siblings (invariant 2): `q[i - 1]` belongs to node `i`. A node that was not
            drawn at random has a one-hot distribution.
        features: [n] one feature per drafted node, or empty. A drafter that looks its tokens up
            (`DrafterTraits.looks_up`) says here how it found each token: by the length of the
            match, or by the rank of the token (`control.estimates`). Controllers learn an
            acceptance rate for each feature.
        draws: (node, q) of all draws in order, if a token that was drawn several times below the
            same path has one node for these draws; `q` has that of the first. Empty if every node
            was drawn once.
        path_probs: [n] the drafter's probability of the path down to each drafted node, or empty
            if it has none. Of tokens drawn with the target's own noise, it may be the product of
            their clarity, which is no probability under q (`drafters.growth`). NaN for nodes that
            another drafter appended.
    """

    tree: TokenTree
    q: Sequence[Distribution]
    features: tuple[int, ...] = ()
    draws: tuple[tuple[int, Distribution], ...] = ()
    path_probs: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        assert len(self.q) == self.tree.num_drafted, "every drafted node has a distribution"
        assert len(self.features) in (0, len(self.q)), "every drafted node has a feature, or none"
        assert len(self.path_probs) in (0, len(self.q)), "every path has a probability, or none"

    @staticmethod
    def empty(root: int) -> Draft:
        """A draft without drafted nodes: the step decodes one token (invariant 3)."""
        return Draft(chain([root]), ())

    @staticmethod
    def deterministic(tree: TokenTree, features: tuple[int, ...] = ()) -> Draft:
        """A draft that was not sampled: every q is one-hot at its token."""
        return Draft(tree, OneHots(tree.tokens[1:]), features)

    @staticmethod
    def drawn(tree: TokenTree, draws: Sequence[tuple[int, Distribution]]) -> Draft:
        """A draft with shared nodes, if there are more draws than nodes.

        Args:
            tree: siblings are in the order of their first draws.
            draws: (node, q) in the order of the draws; every drafted node has at least one.
        """
        first: dict[int, Distribution] = {}
        for node, q in draws:
            first.setdefault(node, q)
        q_of_nodes = tuple(first[node] for node in range(1, len(tree)))
        return Draft(tree, q_of_nodes, draws=tuple(draws) if len(draws) > len(first) else ())

    @property
    def is_one_hot(self) -> bool:
        """Whether it is known without reading q that no token was sampled."""
        return isinstance(self.q, OneHots)

    @property
    def all_draws(self) -> Iterable[tuple[int, Distribution]]:
        """(node, q) of every draw, in order."""
        return self.draws or enumerate(self.q, 1)

    def tries(self, node: int) -> Iterator[tuple[int, Distribution]]:
        """The draws below a node, in order: the child that each gave, and its q.

        A rule that tests drawn tokens one by one tests these. A child that was drawn several times
        is there several times.
        """
        if self.draws:
            return iter(self._draws_below.get(node, ()))
        return ((child, self.q_of(child)) for child in self.tree.children[node])

    @cached_property
    def _draws_below(self) -> dict[int, list[tuple[int, Distribution]]]:
        below: dict[int, list[tuple[int, Distribution]]] = {}
        for node, q in self.draws:
            below.setdefault(self.tree.parents[node], []).append((node, q))
        return below

    def only(self, nodes: Sequence[int]) -> Draft:
        """The draft with these drafted nodes only.

        Args:
            nodes: drafted nodes to keep, each after its parent.
        """
        tree = self.tree
        if len(nodes) == tree.num_drafted:
            return self
        new_index = {0: 0, **{node: index for index, node in enumerate(nodes, 1)}}
        tokens = [tree.tokens[node] for node in nodes]
        parents = (-1, *(new_index[tree.parents[node]] for node in nodes))
        return Draft(
            TokenTree((tree.tokens[0], *tokens), parents),
            OneHots(tokens) if self.is_one_hot else tuple(self.q[node - 1] for node in nodes),
            tuple(self.features[node - 1] for node in nodes) if self.features else (),
            tuple((new_index[node], q) for node, q in self.draws if node in new_index),
            tuple(self.path_probs[node - 1] for node in nodes) if self.path_probs else (),
        )

    def q_of(self, node: int) -> Distribution:
        """The q that drafted node `node` (1 to n) was drawn from."""
        assert 1 <= node <= self.tree.num_drafted
        return self.q[node - 1]
