"""Llama's relatives on the native runtime compute what their modules compute, in any company."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.runtime.test_native import PORTABLE, TOKENS, filled
from tests.tiny import GROUPED, VOCAB_SIZE
from tokenleap import LLM, SamplingParams
from tokenleap.core.tree import TokenTree, chain
from tokenleap.models import cached, load_model
from tokenleap.runtime import packed as packing
from tokenleap.runtime.choose import network_for
from tokenleap.runtime.llama import ARCHITECTURES, FAMILIES, LlamaWeights, family_of
from tokenleap.runtime.module import ModuleNetwork
from tokenleap.runtime.native.network import NativeDecoder
from tokenleap.runtime.network import Network
from tokenleap.runtime.target import Target

pytestmark = pytest.mark.usefixtures("native_library")

WIDE: dict[str, Any] = {**GROUPED, "hidden_size": 128}  # heads of 32 where the hidden size says it
GEMMA: dict[str, Any] = {**GROUPED, "head_dim": 32, "query_pre_attn_scalar": 24}
LOCAL: dict[str, Any] = {
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention"],
}
ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}
MULTIPLIERS = {
    "attention_multiplier": 0.2,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "logits_scaling": 2.0,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3": ("phi3", {**WIDE, "sliding_window": 5}),
    "smollm3": ("smollm3", {**WIDE, "no_rope_layers": [1, 0], "attention_bias": True}),
    "granite": ("granite", {**WIDE, **MULTIPLIERS, "mlp_bias": True}),
    "olmo2": ("olmo2", WIDE),
    "gemma": ("gemma", {**GROUPED, "head_dim": 32}),
    "gemma2": ("gemma2", {**GEMMA, **LOCAL, "attn_logit_softcapping": 2.0}),
    "gemma2, wide heads": ("gemma2", {**GEMMA, **LOCAL, "head_dim": 256}),
    "gemma3": ("gemma3_text", {**GEMMA, **LOCAL, "rope_parameters": ROPES}),
    "gemma3, capped": ("gemma3_text", {**GEMMA, **LOCAL, "final_logit_softcapping": 3.0}),
}
TREE = TokenTree((5, 3, 5, 8, 9, 7, 1, 2), (-1, 0, 0, 1, 3, 2, 2, 5))
CPU = torch.device("cpu")


def model_of(name: str, dtype: torch.dtype = torch.float32, **overrides: Any) -> PreTrainedModel:
    """A tiny random model of a family, whose norms and biases are random, too."""
    model_type, fields = MODELS[name]
    special = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    fields = {"vocab_size": VOCAB_SIZE, **special, **fields, **overrides}
    config = AutoConfig.for_model(model_type, **fields)
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name or "bias" in parameter_name:
                parameter.add_(0.3 * torch.randn(parameter.shape))
    model.train(False)
    return model


def scores(target: Target, tree: TokenTree, key: int = 0) -> Tensor:
    return target.verify([key], [tree])[0].scores.clone()


@pytest.mark.parametrize(
    ("name", "flags"), [*((name, ()) for name in MODELS), ("gemma2, wide heads", (PORTABLE,))]
)
def test_the_module_is_the_oracle(name: str, flags: tuple[str, ...]) -> None:
    model = model_of(name)
    native = NativeDecoder(LlamaWeights(model), None, *flags)
    found, expected = (
        scores(filled(Target(model), network, 13), TREE)
        for network in (native, ModuleNetwork.sharing(model))
    )
    assert torch.allclose(found, expected, atol=5e-4, rtol=2e-4)


def test_all_families_are_tested() -> None:
    models = [model_of(name) for name in MODELS]
    assert {type(model).__name__ for model in models} == FAMILIES.keys() - ARCHITECTURES
    for model in models:
        assert network_for(model).name == "native"
    assert network_for(models[0], runtime="torch").name == "module"


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("granite", {"hidden_act": "gelu"}),
        ("gemma2", {"hidden_activation": "gelu"}),
        ("gemma3", {"use_bidirectional_attention": True}),
        (
            "phi3",
            {
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 1e4,
                    "partial_rotary_factor": 0.5,
                }
            },
        ),
    ],
)
def test_what_looks_like_a_family_and_is_not(name: str, changes: Mapping[str, Any]) -> None:
    assert family_of(model_of(name)) is not None
    assert family_of(model_of(name, **changes)) is None


@pytest.mark.parametrize("name", ["granite", "gemma2"])
def test_parts_can_be_left_out(name: str) -> None:
    model = model_of(name)
    native, module = NativeDecoder(LlamaWeights(model)), ModuleNetwork.sharing(model)
    found, expected = (
        scores(filled(Target(model), network.without([0], [1]), 9), TREE)
        for network in (native, module)
    )
    assert torch.allclose(found, expected, atol=5e-4, rtol=2e-4)


@pytest.mark.parametrize("name", ["granite", "gemma"])
def test_learnt_embeddings(name: str) -> None:
    """Granite multiplies them by its factor, and Gemma, whose module has the factor, does not."""
    model, rows = model_of(name), torch.randn(2, 128 if name == "granite" else 64)
    networks: list[Network] = [NativeDecoder(LlamaWeights(model)), ModuleNetwork.sharing(model)]
    assert [network.extend(rows) for network in networks] == 2 * [VOCAB_SIZE]
    tree = TokenTree((VOCAB_SIZE + 1, 4, VOCAB_SIZE), (-1, 0, 0))
    found, expected = (scores(filled(Target(model), network, 5), tree) for network in networks)
    assert torch.allclose(found, expected, atol=5e-4, rtol=2e-4)


KINDS: dict[str, tuple[torch.dtype, str | None]] = {
    "float32": (torch.float32, None),
    "bfloat16": (torch.bfloat16, None),
    "int4": (torch.bfloat16, "int4"),
}
BY_DEFAULT = {("smollm3", "float32"), ("olmo2", "int4"), ("gemma2, wide heads", "bfloat16")}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(name, kind, marks=() if (name, kind) in BY_DEFAULT else pytest.mark.slow)
        for name in MODELS
        for kind in KINDS
    ],
)
def test_bits(name: str, kind: str) -> None:
    """Invariant 7: of any number of nodes, in a tree, beside other rows."""
    dtype, quantization = KINDS[kind]
    model = model_of(name, dtype)
    target = filled(Target(model), NativeDecoder(LlamaWeights(model), quantization), 33, 4)
    together = scores(target, chain(TOKENS[33:]))
    for rows in (1, 7, 13):
        assert torch.equal(scores(target, chain(TOKENS[33 : 33 + rows])), together[:rows])
    beside = target.verify([1, 0], [TREE, chain(TOKENS[33:36])])
    assert torch.equal(beside[1].scores, together[:3])
    tree = scores(target, TREE)
    for node in range(len(TREE)):
        path = (0, *TREE.path(node))
        assert torch.equal(tree[list(path)], scores(target, chain([TREE.tokens[i] for i in path])))


@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("phi3", "granite", "olmo2")),
        "gemma3, capped",
    ],
)
def test_mapped_weights_are_those_packed_in_memory(
    name: str, tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, params = tmp_path / "model", SamplingParams(temperature=0, max_tokens=8, logprobs=2)
    model_of(name).save_pretrained(folder)
    ngram = {"method": "ngram", "num_speculative_tokens": 3, "controller": "fixed"}
    packed = LLM(folder, dtype="float32", quantization="int8")
    assert [entry.kind for entry in cached()] == ["packed"]
    monkeypatch.delattr(packing.RoundingPacker, "run")
    mapped = LLM(folder, dtype="float32", quantization="int8", speculative_config=ngram)
    whole = LLM(load_model(folder, torch.float32, CPU), quantization="int8")
    found = [llm.generate([TOKENS[:20]], params)[0] for llm in (packed, mapped, whole)]
    assert len({tuple(output.token_ids) for output in found}) == 1
    assert found[0].logprobs == found[1].logprobs == found[2].logprobs
