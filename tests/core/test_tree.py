"""Token trees: what is derived from the parents."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenleap.core.distribution import Distribution
from tokenleap.core.tree import Draft, TokenTree, chain

trees = (
    st.integers(1, 12)
    .flatmap(lambda n: st.tuples(*(st.integers(0, max(0, i - 1)) for i in range(1, n))))
    .map(lambda parents: TokenTree(tuple(range(len(parents) + 1)), (-1, *parents)))
)


def seen(tree: TokenTree, node: int) -> set[int]:
    first, others = tree.visibility[node]
    return {*range(first), *others}


@given(trees)
def test_everything_follows_from_the_parents(tree: TokenTree) -> None:
    for node in range(len(tree)):
        path = tree.path(node)
        assert tree.depths[node] == len(path)
        visible = {0, *path}
        assert seen(tree, node) == visible
        assert tree.path_tokens(node) == [tree.tokens[i] for i in path]
        for child in tree.children[node]:
            assert tree.parents[child] == node
    assert sum(len(children) for children in tree.children) == tree.num_drafted
    assert tree.is_chain == (max(tree.depths) == tree.num_drafted)


@pytest.mark.parametrize(
    ("tokens", "parents"), [((), ()), ((1,), (0,)), ((1, 2), (-1, 1)), ((1, 2), (-1,))]
)
def test_not_a_tree(tokens: tuple[int, ...], parents: tuple[int, ...]) -> None:
    with pytest.raises(AssertionError):
        TokenTree(tokens, parents)


def test_drafts() -> None:
    assert Draft.empty(3).tree == chain([3])
    draft = Draft.deterministic(chain([1, 2, 3]))
    assert [draft.q_of(node).certain for node in (1, 2)] == [2, 3]
    with pytest.raises(AssertionError):
        Draft(chain([1, 2]), ())
    with pytest.raises(AssertionError):
        Draft(chain([1]), (Distribution.one_hot(1),))
