"""Row state: tensors that a row carries, written once and never rolled back.

An encoder-decoder's cross-attention keeps its keys and values so.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.tiny import tiny_model
from tokenleap.core.tree import TokenTree, chain
from tokenleap.runtime.attention import KEY_BLOCK
from tokenleap.runtime.kv_slab import KVSlab, OverBudget
from tokenleap.runtime.target import Target

TREE = TokenTree((5, 3, 5, 8, 9), (-1, 0, 0, 1, 2))


@pytest.fixture
def target() -> Target:
    return Target(tiny_model("lean", max_position_embeddings=4 * KEY_BLOCK))


def state_of(seed: int, num_bytes: int = 4000) -> list[Tensor]:
    """Two tensors of so many bytes together."""
    generator = torch.Generator().manual_seed(seed)
    sizes = num_bytes // 8, num_bytes // 4 - num_bytes // 8
    return [torch.randn(size, generator=generator) for size in sizes]


def open_row(target: Target, key: int, state: list[Tensor] | None = None, tokens: int = 9) -> None:
    target.add(key)
    target.prefill(key, [(key + i) % 90 for i in range(tokens)])
    if state is not None:
        target.set_state(key, state)


def assert_same(found: object, expected: list[Tensor]) -> None:
    """The same tensors with the values they were given with."""
    assert isinstance(found, tuple)
    assert len(found) == len(expected)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_a_row_has_none_until_it_is_given() -> None:
    slab = KVSlab()
    row = slab.add_row()
    assert slab.state(row) == ()
    assert slab.state_bytes == 0
    state = state_of(1)
    slab.set_state(row, state)
    assert_same(slab.state(row), state)
    assert slab.state_bytes == 4000


def commit_a_path(target: Target) -> None:
    target.verify([0], [TREE])
    target.commit(0, (0, 2, 4))


def roll_back(target: Target) -> None:
    target.rollback(0, 3)
    target.rollback(0, 0)


def grow_longer(target: Target) -> None:
    target.prefill(0, [1] * KEY_BLOCK)


def grow_wider(target: Target) -> None:
    for key in range(10, 15):
        target.add(key)


def shrink(target: Target) -> None:
    grow_longer(target)
    grow_wider(target)
    target.rollback(0, 2)
    for key in range(10, 15):
        target.remove(key)
    cells = target._slab.cells
    target.shrink()
    assert target._slab.cells < cells


@pytest.mark.parametrize("change", [commit_a_path, roll_back, grow_longer, grow_wider, shrink])
def test_nothing_that_happens_to_the_kv_changes_it(
    target: Target, change: Callable[[Target], None]
) -> None:
    first, second = state_of(1), state_of(2)
    open_row(target, 0, first)
    open_row(target, 1, second)
    change(target)
    assert_same(target.state(0), state_of(1))
    assert_same(target.state(1), state_of(2))
    assert target._slab.state_bytes == 8000
    assert all(target.state(key) == () for key in (10, 11) if key in target)


def test_the_last_row_takes_it_along_when_another_leaves(target: Target) -> None:
    for key in range(4):
        open_row(target, key, None if key == 1 else state_of(key))
    target.remove(0)
    target.remove(2)
    assert target.state(1) == ()
    assert_same(target.state(3), state_of(3))
    open_row(target, 9)
    assert target.state(9) == ()
    assert target._slab.state_bytes == 4000


def test_a_removed_row_frees_it(target: Target) -> None:
    open_row(target, 0, state_of(0))
    open_row(target, 1, state_of(1))
    target.remove(1)
    assert target._slab.state_bytes == 4000
    target.remove(0)
    assert target._slab.state_bytes == 0
    open_row(target, 1)
    assert target.state(1) == ()


def test_forks_share_it(target: Target) -> None:
    open_row(target, 0, state_of(0))
    target.fork(0, 1)
    target.fork(1, 2)
    assert all(
        ours is theirs for ours, theirs in zip(target.state(0), target.state(2), strict=True)
    )
    assert target._slab.state_bytes == 4000
    target.remove(0)
    assert_same(target.state(2), state_of(0))
    assert target._slab.state_bytes == 4000
    target.set_state(2, state_of(2))
    assert_same(target.state(1), state_of(0))
    assert target._slab.state_bytes == 8000


def test_a_fork_onto_a_row_replaces_what_that_had(target: Target) -> None:
    open_row(target, 0, state_of(0))
    open_row(target, 1, state_of(1))
    target.fork(0, 1)
    assert_same(target.state(1), state_of(0))
    assert target._slab.state_bytes == 4000


# The budget


def limited(target: Target, blocks: float) -> None:
    target.limit_memory(int(blocks * KEY_BLOCK * target.cell_bytes))


def test_it_counts_in_the_budget(target: Target) -> None:
    limited(target, 3)
    block = KEY_BLOCK * target.cell_bytes
    open_row(target, 0)
    assert target.has_room(3, 9)
    assert target.has_room(2, 9, state_bytes=block)
    assert not target.has_room(2, 9, state_bytes=block + 1)
    assert not target.has_room(3, 9, state_bytes=4)
    target.set_state(0, state_of(0, block))
    assert target.has_room(2, 9)
    assert not target.has_room(3, 9)
    assert not target.has_room(2, 9, state_bytes=4)
    target.remove(0)
    assert target.has_room(3, 9)


def test_shared_state_counts_once(target: Target) -> None:
    limited(target, 3)
    open_row(target, 0, state_of(0, KEY_BLOCK * target.cell_bytes))
    target.fork(0, 1)
    assert target.has_room(2, 9)
    assert target.cached(1) == 9


def test_rows_and_positions_that_it_leaves_no_room_for(target: Target) -> None:
    limited(target, 2)
    open_row(target, 0, state_of(0, KEY_BLOCK * target.cell_bytes))
    with pytest.raises(OverBudget):
        target.add(1)
    with pytest.raises(OverBudget):
        target.prefill(0, [1] * KEY_BLOCK)
    assert 1 not in target
    assert target.cached(0) == 9
    assert_same(target.state(0), state_of(0, KEY_BLOCK * target.cell_bytes))


@pytest.mark.parametrize("before", [None, 1])
def test_what_does_not_fit_changes_nothing(target: Target, before: int | None) -> None:
    limited(target, 2)
    block = KEY_BLOCK * target.cell_bytes
    open_row(target, 0, None if before is None else state_of(before))
    kept = list(target.state(0))
    (output,) = target.verify([0], [chain([7])])
    logits = output.scores.clone()
    with pytest.raises(OverBudget, match=f"row state of {block + 4} bytes exceeds the KV budget"):
        target.set_state(0, state_of(3, block + 4))
    assert_same(target.state(0), kept)
    assert target._slab.state_bytes == (4000 if before else 0)
    assert torch.equal(target.verify([0], [chain([7])])[0].scores, logits)
    target.set_state(0, state_of(4, block))
    assert_same(target.state(0), state_of(4, block))


def test_it_replaces_what_the_row_had_without_counting_both(target: Target) -> None:
    limited(target, 2)
    block = KEY_BLOCK * target.cell_bytes
    open_row(target, 0, state_of(0, block))
    target.set_state(0, state_of(1, block))
    assert_same(target.state(0), state_of(1, block))


def test_unused_memory_is_given_back_for_it(target: Target) -> None:
    """The slab has grown to all there is; what no row uses does not stand in the way."""
    limited(target, 4)
    open_row(target, 0, tokens=KEY_BLOCK + 1)
    open_row(target, 1, tokens=KEY_BLOCK + 1)
    assert target._slab.cells == 4 * KEY_BLOCK
    target.remove(1)
    target.rollback(0, 5)
    block = KEY_BLOCK * target.cell_bytes
    target.set_state(0, state_of(0, 3 * block))
    taken = target._slab.cells * target.cell_bytes + target._slab.state_bytes
    assert taken <= 4 * block
