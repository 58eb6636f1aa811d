"""Fast linear layers compute what `nn.Linear` computes, whatever stands beside a row."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.matrix import PROMPTS
from tests.tiny import needs_packed, tiny_model
from tokenleap import LLM, CompatibilityError, ConfigError, SamplingParams
from tokenleap.runtime.choices import DRAFTING
from tokenleap.runtime.choose import head_network, network_for
from tokenleap.runtime.cpu import Int8Linear, PackedLinear, check_quantization, linear_layer
from tokenleap.runtime.lean import LeanDecoder
from tokenleap.runtime.module import ModuleNetwork

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]


def layer_data(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Weight [40, 96], bias [40], input [3, 5, 96]."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((40, 96), (40,), (3, 5, 96))
    weight, bias, x = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return weight, bias, x


@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_is_linear(dtype: torch.dtype) -> None:
    needs_packed(dtype)
    weight, bias, x = layer_data(dtype)
    found = PackedLinear(weight, bias)(x)
    assert torch.allclose(
        found.float(), F.linear(x.float(), weight.float(), bias.float()), atol=0.2
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_int8_is_linear_with_rounded_weights(dtype: torch.dtype) -> None:
    weight, bias, x = layer_data(dtype)
    layer = Int8Linear(weight, bias)
    rounded = layer.quantized.float() * layer.scales.float()[:, None]
    step = layer.scales.float()[:, None]
    assert ((rounded - weight.float()).abs() <= 0.51 * step).all()
    expected = F.linear(x.float(), rounded, bias.float())
    assert torch.allclose(layer(x).float(), expected, atol=0.2, rtol=0.02)
    assert torch.equal(Int8Linear(weight, None)(x) + bias, layer(x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_int8_rows_have_the_same_bits_in_any_company(dtype: torch.dtype) -> None:
    weight, bias, _ = layer_data(dtype)
    layer = Int8Linear(weight, bias)
    x = torch.randn(1, 70, 96, generator=torch.Generator().manual_seed(1)).to(dtype)
    together = layer(x)
    for rows in (1, 2, 3, 4, 5, 7, 8, 16, 33):
        for start in (0, 3, 6):
            part = slice(start, start + rows)
            assert torch.equal(layer(x[:, part]), together[:, part])


def test_a_row_of_zeros_stays_zero() -> None:
    weight = torch.zeros(4, 32)
    weight[1] = 1
    assert torch.equal(Int8Linear(weight, None)(torch.ones(1, 32)), torch.tensor([[0.0, 32, 0, 0]]))


@pytest.mark.parametrize("architecture", ["lean", "qwen2", "gpt2", "phi"])
def test_every_architecture_can_be_quantized(architecture: str) -> None:
    model = tiny_model(architecture, dtype=torch.bfloat16)
    kind = LeanDecoder if architecture in ("lean", "qwen2") else ModuleNetwork
    assert isinstance(network_for(model, "int8"), kind)
    greedy = SamplingParams(temperature=0, max_tokens=12, logprobs=1)
    seeded = SamplingParams(temperature=0.8, seed=3, max_tokens=12, logprobs=1)
    plain = LLM(model, quantization="int8")
    ngram = {"method": "ngram", "prompt_lookup_min": 1}
    drafting = LLM(model, quantization="int8", speculative_config=ngram)
    assert plain.bit_exact
    for params in (greedy, seeded):
        expected = plain.generate(PROMPTS, params)
        found = drafting.generate(PROMPTS, params)
        assert [(o.token_ids, o.logprobs) for o in found] == [
            (o.token_ids, o.logprobs) for o in expected
        ]


def test_a_draft_model_is_quantized_too() -> None:
    model = tiny_model("lean", dtype=torch.bfloat16)
    config = {"method": "draft_model", "model": model, "controller": "fixed"}
    llm = LLM(model, quantization="int8", speculative_config=config)
    (output,) = llm.generate([PROMPTS[0]], SamplingParams(temperature=0, max_tokens=20))
    assert output.metrics.acceptance_rate == 1.0


def test_what_cannot_be_quantized() -> None:
    with pytest.raises(
        ConfigError, match="quantization: must be one of auto, none, int8, int4, got 'int3'"
    ):
        LLM(tiny_model("lean"), quantization="int3")
    with pytest.raises(
        CompatibilityError, match="multiple of 16, and this model has one of width 40"
    ):
        LLM(tiny_model("lean", hidden_size=40), quantization="int8")
    with pytest.raises(ConfigError, match="int8 runs on CPUs only, not on cuda"):
        check_quantization("int8", torch.device("cuda"))
    with pytest.raises(
        ConfigError, match=r"^draft_quantization: int4 runs on .*cuda: leave it out"
    ):
        check_quantization(DRAFTING, torch.device("cuda"))
    with pytest.raises(ConfigError, match=r"^draft_quantization: int8 runs on CPUs only"):
        check_quantization("int8", torch.device("cuda"), "draft_quantization")
    elsewhere: Any = SimpleNamespace(embedding=torch.empty(1, device="meta"))
    with pytest.raises(ConfigError, match=r"^draft_quantization: int8 runs on CPUs only"):
        head_network(elsewhere, network_for(tiny_model("lean")), "int8")
    assert linear_layer(torch.float16, CPU, None) is None
