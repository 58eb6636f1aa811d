"""Weights in memory: those of two networks with the same bits once, large ones past the caches."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.runtime.test_llama_family import scores
from tests.tiny import tiny_model
from tokenleap.runtime.choose import network_for
from tokenleap.runtime.llama import LinearWeights, LlamaWeights
from tokenleap.runtime.native import network as network_module
from tokenleap.runtime.native import pack as pack_module
from tokenleap.runtime.native.network import NativeDecoder
from tokenleap.runtime.native.pack import GROUP, PANEL, Format
from tokenleap.runtime.native.structures import KeptWeights
from tokenleap.runtime.target import Target

pytestmark = pytest.mark.usefixtures("native_library")


def kept(*tensors: torch.Tensor) -> KeptWeights:
    weights = KeptWeights()
    for tensor in tensors:
        weights.keep(tensor)
    return weights


def test_the_same_bits_are_shared() -> None:
    theirs = [torch.randn(8, 70), torch.full((3,), torch.nan)]
    weights = KeptWeights(kept(*theirs))
    for tensor in theirs:
        assert weights.share(tensor.clone()) is tensor
        assert weights.share(tensor) is tensor


def test_nothing_else_is_shared() -> None:
    tensor = torch.zeros(8, 70)
    late = tensor.clone()
    late[7, 69] = 1  # after the first bytes
    weights = KeptWeights(kept(tensor))
    for other in (-tensor, late, tensor.double(), tensor.flatten(), tensor[:7]):
        assert weights.share(other) is other
    again = tensor.clone()
    assert weights.keep(again) is again
    weights.close()
    assert weights.share(again) is again


def family() -> tuple[PreTrainedModel, PreTrainedModel]:
    """A target, and a draft model with its embedding, its output rows, and its first layer."""
    target = tiny_model(head_dim=32, dtype=torch.bfloat16)
    draft = tiny_model(head_dim=32, dtype=torch.bfloat16, seed=1)
    theirs, own = target.state_dict(), draft.state_dict()
    same = ("model.embed_tokens.", "lm_head.", "model.layers.0.")
    draft.load_state_dict({**own, **{k: v for k, v in theirs.items() if k.startswith(same)}})
    return target, draft


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_a_draft_model_shares_what_it_has_of_its_target(quantization: str | None) -> None:
    target, draft = family()
    first = network_for(target, quantization)
    assert isinstance(first, NativeDecoder)
    alone, beside = (network_for(draft, quantization, beside=other) for other in (None, first))
    assert isinstance(beside, NativeDecoder)
    theirs, own = ({tensor.data_ptr() for tensor in net._kept} for net in (first, beside))
    # embedding, output rows, and the four products of the first layer
    assert len(theirs & own) == 6
    assert torch.equal(scores(draft, beside), scores(draft, alone))


def test_the_head_is_shared_between_int4_and_int8() -> None:
    """Both have it in int8."""
    target, draft = family()
    first = network_for(target, "int8")
    assert isinstance(first, NativeDecoder)
    second = NativeDecoder(LlamaWeights(draft), "int4", beside=first)
    assert second._decoder.head.weight == first._decoder.head.weight
    assert second._decoder.embedding == first._decoder.embedding


def test_a_network_lets_go_of_what_it_does_not_share() -> None:
    first = NativeDecoder(LlamaWeights(tiny_model(head_dim=32)))
    second = NativeDecoder(LlamaWeights(tiny_model(head_dim=32, seed=1)), beside=first)
    theirs = {tensor.data_ptr() for tensor in first._kept}
    assert not theirs & {tensor.data_ptr() for tensor in second._kept}
    assert not second._kept._beside


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_weights_that_pass_the_caches_by_have_the_same_bits(
    quantization: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(head_dim=32, dtype=torch.bfloat16)
    staying = NativeDecoder(LlamaWeights(model), quantization)
    monkeypatch.setattr(network_module, "_MOST_KEPT", staying.weight_bytes - 1)
    passing = NativeDecoder(LlamaWeights(model), quantization)
    layers = [net._layers[0] for net in (staying, passing)]
    assert [(layer.down.passing, layer.qkv[0].passing) for layer in layers] == [(0, 0), (1, 1)]
    assert not passing.first_layers(1)._layers[0].down.passing
    assert torch.equal(scores(model, staying), scores(model, passing))


@pytest.mark.parametrize("form", [Format.FLOAT32, Format.BFLOAT16, Format.INT8, Format.INT4])
def test_packing_in_pieces_changes_no_bit(form: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = LinearWeights(torch.randn(5 * PANEL + 3, 2 * GROUP), torch.randn(5 * PANEL + 3))
    whole = pack_module.pack(layer, form)
    monkeypatch.setattr(pack_module, "_PIECE", 2)
    pieces = pack_module.pack(layer, form)
    assert torch.equal(whole.weight.view(torch.uint8), pieces.weight.view(torch.uint8))
    assert whole.weight.stride() == pieces.weight.stride()


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_rows_of_its_own(name: str) -> None:
    sizes: dict[str, Any] = {"head_dim": 32} if name == "llama" else {}
    model = tiny_model(name, **sizes)
    target = Target(model)
    other = target.with_own_rows()
    assert other.cell_bytes == target.cell_bytes
    assert other.num_passes == 0
    target.add(0)
    assert 0 not in other
    expected = scores(model, copy.copy(target.network))
    assert torch.equal(scores(model, other.network), expected)
