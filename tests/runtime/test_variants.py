"""A wheel's libraries: which one a processor gets, and that it has the bits of a local build."""

from __future__ import annotations

import ctypes
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.runtime.test_llama_family import scores
from tests.tiny import tiny_model
from tokenleap.runtime.llama import LlamaWeights
from tokenleap.runtime.native import build
from tokenleap.runtime.native.build import Variant, best_variant, variants
from tokenleap.runtime.native.network import NativeDecoder

MACHINES = ("x86_64", "aarch64")
ALL = [(machine, variant) for machine in MACHINES for variant in variants(machine)]
X86 = variants("x86_64")
HERE = torch.cpu.get_capabilities()
x86_only = pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="for x86-64")

PROCESSORS = {
    "nehalem": None,
    "ivybridge": None,
    "haswell": "avx2",
    "znver2": "avx2",
    "skylake-avx512": "avx512",
    "cascadelake": "avx512_vnni",
    "icelake-server": "avx512_vnni",
    "cooperlake": "avx512_bf16",
    "sapphirerapids": "amx",
}
"""GCC's names of processors, and the best variant for each."""

LOCAL = {
    "avx2": "haswell",
    "avx512": "skylake-avx512",
    "avx512_vnni": "cascadelake",
    "avx512_bf16": "cooperlake",
    "amx": "sapphirerapids",
}
"""Processors for which each variant is made: what `-march=native` means there."""

IMPLIED = {"crc32", "lahfsahf", "movbe", "xsave", "avx", "sse3", "sse41", "ssse3"}
"""What every processor with AVX2 has."""


def there(*names: str) -> dict[str, object]:
    return {"architecture": "any", "l2_cache_size": 1, **dict.fromkeys(names, True)}


@pytest.mark.parametrize(("machine", "variant"), ALL)
def test_a_variant_is_for_processors_with_all_that_it_needs(machine: str, variant: Variant) -> None:
    assert best_variant(there(*variant.needs), machine) == variant.name
    names = [each.name for each in variants(machine)]
    for need in variant.needs:
        less = best_variant({**there(*variant.needs), need: False}, machine)
        assert less is None or names.index(less) < names.index(variant.name)


def test_no_variant() -> None:
    assert best_variant(there(), "x86_64") is None
    assert best_variant(there("avx2"), "riscv64") is None


def instructions(*flags: str) -> set[str]:
    """The features whose instructions GCC emits with these flags, spelled without underscores."""
    found = []
    for each in (flags, ("-march=x86-64",)):
        command = ["g++", *each, "-dM", "-E", "-x", "c++", "/dev/null"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        rows = [line.split() for line in done.stdout.splitlines()]
        found.append({row[1] for row in rows if row[1].endswith("__") and row[2:] == ["1"]})
    return {name.replace("_", "").lower() for name in found[0] - found[1]}


def spelled(needs: frozenset[str]) -> set[str]:
    return {name.replace("fma3", "fma").replace("_", "") for name in needs}


@x86_only
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
@pytest.mark.parametrize("variant", X86, ids=lambda variant: variant.name)
def test_flags_use_only_what_is_asked_for(variant: Variant) -> None:
    assert instructions(*variant.flags) == spelled(variant.needs) | IMPLIED


@x86_only
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
@pytest.mark.parametrize("processor", PROCESSORS)
def test_processors_get_their_best(processor: str) -> None:
    able = instructions(f"-march={processor}")
    needs = {name for variant in X86 for name in variant.needs}
    found = there(*(name for name in needs if spelled(frozenset({name})) <= able))
    assert best_variant(found, "x86_64") == PROCESSORS[processor]


def logits(*flags: str) -> list[torch.Tensor]:
    """Of tiny models in all formats, with the library that these flags make."""
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        model = tiny_model("llama", dtype=dtype, head_dim=32)
        for quantization in (None, "int8", "int4"):
            network = NativeDecoder(LlamaWeights(model), quantization, *flags)
            found.append(scores(model, network))
    return found


def of_this_processor(variant: Variant) -> bool:
    return variant.name == best_variant(HERE)


@x86_only
@pytest.mark.usefixtures("native_library")
@pytest.mark.parametrize(
    "variant",
    [
        variant if of_this_processor(variant) else pytest.param(variant, marks=pytest.mark.slow)
        for variant in X86
    ],
    ids=lambda variant: variant.name,
)
def test_a_variant_has_the_bits_of_a_local_build(variant: Variant) -> None:
    """For another processor than this one, of a build with the flags that are native to it."""
    if not variant.runs_on(HERE):
        pytest.skip("this processor lacks its instructions")
    local = () if of_this_processor(variant) else (f"-march={LOCAL[variant.name]}",)
    for found, expected in zip(logits(*variant.flags), logits(*local), strict=True):
        assert torch.equal(found, expected)


@pytest.fixture
def wheel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, native_library: None) -> Any:
    """The package's folder of libraries is another one, with this library for every variant."""
    made = Path(build.library()._name).resolve()
    for variant in variants():
        shutil.copy(made, tmp_path / f"{variant.name}.so")
    monkeypatch.setattr(build, "_PREBUILT", tmp_path)
    build._library.cache_clear()
    yield tmp_path
    build._library.cache_clear()


def test_the_best_library_of_a_wheel_is_loaded(wheel: Path) -> None:
    best = best_variant(HERE)
    assert Path(build.library()._name) == wheel / f"{best}.so"
    assert build.library_origin() == f"prebuilt for {best}"


def test_a_library_that_does_not_load(wheel: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One warning, and the code is compiled as in a checkout."""
    damaged = wheel / f"{best_variant(HERE)}.so"
    damaged.write_bytes(b"damaged")
    assert isinstance(build.library(), ctypes.CDLL)
    assert build.library_origin().startswith("compiled here by ")
    (message,) = caplog.messages
    assert message.startswith(f"cannot load {damaged}: ")
