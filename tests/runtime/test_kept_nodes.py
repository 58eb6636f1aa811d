"""Kept nodes: KV after the committed tokens that a row's next tree begins with.

Random operations on a slab are compared with lists.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch

from tests.tiny import tiny_model
from tokenleap.core.tree import TokenTree
from tokenleap.runtime.attention import KEY_BLOCK
from tokenleap.runtime.kv_slab import KVSlab, OverBudget
from tokenleap.runtime.native.build import library
from tokenleap.runtime.native.network import SlotMover, checked
from tokenleap.runtime.target import Target

HEADS, WIDTH, LAYERS = 2, 3, 2


@dataclass
class Row:
    """The expected contents of a row: the number that each node's KV consists of."""

    committed: list[float] = field(default_factory=list)
    kept: list[float] = field(default_factory=list)

    @property
    def size(self) -> int:
        return len(self.committed) + len(self.kept)


class Pair:
    """A slab and the rows it should hold."""

    def __init__(self, dice: random.Random) -> None:
        self.slab, self.rows, self.dice = KVSlab(), list[Row](), dice
        self._next = 1.0

    @torch.inference_mode()
    def compute(self, first: int, counts: list[int], committed: int | None = None) -> None:
        """A pass over adjacent rows, of which each then commits and keeps some of its nodes.

        Args:
            first: the first row.
            counts: new nodes of each row.
            committed: how many nodes each row commits; it then keeps all others. None: at random.
        """
        rows = self.rows[first : first + len(counts)]
        self.slab.begin(first, [row.size for row in rows], counts, max(counts))
        new = [[self._number() for _ in range(count)] for count in counts]
        states = torch.tensor([n for numbers in new for n in numbers])[:, None, None]
        for layer in range(LAYERS):
            keys = (states + layer).expand(-1, HEADS, WIDTH)
            self.slab.write(keys, -keys, layer)
        for index, (row, numbers) in enumerate(zip(rows, new, strict=True), first):
            tree = [*row.kept, *numbers]
            chosen = range(len(tree)) if committed is not None else self.some_of(len(tree))
            split = self.dice.randint(0, len(chosen)) if committed is None else committed
            self.commit(index, row, tree, chosen, split)

    def some_of(self, size: int) -> Sequence[int]:
        """Some nodes of a tree, with its root."""
        return sorted({0, *self.dice.sample(range(size), self.dice.randint(0, size))})

    def commit(
        self, index: int, row: Row, tree: list[float], chosen: Sequence[int], split: int
    ) -> None:
        nodes, kept = chosen[:split], chosen[split:]
        self.slab.commit(index, nodes, kept)
        row.committed += [tree[node] for node in nodes]
        row.kept = [tree[node] for node in kept]

    def _number(self) -> float:
        self._next += 1
        return self._next

    # Operations

    def add(self) -> None:
        if len(self.rows) < 6:
            self.slab.add_row()
            self.rows.append(Row())

    def step(self) -> None:
        if self.rows:
            first = self.dice.randrange(len(self.rows))
            number = self.dice.randint(1, len(self.rows) - first)
            self.compute(first, [self.dice.randint(1, 5) for _ in range(number)])

    def grow(self) -> None:
        if self.rows:
            self.compute(self.dice.randrange(len(self.rows)), [self.dice.randint(1, KEY_BLOCK)])

    def remove(self) -> None:
        if self.rows:
            row = self.dice.randrange(len(self.rows))
            self.slab.remove_row(row)
            last = self.rows.pop()
            if row < len(self.rows):
                self.rows[row] = last

    def roll_back(self) -> None:
        if self.rows:
            index = self.dice.randrange(len(self.rows))
            row = self.rows[index]
            length = self.dice.randint(0, len(row.committed))
            self.slab.rollback(index, length)
            row.committed, row.kept = row.committed[:length], []

    def copy(self) -> None:
        if self.rows:
            source, row = (self.dice.randrange(len(self.rows)) for _ in range(2))
            self.slab.copy_row(source, row)
            given = self.rows[source]
            self.rows[row] = Row(list(given.committed), list(given.kept))

    def shrink(self) -> None:
        self.slab.shrink()

    def run(self, steps: int) -> None:
        often = (self.add, self.step, self.step, self.step, self.grow)
        seldom = (self.remove, self.roll_back, self.copy, self.shrink)
        for _ in range(steps):
            self.dice.choice((*often, *seldom))()
            self.check()

    def check(self) -> None:
        assert self.slab.lengths == [len(row.committed) for row in self.rows]
        assert self.slab.kept == [len(row.kept) for row in self.rows]
        assert self.slab.longest == max((row.size for row in self.rows), default=0)
        if not self.slab._keys:
            return
        for index, row in enumerate(self.rows):
            expected = torch.tensor([*row.committed, *row.kept])[None, :, None]
            expected = expected.expand(HEADS, -1, WIDTH)
            for layer in range(LAYERS):
                keys = self.slab._keys[layer][index, :, : row.size]
                values = self.slab._values[layer][index, :, : row.size]
                assert torch.equal(keys, expected + layer)
                assert torch.equal(values, -expected - layer)


@pytest.mark.parametrize("native", [False, True], ids=["torch", "native"])
@pytest.mark.parametrize("seed", range(12))
def test_random_operations(seed: int, native: bool) -> None:
    pair = Pair(random.Random(seed))
    if native:
        pair.slab.mover = SlotMover(checked(library()), HEADS, WIDTH * torch.float32.itemsize)
    pair.add()
    pair.run(60)


def test_a_limit_never_cuts_kept_nodes() -> None:
    """A slab that must shrink for another row keeps the positions that kept nodes take."""
    pair = Pair(random.Random(0))
    pair.add()
    pair.compute(0, [KEY_BLOCK + 1], committed=1)
    pair.slab.limit = 3 * KEY_BLOCK
    with pytest.raises(OverBudget):
        pair.slab.add_row()
    pair.check()
    pair.slab.shrink()
    pair.check()
    pair.slab.limit = 4 * KEY_BLOCK
    pair.add()
    pair.check()


def test_kept_nodes_are_not_computed_again() -> None:
    """The next pass computes the rest of the tree, with the result of a pass over all of it."""
    target = Target(tiny_model("lean"))
    for key in (0, 1):
        target.add(key)
        target.prefill(key, range(5, 14))
    before = TokenTree((3, 5, 8, 9, 7), (-1, 0, 0, 1, 2))
    target.verify([0], [before])
    target.commit(0, (), (0, 2, 4))
    assert (target.cached(0), target.kept(0)) == (9, 3)
    after = TokenTree((3, 8, 7, 40, 41, 42), (-1, 0, 1, 2, 2, 1))
    with_kept, whole = target.verify([0, 1], [after, after])
    assert (len(with_kept.scores), len(whole.scores)) == (3, 6)
    torch.testing.assert_close(with_kept.scores, whole.scores[3:], atol=1e-5, rtol=1e-5)


def test_rows_without_a_tree_keep_theirs() -> None:
    """Padding of a row between two others is written after its kept nodes."""
    target = Target(tiny_model("lean"))
    for key in range(3):
        target.add(key)
        target.prefill(key, range(5, 14))
    tree = TokenTree((3, 5, 8), (-1, 0, 0))
    target.verify([1], [tree])
    target.commit(1, (), (0, 1, 2))
    longer = TokenTree((*tree.tokens, 9), (*tree.parents, 1))
    target.verify([0, 2], [tree, tree])
    (expected,) = target.verify([1], [longer])
    target.verify([0, 2], [tree, tree])
    (found,) = target.verify([1], [longer])
    assert torch.equal(found.scores, expected.scores)
    target.commit(1, (0,))
    assert target.kept(1) == 0
