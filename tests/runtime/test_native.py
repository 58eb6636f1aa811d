"""The C++ pass computes what the module computes, with the same bits in any company."""

from __future__ import annotations

import copy
import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.programs import Program
from tests.runtime.test_lean import FAMILY, TREE, model_of, scores
from tests.tiny import VOCAB_SIZE, tiny_model
from tokenleap import ConfigError
from tokenleap.core.tree import TokenTree, chain
from tokenleap.runtime.choices import DRAFTING
from tokenleap.runtime.choose import network_for
from tokenleap.runtime.lean import LeanDecoder
from tokenleap.runtime.llama import LinearWeights, LlamaWeights
from tokenleap.runtime.module import ModuleNetwork
from tokenleap.runtime.native import build
from tokenleap.runtime.native.build import NativeLibraryError, library, why_not_native
from tokenleap.runtime.native.network import NativeDecoder
from tokenleap.runtime.native.pack import GROUP, PANEL, Format, in_turns, pack
from tokenleap.runtime.network import Network
from tokenleap.runtime.target import Target

pytestmark = pytest.mark.usefixtures("native_library")

PORTABLE = "-DTOKENLEAP_PORTABLE"
KINDS: list[tuple[torch.dtype, str | None, tuple[str, ...]]] = [
    (torch.float32, None, ()),
    (torch.bfloat16, None, ()),
    (torch.bfloat16, "int8", ()),
    (torch.bfloat16, "int4", ()),
    (torch.bfloat16, None, (PORTABLE,)),
    (torch.float32, "int4", (PORTABLE,)),
]
TOKENS = [(7 * i * i + 3 * i) % VOCAB_SIZE for i in range(80)]


def wide_model(name: str = "llama", dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """With heads that the kernels are written for."""
    return model_of(name, dtype, head_dim=32)


def quantized(model: PreTrainedModel, quantization: str) -> PreTrainedModel:
    """The model with the weights that the kernels work with, as PyTorch would compute it."""
    layers = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    for layer in layers:
        is_head = layer is model.get_output_embeddings()  # type: ignore[no-untyped-call]
        form = "int8" if is_head else quantization
        with torch.no_grad():
            layer.weight.copy_(ROUNDED[form](layer.weight.float()))
    return model


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


@pytest.mark.parametrize("flags", [(), (PORTABLE,)], ids=["processor", "portable"])
@pytest.mark.parametrize("name", FAMILY)
def test_the_module_is_the_oracle(name: str, flags: tuple[str, ...]) -> None:
    model = wide_model(name)
    found = scores(model, NativeDecoder(LlamaWeights(model), None, *flags))
    assert torch.allclose(found, scores(model, ModuleNetwork.sharing(model)), atol=2e-4, rtol=1e-4)


def float32_scores(model: PreTrainedModel) -> Tensor:
    exact: PreTrainedModel = copy.deepcopy(model).float()  # type: ignore[no-untyped-call]
    return scores(exact, ModuleNetwork.sharing(exact))


SHAPES: dict[str, dict[str, Any]] = {
    "a vocabulary of odd size": {"vocab_size": 97},
    "sixteen query heads a key head": {"num_attention_heads": 16, "num_key_value_heads": 1},
    "twenty-eight": {"num_attention_heads": 28, "num_key_value_heads": 1, "hidden_size": 896},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_odd_shapes(shape: str) -> None:
    model = tiny_model(head_dim=32, **SHAPES[shape])
    found = scores(model, NativeDecoder(LlamaWeights(model)))
    assert torch.allclose(found, scores(model, ModuleNetwork.sharing(model)), atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("width", [32, 64, 96, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_of_every_width(width: int, dtype: torch.dtype) -> None:
    model = tiny_model(head_dim=width, dtype=dtype)
    found = scores(model, NativeDecoder(LlamaWeights(model)))
    exact = float32_scores(model)
    assert (found - exact).std() < {torch.float32: 1e-4, torch.bfloat16: 0.03}[dtype] * exact.std()


def test_bfloat16_is_nearer_to_float32_than_the_module() -> None:
    model = wide_model("qwen3", torch.bfloat16)
    native, module = (
        scores(model, network).float()
        for network in (NativeDecoder(LlamaWeights(model)), ModuleNetwork.sharing(model))
    )
    exact = float32_scores(model)
    assert (native - exact).std() < (module - exact).std()


@pytest.mark.parametrize("flags", [(), (PORTABLE,)], ids=["processor", "portable"])
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_rounded_weights_are_what_runs(quantization: str, flags: tuple[str, ...]) -> None:
    """Against the same weights in float32: what is left is the rounding of the inputs."""
    model = wide_model("qwen2")
    found = scores(model, NativeDecoder(LlamaWeights(model), quantization, *flags))
    unrounded = scores(model, ModuleNetwork.sharing(model))
    expected = scores(quantized(model, quantization), ModuleNetwork.sharing(model))
    error = (found - expected).std() / expected.std()
    assert error < 0.06  # an error per layer, made larger by random weights
    assert (quantization == "int8") or error < 0.5 * (found - unrounded).std() / expected.std()


@pytest.mark.parametrize("flags", [(), (PORTABLE,)], ids=["processor", "portable"])
def test_a_head_alone_in_int8(flags: tuple[str, ...]) -> None:
    """One linear layer: nothing but the rounding of its inputs, half a step of 127 at most."""
    model, every = wide_model("llama, tied"), range(2)
    exact = scores(model, ModuleNetwork.sharing(model).without(every, every))
    found = scores(model, NativeDecoder(LlamaWeights(model), "int8", *flags).without(every, every))
    assert (found - exact).std() < 0.01 * exact.std()


@pytest.mark.parametrize(("dtype", "quantization", "flags"), KINDS)
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 6, 7, 8, 12, 13, 16, 25, 40])
def test_bits_do_not_depend_on_the_number_of_nodes(
    dtype: torch.dtype, quantization: str | None, flags: tuple[str, ...], rows: int
) -> None:
    model = wide_model("qwen3", dtype)
    target = filled(Target(model), NativeDecoder(LlamaWeights(model), quantization, *flags), 33)
    together = target.verify([0], [chain(TOKENS[33:])])[0].scores.clone()
    alone = target.verify([0], [chain(TOKENS[33 : 33 + rows])])[0].scores
    assert torch.equal(alone, together[:rows])


@pytest.mark.parametrize(("dtype", "quantization", "flags"), KINDS)
def test_a_tree_has_the_bits_of_its_chains(
    dtype: torch.dtype, quantization: str | None, flags: tuple[str, ...]
) -> None:
    model = wide_model("llama", dtype)
    target = filled(Target(model), NativeDecoder(LlamaWeights(model), quantization, *flags), 14)
    tree = TokenTree((5, 3, 5, 8, 9, 7, 1, 2), (-1, 0, 0, 1, 3, 2, 2, 5))
    scored = target.verify([0], [tree])[0].scores.clone()
    for node in range(len(tree)):
        path = (0, *tree.path(node))
        alone = target.verify([0], [chain([tree.tokens[i] for i in path])])[0].scores
        assert torch.equal(scored[list(path)], alone)


@pytest.mark.parametrize(("dtype", "quantization", "flags"), KINDS)
def test_a_row_has_its_own_bits_in_any_company(
    dtype: torch.dtype, quantization: str | None, flags: tuple[str, ...]
) -> None:
    model = wide_model("mistral", dtype)
    target = filled(
        Target(model), NativeDecoder(LlamaWeights(model), quantization, *flags), 9, 30, 2
    )
    trees = [chain([5, 6, 7, 8]), TREE, chain([4])]
    together = [output.scores.clone() for output in target.verify([0, 1, 2], trees)]
    for key, tree in enumerate(trees):
        assert torch.equal(target.verify([key], [tree])[0].scores, together[key])
    pair = target.verify([2, 0], [trees[2], trees[0]])  # row 1 between them has no nodes
    assert torch.equal(pair[0].scores, together[2])
    assert torch.equal(pair[1].scores, together[0])


@pytest.mark.parametrize(("dtype", "quantization", "flags"), KINDS)
def test_bits_do_not_depend_on_threads_or_chunks(
    dtype: torch.dtype,
    quantization: str | None,
    flags: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = wide_model("llama", dtype)
    network = NativeDecoder(LlamaWeights(model), quantization, *flags)
    five = chain(TOKENS[40:45])
    expected = filled(Target(model), network, 40).verify([0], [five])[0].scores.clone()
    for threads, chunk in ((1, 3), (2, 17), (3, 40)):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        monkeypatch.setattr("tokenleap.runtime.passes.PREFILL_CHUNK", chunk)
        found = filled(Target(model), network, 40).verify([0], [five])[0]
        assert torch.equal(found.scores, expected)


def filled(target: Target, network: Network, *lengths: int) -> Target:
    """Rows 0, 1, ... of so many tokens."""
    target = target.with_network(network)
    for key, length in enumerate(lengths):
        target.add(key)
        target.prefill(key, TOKENS[:length])
    return target


def test_layers_can_be_left_out() -> None:
    model = wide_model("llama")
    changes: list[Callable[[Any], Network]] = [
        lambda network: network.first_layers(1),
        lambda network: network.without([0], [1]),
        lambda network: network.without([1], []).without([0], []),
    ]
    for change in changes:
        found, expected = (
            scores(model, change(network))
            for network in (NativeDecoder(LlamaWeights(model)), ModuleNetwork.sharing(model))
        )
        assert torch.allclose(found, expected, atol=2e-4, rtol=1e-4)


def unpacked(packed: Tensor, form: Format) -> Tensor:
    """The weights [N, K] that the kernels read."""
    steps_bytes = GROUP * PANEL // (1 if form is Format.INT8 else 2)
    steps = packed[..., :steps_bytes]  # [P, G, bytes]
    scales = packed[..., steps_bytes:].contiguous().view(torch.float16).float()  # [P, G, 32 or 64]
    if form is Format.INT4:
        steps = torch.cat([steps & 15, steps >> 4], dim=-1)
    quads = steps.view(*steps.shape[:2], GROUP // 4, PANEL, 4).float()
    scale = scales[..., None, :PANEL, None]
    least = scales[..., None, PANEL:, None] if form is Format.INT4 else -128 * scale
    return (quads * scale + least).permute(0, 3, 1, 2, 4).reshape(len(packed) * PANEL, -1)


@pytest.mark.parametrize("form", [Format.INT8, Format.INT4])
def test_weights_are_rounded_to_the_nearest(form: Format) -> None:
    """And those that come from as many bits, such as a GGUF file's Q8_0 and Q4_1, stay."""
    weight = torch.randn(2 * PANEL, 3 * GROUP, generator=torch.Generator().manual_seed(0))
    weight[5, :GROUP] = 0
    once = unpacked(pack(LinearWeights(weight, None), form).weight, form)
    step = {Format.INT8: 1 / 127, Format.INT4: 1 / 15}[form]
    spread = weight.view(-1, GROUP).aminmax(dim=-1)
    widest = (
        torch.maximum(spread.max, -spread.min) if form is Format.INT8 else spread.max - spread.min
    )
    error = (once - weight).view(-1, GROUP).abs().amax(dim=-1)
    assert (error <= 0.51 * step * widest + 1e-3).all()
    assert torch.equal(unpacked(pack(LinearWeights(once, None), form).weight, form), once)


def test_gate_and_up_in_turns() -> None:
    weight = torch.arange(4 * PANEL)[:, None].float()
    turns = in_turns(LinearWeights(weight, weight[:, 0])).weight[:, 0].tolist()
    first = list(range(PANEL))
    assert turns[: 2 * PANEL] == first + [number + 2 * PANEL for number in first]


def test_who_runs_natively() -> None:
    assert network_for(tiny_model(head_dim=32)).name == "native"
    assert network_for(tiny_model(head_dim=32), runtime="torch").name == "lean"
    assert network_for(tiny_model("lean")).name == "lean"
    assert network_for(tiny_model("gpt2")).name == "module"
    assert "not torch.float16" in (
        why_not_native(tiny_model(head_dim=32, dtype=torch.float16)) or ""
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"runtime": "natve"},
            "runtime: must be one of auto, native, torch, lean, module, compiled",
        ),
        ({"runtime": "native"}, "not available for this model on this machine: head_dim must be"),
        ({"quantization": "int4"}, "^quantization: int4 needs .* here: head_dim must be"),
        ({"quantization": DRAFTING}, "^draft_quantization: int4 needs .* or leave it out"),
        ({"quantization": "int4", "runtime": "torch"}, "here: the runtime is 'torch'"),
        ({"quantization": "int4", "runtime": "lean"}, "here: the runtime is 'lean'"),
        ({"quantization": "int3"}, "must be one of auto, none, int8, int4"),
    ],
)
def test_what_cannot_be_had(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        network_for(tiny_model("lean"), **arguments)


def test_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Everything works without one, on PyTorch's operations."""
    build._library.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    try:
        model = tiny_model(head_dim=32)
        assert network_for(model).name == "lean"
        with pytest.raises(ConfigError, match="there is no C"):
            network_for(model, runtime="native")
    finally:
        build._library.cache_clear()


def test_a_compiler_that_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing half-made is left in the cache."""
    monkeypatch.setenv("TOKENLEAP_CACHE", str(tmp_path))
    with pytest.raises(NativeLibraryError, match=r"failed: .*error"):
        library("-DTOKENLEAP_PORTABLE=", "-include", "no_such_header.h")
    assert not [path for path in (tmp_path / "native").iterdir() if path.name != ".lock"]


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The library, which is copied instead of compiled; caches and temporary files are new."""
    made = Path(library()._name).resolve()
    monkeypatch.setenv("TOKENLEAP_CACHE", str(tmp_path / "cache"))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    monkeypatch.setattr(build, "_compile", lambda *given: shutil.copy(made, given[-1]))
    build._library.cache_clear()
    yield made
    build._library.cache_clear()


def loaded_from() -> Path:
    """The file that is loaded when the library is wanted now."""
    build._library.cache_clear()
    return Path(library()._name).resolve()


def test_a_cache_that_cannot_be_written(
    compiled: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The library is then in a temporary folder of this user's, and one warning says so."""
    cache = tmp_path / "a file"
    cache.touch()
    monkeypatch.setenv("TOKENLEAP_CACHE", str(cache))
    made = loaded_from()
    assert made == tmp_path / "tmp" / f"tokenleap-{os.geteuid()}" / compiled.name
    (message,) = caplog.messages
    assert f"cannot write the cache folder {cache}" in message
    assert "set TOKENLEAP_CACHE" in message
    assert str(made.parent) in message


def of_another(path: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can give a file away")
    os.chown(path, 12345, -1)


def of_a_group(path: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can give a file to a group")
    path.chmod(0o775)
    os.chown(path, -1, 12345)


def linked(path: Path) -> None:
    """Put a link in the place of something."""
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def mode(bits: int) -> Callable[[Path], None]:
    return lambda path: path.chmod(bits)


UNSAFE = {
    "a link in the place of the library": ("cache/native/{}", linked),
    "a link in the place of the folder": ("cache/native", linked),
    "a library that all may write": ("cache/native/{}", mode(0o722)),
    "a library of another user": ("cache/native/{}", of_another),
    "a folder that all may write": ("cache/native", mode(0o777)),
    "a folder that all may write, as /tmp": ("cache/native", mode(0o1777)),
    "a folder of another user": ("cache/native", of_another),
    "a cache that all may write": ("cache", mode(0o777)),
    "a cache that a group may write": ("cache", of_a_group),
    "a folder above it that all may write": ("", mode(0o777)),
    "a library that is none": ("cache/native/{}", lambda path: path.write_bytes(b"damaged")),
}


@pytest.mark.parametrize("case", UNSAFE)
def test_no_library_is_loaded_that_others_may_have_written(
    case: str,
    compiled: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is made again where only this user can write, and one warning says why."""
    base = tmp_path / "base"
    base.mkdir(mode=0o700)
    monkeypatch.setenv("TOKENLEAP_CACHE", str(base / "cache"))
    place = base / "cache" / "native" / compiled.name
    assert loaded_from() == place
    assert not caplog.messages
    path, change = UNSAFE[case]
    unsafe = base / path.format(place.name)
    unsafe.chmod(0o700)
    change(unsafe)
    found = loaded_from()
    (message,) = caplog.messages
    assert str(unsafe) in message
    assert "\n" not in message
    assert "set TOKENLEAP_CACHE to" in message
    assert tmp_path / "tmp" in found.parents


def test_a_temporary_folder_of_another_user(
    compiled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library that another process made first is not loaded, and this process has a fresh one."""
    (tmp_path / "cache").touch()
    squatted = tmp_path / "tmp" / f"tokenleap-{os.geteuid()}"
    squatted.mkdir(mode=0o777)
    squatted.chmod(0o777)
    shutil.copy(compiled, squatted / compiled.name)
    found = loaded_from()
    assert squatted not in found.parents
    assert list((tmp_path / "tmp").iterdir()) == [squatted]
    (tmp_path / "tmp").chmod(0o777)
    build._library.cache_clear()
    with pytest.raises(NativeLibraryError, match=r"tmp, which is writable for other users"):
        library()


def test_a_cache_behind_links(compiled: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """A home folder may be a link; what counts is where it leads."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "home").symlink_to(tmp_path / "disk")
    monkeypatch.setenv("TOKENLEAP_CACHE", str(tmp_path / "home" / "cache"))
    assert loaded_from() == tmp_path / "disk" / "cache" / "native" / compiled.name


def test_what_was_checked_is_loaded(
    compiled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another file at its path, after the check, is not loaded."""
    if not Path("/proc/self/fd").exists():
        pytest.skip("only Linux loads a file that is open")
    place, load = tmp_path / "cache" / "native" / compiled.name, ctypes.CDLL

    def replaced(name: str) -> ctypes.CDLL:
        place.unlink()
        place.write_bytes(b"another file")
        return load(name)

    monkeypatch.setattr(ctypes, "CDLL", replaced)
    assert library().omp_get_max_active_levels() >= 0
    assert place.read_bytes() == b"another file"


def test_lean_is_for_some_models() -> None:
    with pytest.raises(ConfigError, match=r"lean supports only Llama.*take 'module'"):
        network_for(tiny_model("gpt2"), runtime="lean")


@pytest.mark.parametrize(("runtime", "network"), [("lean", LeanDecoder), ("module", ModuleNetwork)])
def test_runtimes_by_the_names_that_are_shown(runtime: str, network: type[Network]) -> None:
    found = network_for(tiny_model(head_dim=32), runtime=runtime)
    assert isinstance(found, network)
    assert found.name == runtime


@pytest.mark.slow  # it compiles
def test_two_processes_compile_once(tmp_path: Path) -> None:
    calls, compiler = tmp_path / "calls", tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\necho "$@" >> {calls}\nexec g++ "$@"\n')
    compiler.chmod(0o700)
    script = "from tokenleap.runtime.native.build import library; library('-O0')"
    environment = {**os.environ, "TOKENLEAP_CACHE": str(tmp_path), "CXX": str(compiler)}
    with Program(script, env=environment) as one, Program(script, env=environment) as other:
        assert (one.wait(), other.wait()) == (0, 0)
    compiled = [line for line in calls.read_text().splitlines() if "decoder.cpp" in line]
    assert len(compiled) == 1


def test_fewer_threads_than_asked_for() -> None:
    """OpenMP may give fewer, and no thread waits for the others."""
    openmp = library()  # whatever this library finds is the OpenMP that it is linked to
    model, before = tiny_model(head_dim=32), torch.get_num_threads()
    levels = openmp.omp_get_max_active_levels()
    torch.set_num_threads(4)
    openmp.omp_set_max_active_levels(0)  # every parallel region gets one thread
    try:
        target = Target(model)
        assert target.network.name == "native"
        assert target.bit_exact
    finally:
        openmp.omp_set_max_active_levels(levels)
        torch.set_num_threads(before)


@pytest.mark.slow
def test_fewer_threads_by_the_environment() -> None:
    """Two of four."""
    script = (
        "import torch; torch.set_num_threads(4)\n"
        "from tests.tiny import tiny_model\n"
        "from tokenleap.runtime.target import Target\n"
        "target = Target(tiny_model(head_dim=32))\n"
        "assert target.network.name == 'native' and target.bit_exact\n"
    )
    environment = {**os.environ, "OMP_THREAD_LIMIT": "2", "OMP_DYNAMIC": "true"}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True, timeout=240)


def test_another_default_dtype() -> None:
    model = wide_model()
    expected = scores(model, NativeDecoder(LlamaWeights(model)))
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(scores(model, NativeDecoder(LlamaWeights(model))), expected)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@pytest.mark.parametrize("place", [0, 5, 16, 31])
def test_a_broken_number_shows(value: float, quantization: str | None, place: int) -> None:
    model = wide_model()
    with torch.no_grad():
        model.get_input_embeddings().weight[TREE.tokens[0], place] = value  # type: ignore[operator]
    network = NativeDecoder(LlamaWeights(model), quantization)
    target = Target(wide_model()).with_network(network)
    target.add(0)
    target.prefill(0, [1, 2])
    assert target.verify([0], [chain([TREE.tokens[0]])])[0].scores.isnan().any()
