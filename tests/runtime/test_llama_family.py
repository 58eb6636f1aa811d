"""Llama and its relatives, native and lean, compute what their modules compute, in any company.

The portable kernels are tested beside those of this processor: `PORTABLE` says how they are
compiled.
"""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.models.test_gguf_numbers import unpacked
from tests.tiny import CONTEXT, GROUPED, VOCAB_SIZE, passes_of
from tokenleap import LLM, SamplingParams
from tokenleap.core.tree import TokenTree, chain
from tokenleap.models import cached, load_model
from tokenleap.runtime import packed as packing
from tokenleap.runtime.choose import network_for
from tokenleap.runtime.lean import LeanDecoder
from tokenleap.runtime.llama import (
    ARCHITECTURES,
    FAMILIES,
    LinearWeights,
    LlamaWeights,
    family_of,
    is_llama,
    rotaries_of,
)
from tokenleap.runtime.module import ModuleNetwork
from tokenleap.runtime.native.network import NativeDecoder
from tokenleap.runtime.native.pack import GROUP, PANEL, Format, in_turns, pack
from tokenleap.runtime.network import Network
from tokenleap.runtime.passes import Passes

pytestmark = pytest.mark.usefixtures("native_library")

TOKENS = [(7 * i * i + 3 * i) % VOCAB_SIZE for i in range(80)]
TREE = TokenTree((5, 3, 5, 8, 9, 7, 1, 2), (-1, 0, 0, 1, 3, 2, 2, 5))
CPU = torch.device("cpu")
PORTABLE = ("-DTOKENLEAP_PORTABLE", "-O1")
"""It has the bits of the same code with all optimizations, and takes a third of their time."""

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LLAMAS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, one key head": ("llama", {"num_key_value_heads": 1}),
    "llama, wide heads": ("llama", {"head_dim": 32}),
    "llama, scaled rotation": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama, another epsilon": ("llama", {"rms_norm_eps": 0.1}),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 16}),
}
"""What the lean network runs; the native one takes heads of 32."""

WIDE: dict[str, Any] = {"hidden_size": 128}  # heads of 32 where the hidden size says it
LOCAL: dict[str, Any] = {
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention"],
}
GEMMA: dict[str, Any] = {"head_dim": 32, "query_pre_attn_scalar": 24, **LOCAL}
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
RELATIVES: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3": ("phi3", {**WIDE, "sliding_window": 5}),
    "smollm3": ("smollm3", {**WIDE, "no_rope_layers": [1, 0], "attention_bias": True}),
    "granite": ("granite", {**WIDE, **MULTIPLIERS, "mlp_bias": True}),
    "olmo2": ("olmo2", WIDE),
    "gemma": ("gemma", {"head_dim": 32}),
    "gemma2": ("gemma2", {**GEMMA, "attn_logit_softcapping": 2.0}),
    "gemma2, wide heads": ("gemma2", {**GEMMA, "head_dim": 256}),
    "gemma3": ("gemma3_text", {**GEMMA, "rope_parameters": ROPES}),
    "gemma3, capped": ("gemma3_text", {**GEMMA, "final_logit_softcapping": 3.0}),
}
"""What only the native network runs."""


def model_of(name: str, dtype: torch.dtype = torch.float32, **overrides: Any) -> PreTrainedModel:
    """A tiny random model whose norms and biases are random, too: ones and zeros prove nothing."""
    model_type, fields = {**LLAMAS, **RELATIVES}[name]
    special = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    fields = {"vocab_size": VOCAB_SIZE, **special, **GROUPED, **fields, **overrides}
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **fields)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
    generator = torch.Generator().manual_seed(1)
    for parameter_name, parameter in model.named_parameters():
        if "norm" in parameter_name or "bias" in parameter_name:
            with torch.no_grad():
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    model.train(False)
    return model


def native_model(name: str, dtype: torch.dtype = torch.float32, **fields: Any) -> PreTrainedModel:
    """The same with heads that the kernels are written for."""
    return model_of(name, dtype, **({"head_dim": 32} if name in LLAMAS else {}), **fields)


def native(model: PreTrainedModel, quantization: str | None = None, *flags: str) -> NativeDecoder:
    return NativeDecoder(LlamaWeights(model), quantization, *flags)


def lean(model: PreTrainedModel) -> LeanDecoder:
    network = network_for(model, runtime="lean")
    assert isinstance(network, LeanDecoder)
    return network


def scores(model: PreTrainedModel, network: Network, tree: TokenTree = TREE) -> Tensor:
    """Logits of the tree after 13 tokens, [n+1, V]."""
    return passes_of(model, network, TOKENS[:13]).verify([0], [tree])[0].scores.clone()


def assert_those_of_the_module(
    model: PreTrainedModel, network: Network, module: Network | None = None, tree: TokenTree = TREE
) -> None:
    expected = scores(model, module or ModuleNetwork.sharing(model), tree)
    torch.testing.assert_close(scores(model, network, tree), expected, atol=5e-4, rtol=2e-4)


ON = [
    *((name, "lean") for name in LLAMAS),
    *((name, "native") for name in (*LLAMAS, *RELATIVES)),
    *((name, "portable") for name in (*LLAMAS, "gemma2, wide heads")),
]


@pytest.mark.parametrize(("name", "kind"), ON)
def test_the_module_is_the_oracle(name: str, kind: str) -> None:
    model = model_of(name) if kind == "lean" else native_model(name)
    flags = PORTABLE if kind == "portable" else ()
    assert_those_of_the_module(
        model, lean(model) if kind == "lean" else native(model, None, *flags)
    )


def test_all_families_are_tested() -> None:
    models = [model_of(name) for name in RELATIVES]
    assert {type(model).__name__ for model in models} == FAMILIES.keys() - ARCHITECTURES
    for model in models:
        assert network_for(model).name == "native"
    assert network_for(models[0], runtime="torch").name == "module"
    assert isinstance(network_for(model_of("llama"), runtime="torch"), LeanDecoder)


PARTIAL = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama", {"hidden_act": "gelu"}),
        ("granite", {"hidden_act": "gelu"}),
        ("gemma2", {"hidden_activation": "gelu"}),
        ("gemma3", {"use_bidirectional_attention": True}),
        ("phi3", PARTIAL),
    ],
)
def test_what_looks_like_a_family_and_is_not(name: str, changes: Mapping[str, Any]) -> None:
    assert family_of(model_of(name)) is not None
    assert family_of(model_of(name, **changes)) is None


def test_a_subclass_is_not_llama() -> None:
    model = model_of("llama")
    assert is_llama(model)
    model.__class__ = type("Changed", (type(model),), {})
    assert not is_llama(model)


CHANGES: list[Callable[[Any], Network]] = [
    lambda network: network.first_layers(1),
    lambda network: network.without([0], [1]),
    lambda network: network.without([1], [0, 1]),
    lambda network: network.without([1], []).without([0], []),
    lambda network: network.without([], []),
]


YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0}


@pytest.mark.parametrize("name", [*LLAMAS, *RELATIVES, "yarn"])
def test_the_configuration_tells_what_the_modules_have(name: str) -> None:
    """Packed weights are opened without them."""
    model: Any = model_of("llama", rope_parameters=YARN) if name == "yarn" else model_of(name)
    weights = LlamaWeights(model)
    for index, layer in enumerate(model.model.layers):
        attention = layer.self_attn
        assert (weights.width, weights.scaling) == (attention.head_dim, attention.scaling)
        made = weights.layer(index)
        assert made.rotates == getattr(attention, "use_rope", True)
        parts = {field: getattr(made, field) for field in weights.layer_shapes}
        found = {field: getattr(part, "weight", part) for field, part in parts.items()}
        assert weights.layer_shapes == {
            field: None if part is None else part.shape for field, part in found.items()
        }
    scale = getattr(model.get_input_embeddings(), "embed_scale", None)
    assert scale is None or scale.item() == weights.traits.embedding_scale
    expected = [each for each in (weights.rotary, weights.local_rotary) if each]
    for own, module in zip(rotaries_of(model.config), expected, strict=True):
        angles = [each.angles(200, 50, torch.float32) for each in (own, module)]
        assert torch.equal(torch.stack(angles[0]), torch.stack(angles[1]))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(("llama", "lean"), ("qwen3", "lean")),
        *((name, "native") for name in ("llama", "granite", "gemma2")),
    ],
)
def test_parts_of_it_are_the_modules_parts(name: str, kind: str) -> None:
    model = model_of(name) if kind == "lean" else native_model(name)
    network = lean(model) if kind == "lean" else native(model)
    for change in CHANGES:
        assert_those_of_the_module(model, change(network), change(ModuleNetwork.sharing(model)))
    few, all_layers = (scores(model, CHANGES[place](network)) for place in (0, -1))
    assert not torch.allclose(few, all_layers, atol=1e-2)


def test_the_model_is_left_as_it_is() -> None:
    model = model_of("llama", max_position_embeddings=CONTEXT)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    scores(model, lean(model).first_layers(1))
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_rotation_far_into_the_context() -> None:
    model = model_of("llama", max_position_embeddings=4096)
    found, expected = (
        passes_of(model, network, TOKENS * 27).verify([0], [TREE])[0].scores.clone()
        for network in (lean(model), ModuleNetwork.sharing(model))
    )
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["granite", "gemma"])
def test_learnt_embeddings(name: str) -> None:
    """Granite multiplies them by its factor, and Gemma, whose module has the factor, does not."""
    model, rows = model_of(name), torch.randn(2, 128 if name == "granite" else 64)
    network, module = native(model), ModuleNetwork.sharing(model)
    assert [network.extend(rows), module.extend(rows)] == 2 * [VOCAB_SIZE]
    tree = TokenTree((VOCAB_SIZE + 1, 4, VOCAB_SIZE), (-1, 0, 0))
    assert_those_of_the_module(model, network, module, tree)


SHAPES: dict[str, dict[str, Any]] = {
    "a vocabulary of odd size": {"vocab_size": 97},
    "sixteen query heads a key head": {"num_attention_heads": 16, "num_key_value_heads": 1},
    "twenty-eight": {"num_attention_heads": 28, "num_key_value_heads": 1, "hidden_size": 896},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_odd_shapes(shape: str) -> None:
    model = native_model("llama", **SHAPES[shape])
    expected = scores(model, ModuleNetwork.sharing(model))
    torch.testing.assert_close(scores(model, native(model)), expected, atol=2e-3, rtol=1e-3)


def exact_scores(model: PreTrainedModel) -> Tensor:
    """Those of the module in float32."""
    exact: PreTrainedModel = copy.deepcopy(model).float()  # type: ignore[no-untyped-call]
    return scores(exact, ModuleNetwork.sharing(exact))


@pytest.mark.parametrize("width", [32, 64, 96, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_of_every_width(width: int, dtype: torch.dtype) -> None:
    model = model_of("llama", dtype, head_dim=width)
    exact = exact_scores(model)
    most = {torch.float32: 1e-4, torch.bfloat16: 0.03}[dtype]
    assert (scores(model, native(model)) - exact).std() < most * exact.std()


@pytest.mark.parametrize(
    ("name", "kind"),
    [*((name, "lean") for name in ("llama", "qwen2", "qwen3")), ("qwen3", "native")],
)
def test_bfloat16_is_as_near_to_float32_as_the_module(name: str, kind: str) -> None:
    """The native network is nearer."""
    model = (model_of if kind == "lean" else native_model)(name, torch.bfloat16)
    network = lean(model) if kind == "lean" else native(model)
    exact = exact_scores(model)
    found, module = (
        (scores(model, each).float() - exact).abs().mean()
        for each in (network, ModuleNetwork.sharing(model))
    )
    assert found < (1.2 if kind == "lean" else 1.0) * module


# Quantized weights


def rounded_int8(weight: Tensor) -> Tensor:
    groups = weight.view(len(weight), -1, GROUP)
    scale = (groups.abs().amax(-1, keepdim=True) / 127).half().float()
    return ((groups / scale).round() * scale).flatten(1)


def rounded_int4(weight: Tensor) -> Tensor:
    groups = weight.view(len(weight), -1, GROUP)
    least = groups.amin(-1, keepdim=True).half().float()
    scale = ((groups.amax(-1, keepdim=True) - least) / 15).half().float()
    return (((groups - least) / scale).round().clamp(0, 15) * scale + least).flatten(1)


ROUNDED = {"int8": rounded_int8, "int4": rounded_int4}
PROCESSORS = pytest.mark.parametrize("flags", [(), PORTABLE], ids=["processor", "portable"])


def quantized(model: PreTrainedModel, quantization: str) -> PreTrainedModel:
    """The model with the weights that the kernels work with, as PyTorch would compute it."""
    for layer in (module for module in model.modules() if isinstance(module, torch.nn.Linear)):
        is_head = layer is model.get_output_embeddings()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            form = "int8" if is_head else quantization
            layer.weight.copy_(ROUNDED[form](layer.weight.float()))
    return model


@PROCESSORS
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_rounded_weights_are_what_runs(quantization: str, flags: tuple[str, ...]) -> None:
    """Against the same weights in float32: what is left is the rounding of the inputs."""
    model = native_model("qwen2")
    found = scores(model, native(model, quantization, *flags))
    unrounded = scores(model, ModuleNetwork.sharing(model))
    expected = scores(quantized(model, quantization), ModuleNetwork.sharing(model))
    error = (found - expected).std() / expected.std()
    assert error < 0.06  # an error per layer, made larger by random weights
    assert (quantization == "int8") or error < 0.5 * (found - unrounded).std() / expected.std()


@PROCESSORS
def test_a_head_alone_in_int8(flags: tuple[str, ...]) -> None:
    """One linear layer: nothing but the rounding of its inputs, half a step of 127 at most."""
    model, every = native_model("llama, tied"), range(2)
    exact = scores(model, ModuleNetwork.sharing(model).without(every, every))
    found = scores(model, native(model, "int8", *flags).without(every, every))
    assert (found - exact).std() < 0.01 * exact.std()


@pytest.mark.parametrize("form", [Format.INT8, Format.INT4])
def test_weights_are_rounded_to_the_nearest(form: Format) -> None:
    """And those that come from as many bits, such as a GGUF file's Q8_0 and Q4_1, stay."""
    weight = torch.randn(2 * PANEL, 3 * GROUP, generator=torch.Generator().manual_seed(0))
    weight[5, :GROUP] = 0
    once = unpacked(pack(LinearWeights(weight, None), form))
    step = {Format.INT8: 1 / 127, Format.INT4: 1 / 15}[form]
    spread = weight.view(-1, GROUP).aminmax(dim=-1)
    widest = (
        torch.maximum(spread.max, -spread.min) if form is Format.INT8 else spread.max - spread.min
    )
    error = (once - weight).view(-1, GROUP).abs().amax(dim=-1)
    assert (error <= 0.51 * step * widest + 1e-3).all()
    assert torch.equal(unpacked(pack(LinearWeights(once, None), form)), once)


def test_gate_and_up_in_turns() -> None:
    weight = torch.arange(4 * PANEL)[:, None].float()
    turns = in_turns(LinearWeights(weight, weight[:, 0])).weight[:, 0].tolist()
    first = list(range(PANEL))
    assert turns[: 2 * PANEL] == first + [number + 2 * PANEL for number in first]


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


WITHOUT_MODULES = """
import os, sys
from tokenleap import LLM
from tokenleap.runtime.native.build import library
library()  # before it is looked for in another cache
_, folder, os.environ["TOKENLEAP_CACHE"] = sys.argv
llm = LLM(folder, dtype="float32", quantization="int8", speculative_config={"method": "ngram"})
llm.generate([[1, 2, 3, 1, 2]])
assert "transformers.modeling_utils" not in sys.modules
"""


def test_packed_weights_run_without_the_modules_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They take a second to import, and 130 MB."""
    folder, cache = tmp_path / "model", tmp_path / "cache"
    native_model("qwen2").save_pretrained(folder)
    with monkeypatch.context() as patch:
        patch.setenv("TOKENLEAP_CACHE", str(cache))
        LLM(folder, dtype="float32", quantization="int8")
    command = [sys.executable, "-c", WITHOUT_MODULES, str(folder), str(cache)]
    subprocess.run(command, check=True, timeout=120)


# Invariant 7


def assert_bits(passes: Passes) -> None:
    """Of any number of nodes, in a tree, beside other rows and beside one without nodes.

    The rows 0, 1 and 2 have 33, 4 and 14 tokens.
    """

    def alone(key: int, tree: TokenTree) -> Tensor:
        return passes.verify([key], [tree])[0].scores.clone()

    together = alone(0, chain(TOKENS[33:]))
    for nodes in (1, 2, 3, 5, 6, 7, 8, 12, 13, 16, 25, 40):
        assert torch.equal(alone(0, chain(TOKENS[33 : 33 + nodes])), together[:nodes])
    tree = alone(2, TREE)
    for node in range(len(TREE)):
        path = (0, *TREE.path(node))
        assert torch.equal(tree[list(path)], alone(2, chain([TREE.tokens[i] for i in path])))
    trees = {0: chain(TOKENS[33:37]), 1: TREE, 2: chain([4])}
    expected = {key: alone(key, trees[key]) for key in trees}
    for keys in ([0, 1, 2], [2, 0]):
        for key, found in zip(keys, passes.verify(keys, [trees[key] for key in keys]), strict=True):
            assert torch.equal(found.scores, expected[key])


KINDS: dict[str, tuple[torch.dtype, str | None, tuple[str, ...]]] = {
    "float32": (torch.float32, None, ()),
    "bfloat16": (torch.bfloat16, None, ()),
    "int8": (torch.bfloat16, "int8", ()),
    "int4": (torch.bfloat16, "int4", ()),
    "bfloat16, portable": (torch.bfloat16, None, PORTABLE),
    "int4, portable": (torch.float32, "int4", PORTABLE),
}
BY_DEFAULT = {("smollm3", "float32"), ("olmo2", "int4"), ("gemma2, wide heads", "bfloat16")}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, kind) for kind in KINDS for name in ("llama", "mistral", "qwen3")),
        *(
            pytest.param(name, kind, marks=() if (name, kind) in BY_DEFAULT else pytest.mark.slow)
            for name in RELATIVES
            for kind in ("float32", "bfloat16", "int4")
        ),
    ],
)
def test_bits(name: str, kind: str) -> None:
    dtype, quantization, flags = KINDS[kind]
    model = native_model(name, dtype)
    prompts = [TOKENS[:length] for length in (33, 4, 14)]
    assert_bits(passes_of(model, native(model, quantization, *flags), *prompts))


@pytest.mark.parametrize("kind", KINDS)
def test_bits_do_not_depend_on_threads_or_chunks(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtype, quantization, flags = KINDS[kind]
    model = native_model("llama", dtype)
    network, five = native(model, quantization, *flags), chain(TOKENS[40:45])
    expected = passes_of(model, network, TOKENS[:40]).verify([0], [five])[0].scores.clone()
    for threads, chunk in ((1, 3), (2, 17), (3, 40)):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        monkeypatch.setattr("tokenleap.runtime.passes.PREFILL_CHUNK", chunk)
        found = passes_of(model, network, TOKENS[:40]).verify([0], [five])[0]
        assert torch.equal(found.scores, expected)


def test_another_default_dtype() -> None:
    model = native_model("llama")
    expected = scores(model, native(model))
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(scores(model, native(model)), expected)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@pytest.mark.parametrize("place", [0, 5, 16, 31])
def test_a_broken_number_shows(quantization: str | None, place: int) -> None:
    for value in (float("nan"), float("inf")):
        model = native_model("llama")
        with torch.no_grad():
            model.get_input_embeddings().weight[TREE.tokens[0], place] = value  # type: ignore[operator]
        found = scores(model, native(model, quantization), chain([TREE.tokens[0]]))
        assert found.isnan().any()
