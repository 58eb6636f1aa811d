"""The lean forward pass computes what the Transformers module computes, its oracle."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.tiny import CONTEXT, VOCAB_SIZE, tiny_model
from tokenleap.core.tree import TokenTree
from tokenleap.runtime.choose import network_for
from tokenleap.runtime.lean import LeanDecoder
from tokenleap.runtime.llama import is_llama
from tokenleap.runtime.module import ModuleNetwork
from tokenleap.runtime.network import Network
from tokenleap.runtime.target import Target

CONTEXT_TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]
TREE = TokenTree((5, 3, 5, 8, 9, 7), (-1, 0, 0, 1, 3, 2))

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILY: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("lean", {}),
    "llama, biases": ("lean", {"attention_bias": True, "mlp_bias": True}),
    "llama, tied": ("lean", {"tie_word_embeddings": True}),
    "llama, one key head": ("lean", {"num_key_value_heads": 1}),
    "llama, wide heads": ("llama", {}),
    "llama, scaled rotation": ("lean", {"rope_parameters": LLAMA3_ROPE}),
    "llama, another epsilon": ("lean", {"rms_norm_eps": 0.1}),
    "mistral": ("mistral", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
}


def model_of(name: str, dtype: torch.dtype = torch.float32, **overrides: Any) -> PreTrainedModel:
    architecture, fields = FAMILY[name]
    model = tiny_model(architecture, dtype=dtype, **{**fields, **overrides})
    generator = torch.Generator().manual_seed(1)
    for parameter_name, parameter in model.named_parameters():
        if "norm" in parameter_name or "bias" in parameter_name:  # ones and zeros prove nothing
            with torch.no_grad():
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def scores(model: PreTrainedModel, network: Network) -> Tensor:
    """Logits of the tree after the context, [n+1, V]."""
    target = Target(model).with_network(network)
    target.add(0)
    target.prefill(0, CONTEXT_TOKENS)
    logits = target.verify([0], [TREE])[0].scores.clone()
    target.remove(0)
    return logits


@pytest.mark.parametrize("name", FAMILY)
def test_the_module_is_the_oracle(name: str) -> None:
    model = model_of(name)
    lean = network_for(model, runtime="torch")
    assert isinstance(lean, LeanDecoder)
    expected = scores(model, ModuleNetwork.sharing(model))
    assert torch.allclose(scores(model, lean), expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_in_bfloat16_it_is_as_near_to_the_truth_as_the_module(name: str) -> None:
    model = model_of(name, torch.bfloat16)
    exact: PreTrainedModel = copy.deepcopy(model).to(torch.float32)  # type: ignore[arg-type]
    truth = scores(exact, ModuleNetwork.sharing(exact))
    lean = (scores(model, network_for(model)).float() - truth).abs().mean()
    module = (scores(model, ModuleNetwork.sharing(model)).float() - truth).abs().mean()
    assert lean < 1.2 * module


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_parts_of_it_are_the_modules_parts(name: str) -> None:
    model = model_of(name)
    lean, module = network_for(model), ModuleNetwork.sharing(model)
    pairs: list[tuple[Network, Network]] = [
        (lean.first_layers(1), module.first_layers(1)),
        (lean.without([0], []), module.without([0], [])),
        (lean.without([1], [0, 1]), module.without([1], [0, 1])),
        (lean.without([], []), module),
    ]
    found = [scores(model, ours) for ours, _ in pairs]
    for ours, (_, theirs) in zip(found, pairs, strict=True):
        assert torch.allclose(ours, scores(model, theirs), atol=2e-4, rtol=1e-4)
    assert not torch.allclose(found[0], found[3], atol=1e-2)


def test_rotation_far_into_the_context() -> None:
    model = tiny_model("lean", max_position_embeddings=4096)
    lean, module = network_for(model), ModuleNetwork.sharing(model)
    tokens = [i % VOCAB_SIZE for i in range(2100)]
    logits = []
    for network in (lean, module):
        target = Target(model).with_network(network)
        target.add(0)
        target.prefill(0, tokens)
        logits.append(target.verify([0], [TREE])[0].scores.clone())
        target.remove(0)
    assert torch.allclose(logits[0], logits[1], atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("architecture", ["gpt2", "gpt_neox", "gemma", "phi"])
def test_other_architectures_run_through_their_modules(architecture: str) -> None:
    model = tiny_model(architecture)
    assert not is_llama(model)
    assert isinstance(network_for(model), ModuleNetwork)


def test_what_looks_like_llama_and_is_not() -> None:
    assert not is_llama(tiny_model("lean", hidden_act="gelu"))

    class Changed(type(tiny_model("lean"))):  # type: ignore[misc]
        pass

    model = tiny_model("lean")
    model.__class__ = Changed
    assert not is_llama(model)


def test_the_model_is_left_as_it_is() -> None:
    model = tiny_model("lean", max_position_embeddings=CONTEXT)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    scores(model, network_for(model).first_layers(1))
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
