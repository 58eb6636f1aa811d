"""Verifying a tree costs its nodes, however many paths they make.

Separate sequences would compute the prefix they share once for each of them; tree attention
computes every node once.
"""

from __future__ import annotations

import pytest
import torch

from tests.counting import counted
from tests.tiny import VOCAB_SIZE, tiny_model
from tokenleap.core.tree import TokenTree, chain
from tokenleap.runtime.target import Target

CONTEXT = [3, 5, 7, 2, 9]


def of_widths(*widths: int) -> TokenTree:
    """Every node at depth d has `widths[d]` children."""
    parents, level = [-1], [0]
    for width in widths:
        below = [parent for parent in level for _ in range(width)]
        level = list(range(len(parents), len(parents) + len(below)))
        parents += below
    tokens = tuple((11 + 7 * node) % VOCAB_SIZE for node in range(len(parents)))
    return TokenTree(tokens, tuple(parents))


def leaves(tree: TokenTree) -> list[int]:
    return [node for node in range(len(tree)) if not tree.children[node]]


class Counted:
    """A target after `CONTEXT` that writes down the positions each of its passes computes."""

    def __init__(self) -> None:
        self.target = Target(tiny_model())
        self.target.add(0)
        self.target.prefill(0, CONTEXT)
        self.positions = counted(self.target)

    def verify(self, tree: TokenTree) -> torch.Tensor:
        """[n+1, V]."""
        return self.target.verify([0], [tree])[0].scores.clone()


SIXTEEN_LEAVES = {
    "a trunk": (of_widths(1, 1, 1, 1, 16), 21),
    "a bush": (of_widths(2, 2, 2, 2, 1), 47),
    "a fork": (of_widths(1, 1, 1, 2, 8), 22),
}


@pytest.mark.parametrize("name", list(SIXTEEN_LEAVES))
def test_a_node_is_computed_once_whatever_shares_it(name: str) -> None:
    tree, size = SIXTEEN_LEAVES[name]
    assert max(tree.depths) == 5
    assert len(leaves(tree)) == 16
    assert len(tree) == size
    counted = Counted()
    logits = counted.verify(tree)
    assert counted.positions == [len(tree)]
    assert len(logits) == len(tree)
    # The 16 sequences by themselves.
    counted.positions.clear()
    for leaf in leaves(tree):
        alone = counted.verify(chain([tree.tokens[0], *tree.path_tokens(leaf)]))
        assert torch.allclose(alone[-1], logits[leaf], atol=1e-4)
    assert sum(counted.positions) == 16 * 6
    assert sum(counted.positions) > 2 * len(tree)


def test_paths_cost_nothing() -> None:
    """A chain, a binary tree and a star of 31 nodes."""
    counted = Counted()
    trees = [of_widths(*[1] * 30), of_widths(2, 2, 2, 2), of_widths(30)]
    for tree in trees:
        counted.verify(tree)
    assert [len(leaves(tree)) for tree in trees] == [1, 16, 30]
    assert counted.positions == [31, 31, 31]


def test_nodes_cost_one_position_each() -> None:
    counted = Counted()
    for width in (4, 8, 16, 32):
        counted.verify(of_widths(1, 1, width))
    assert counted.positions == [7, 11, 19, 35]
