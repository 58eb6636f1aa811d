"""Logits of only the last nodes of each row are those that a pass over all nodes returns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tiny import tiny_model
from tokenleap.core.tree import TokenTree, chain
from tokenleap.runtime.network import Need
from tokenleap.runtime.target import Target

TREES = [TokenTree((5, 3, 5, 8, 9), (-1, 0, 0, 1, 2)), chain([7]), chain([3, 1, 4])]
NETWORKS: dict[str, dict[str, Any]] = {
    "native": {"runtime": "native"},
    "native int8": {"runtime": "native", "quantization": "int8"},
    "lean": {"runtime": "torch"},
    "module": {"runtime": "torch"},
}


@pytest.fixture(scope="module", params=NETWORKS)
def target(request: pytest.FixtureRequest) -> Target:
    """Three rows of different lengths."""
    name = request.param
    if name.startswith("native"):
        request.getfixturevalue("native_library")
    model = tiny_model("gpt2") if name == "module" else tiny_model(head_dim=32)
    made = Target(model, **NETWORKS[name])
    assert made.network.name == name.split()[0]
    for key, length in enumerate((3, 9, 5)):
        made.add(key)
        made.prefill(key, list(range(1, 1 + length)))
    return made


def scores(target: Target, keys: list[int], need: Need) -> list[tuple[Tensor, Any]]:
    outputs = target.verify(keys, [TREES[key] for key in keys], need=need)
    return [
        (output.scores.clone(), None if output.argmax is None else list(output.argmax))
        for output in outputs
    ]


@pytest.mark.parametrize("last", [1, 2, 4])
@pytest.mark.parametrize("keys", [[0], [1], [0, 1, 2], [2, 0]], ids=str)
def test_they_have_the_same_bits(target: Target, keys: list[int], last: int) -> None:
    every = scores(target, keys, Need())
    for (found, argmax), (all_logits, all_argmax) in zip(
        scores(target, keys, Need(last=last)), every, strict=True
    ):
        assert len(found) == min(last, len(all_logits))
        assert torch.equal(found, all_logits[-last:])
        assert argmax == (None if all_argmax is None else all_argmax[-last:])


def test_hidden_states_are_those_of_all_nodes(target: Target) -> None:
    need = Need(last=1, hidden=(1,))
    outputs = target.verify([2, 0], [TREES[2], TREES[0]], need=need)
    assert [len(output.scores) for output in outputs] == [1, 1]
    assert [len(output.hidden[1]) for output in outputs] == [3, 5]
