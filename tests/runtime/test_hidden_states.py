"""Every network returns the same hidden states, those of the Transformers module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.tiny import tiny_model
from tokenleap.core.tree import TokenTree, chain
from tokenleap.runtime.choose import network_for
from tokenleap.runtime.module import ModuleNetwork
from tokenleap.runtime.network import Need, Network
from tokenleap.runtime.target import Target

CONTEXT = [3, 1, 4, 1, 5]
PATH = [5, 3, 8]
TREE = TokenTree((5, 3, 5, 8, 9), (-1, 0, 0, 1, 2))  # its nodes 0, 1 and 3 are PATH
LAYERS = (0, 1, 2)

NETWORKS: dict[str, Callable[[PreTrainedModel], Network]] = {
    "native": lambda model: network_for(model, runtime="native"),
    "lean": lambda model: network_for(model, runtime="torch"),
    "module": ModuleNetwork.sharing,
}


@pytest.fixture(params=NETWORKS)
def target(request: pytest.FixtureRequest) -> Target:
    model = tiny_model(head_dim=32)
    if request.param == "native":
        request.getfixturevalue("native_library")
    made = Target(model).with_network(NETWORKS[request.param](model))
    made.add(0)
    return made


@torch.inference_mode()
def expected_states(tokens: list[int]) -> dict[int, Tensor]:
    """Layer id -> [N, E]; Transformers returns the last one after the final norm, so not here."""
    model: Any = tiny_model(head_dim=32)
    entering: list[Tensor] = []
    hook = model.model.norm.register_forward_pre_hook(lambda _, args: entering.append(args[0]))
    states = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    hook.remove()
    return {0: states[0][0], 1: states[1][0], 2: entering[0][0]}


def test_verification_returns_the_states_of_its_nodes(target: Target) -> None:
    target.prefill(0, CONTEXT)
    need = Need(hidden=LAYERS)
    (output,) = target.verify([0], [TREE], need=need)
    expected = expected_states([*CONTEXT, *PATH])
    assert list(output.hidden) == list(LAYERS)
    for layer, states in output.hidden.items():
        assert states.shape == (len(TREE), target.hidden_size)
        assert torch.allclose(states[[0, 1, 3]], expected[layer][-3:], atol=1e-3, rtol=1e-3)
    plain = target.verify([0], [TREE])[0]
    assert plain.hidden == {}
    again = target.verify([0], [TREE], need=need)[0]
    assert torch.equal(plain.scores, again.scores)


def test_prefill_returns_the_states_of_its_tokens(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenleap.runtime.passes.PREFILL_CHUNK", 2)
    found = target.prefill(0, [*CONTEXT, *PATH], LAYERS)
    expected = expected_states([*CONTEXT, *PATH])
    for layer in LAYERS:
        assert torch.allclose(found[layer], expected[layer], atol=1e-3, rtol=1e-3)
    assert target.prefill(0, [1]) == {}


def test_rows_of_a_pass_have_their_own_states(target: Target) -> None:
    target.add(1)
    for key in range(2):
        target.prefill(key, CONTEXT[key:])
    trees = [TREE, chain([5, 3])]
    need = Need(hidden=(1,))
    together = [output.hidden[1].clone() for output in target.verify([0, 1], trees, need=need)]
    for key, states in enumerate(together):
        alone = target.verify([key], [trees[key]], need=need)[0].hidden[1]
        assert torch.allclose(alone, states, atol=2e-4, rtol=1e-4)
