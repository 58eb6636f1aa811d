"""Rows with different numbers of nodes: padding is neither computed nor written."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.counting import counted
from tests.tiny import tiny_model
from tokenleap.core.tree import TokenTree, chain
from tokenleap.runtime.attention import KEY_BLOCK
from tokenleap.runtime.inputs import PassInputs, tree_nodes
from tokenleap.runtime.module import ModuleNetwork
from tokenleap.runtime.target import Target

TREES = {
    0: chain([5, 6, 7, 8, 9, 1, 2]),
    1: chain([4]),
    2: TokenTree((3, 1, 2, 4), (-1, 0, 0, 2)),
    3: chain([8]),
}


def filled(target: Target) -> Target:
    for key in TREES:
        target.add(key)
        target.prefill(key, list(range(1, 6 + key)))
    return target


def test_flat_and_padded_are_inverse() -> None:
    rows = [tree_nodes(chain(tokens), 0, 7) for tokens in ([5, 6, 7], [8])]
    inputs = PassInputs(rows, 0, 3, KEY_BLOCK, torch.float32, torch.device("cpu"))
    assert inputs.tokens.tolist() == [[5, 6, 7], [8, 0, 0]]
    flat = inputs.flat(inputs.tokens)
    assert flat.tolist() == [5, 6, 7, 8]
    assert inputs.padded(flat).tolist() == inputs.tokens.tolist()
    whole = replace(inputs, rows=rows[:1])
    assert torch.equal(whole.padded(whole.flat(whole.tokens)), whole.tokens)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("keys", [(0, 1, 2, 3), (1, 3), (3, 0), (1, 2), (2,)])
def test_a_row_has_its_own_bits_in_any_company(dtype: torch.dtype, keys: tuple[int, ...]) -> None:
    model = tiny_model("lean", dtype=dtype)
    target = filled(Target(model))
    together = [x.scores.clone() for x in target.verify(keys, [TREES[key] for key in keys])]
    for key, logits in zip(keys, together, strict=True):
        assert torch.equal(target.verify([key], [TREES[key]])[0].scores, logits)


def test_only_nodes_are_computed() -> None:
    target = filled(Target(tiny_model("lean")))
    passes = counted(target)
    target.verify([0, 1, 3], [TREES[0], TREES[1], TREES[3]])
    assert passes == [7 + 1 + 1]


def test_rows_between_keep_what_they_have_not_committed() -> None:
    """A pass over rows 0 and 2 writes nothing into row 1."""
    target = filled(Target(tiny_model("lean")))
    target.verify([1], [chain([4, 5, 6])])

    def written() -> Tensor:
        buffer = target._slab._keys[0]
        return buffer[1, :, : target.cached(1) + 3].clone()

    before = written()
    target.verify([0, 2], [TREES[0], TREES[2]])
    assert torch.equal(written(), before)


def test_modules_give_the_same_rows() -> None:
    model = tiny_model("lean")
    lean = filled(Target(model))
    module = filled(Target(model).with_network(ModuleNetwork.sharing(model)))
    trees = list(TREES.values())
    for ours, theirs in zip(
        lean.verify([*TREES], trees), module.verify([*TREES], trees), strict=True
    ):
        assert torch.allclose(ours.scores, theirs.scores, atol=2e-4, rtol=1e-4)
