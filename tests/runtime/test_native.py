"""The C++ library: who runs on it, what is refused, and how it is compiled and found."""

from __future__ import annotations

import ctypes
import gc
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.programs import Program
from tests.runtime.test_llama_family import PORTABLE
from tests.tiny import tiny_model
from tokenleap import LLM, ConfigError, SamplingParams
from tokenleap.core import noise as noises
from tokenleap.core.distribution import Distribution
from tokenleap.core.noise import LogitsDraw, Noise, Stream
from tokenleap.core.sampler import Sampler, TreeDistributions
from tokenleap.errors import ModelError
from tokenleap.runtime.choices import DRAFTING
from tokenleap.runtime.choose import network_for
from tokenleap.runtime.llama import LlamaWeights
from tokenleap.runtime.native import build
from tokenleap.runtime.native.build import NativeLibraryError, library, why_not_native
from tokenleap.runtime.native.network import NativeDecoder, NativeDraws, checked
from tokenleap.runtime.target import Target

pytestmark = pytest.mark.usefixtures("native_library")


def test_who_runs_natively() -> None:
    assert network_for(tiny_model(head_dim=32)).name == "native"
    assert network_for(tiny_model(head_dim=32), runtime="torch").name == "lean"
    assert network_for(tiny_model("lean")).name == "lean"
    assert network_for(tiny_model("gpt2")).name == "module"
    for runtime in ("lean", "module"):
        assert network_for(tiny_model(head_dim=32), runtime=runtime).name == runtime
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


def damaged(path: Path) -> None:
    """Another file in its place: the library itself is mapped."""
    path.unlink()
    path.write_bytes(b"damaged")


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
    "a library that is none": ("cache/native/{}", damaged),
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


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_the_logits_of_a_step_are_not_kept(rule: str) -> None:
    """Not in a circle, which Python finds only after hundreds of steps."""
    speculation = {"method": "ngram", "num_speculative_tokens": 3, "acceptance": {"rule": rule}}
    llm = LLM(tiny_model(head_dim=32), runtime="native", speculative_config=speculation)
    params = SamplingParams(max_tokens=40, temperature=0.5, seed=3, ignore_eos=True)

    def kept() -> int:
        return sum(type(each) is TreeDistributions for each in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        before = kept()
        (output,) = llm.generate([{"prompt_token_ids": [1, 2, 3] * 5}], params)
        after = kept()
    finally:
        gc.enable()
    assert output.metrics.num_draft_tokens > 0
    assert after <= before + 1  # of the last step


@given(
    st.integers(0, 2**128 - 1),
    st.integers(2, 5000) | st.integers(8000, 40_000),  # by one thread, or by all
    st.floats(0, 12),
    st.booleans(),
    st.integers(0, 9),
    st.sampled_from(Stream),
)
def test_draws_are_those_of_python(
    seed: int,
    size: int,
    spread: float,
    truncated: bool,
    place: int,
    stream: Stream,
) -> None:
    generator = torch.Generator().manual_seed(seed % 2**32)
    distribution = Distribution.of((spread * torch.randn(size, generator=generator)).softmax(-1))
    if truncated:
        kept = torch.rand(len(distribution.probs), generator=generator) < 0.3
        kept[0] = True
        probs = distribution.probs[kept] / distribution.probs[kept].sum()
        distribution = Distribution(probs, distribution.tokens[kept])
    noise = Noise(seed, position=place, token_stream=stream, lane=place % 3)
    found = NativeDraws(checked(library())).from_probs(noise, distribution, place, place % 2)
    assert found == int(noise.scores(distribution, place, place % 2).argmax())


@given(
    seed=st.integers(0, 2**63 - 1),
    size=st.integers(2, 700) | st.integers(8000, 40_000),
    rows=st.integers(1, 5),
    spread=st.floats(0.1, 12),
    params=st.builds(
        SamplingParams,
        temperature=st.floats(0.05, 3),
        top_k=st.sampled_from([-1, 0, 1, 2, 40, 10**10]),
        top_p=st.just(1.0) | st.floats(0.01, 1),
        min_p=st.just(0.0) | st.floats(0.0, 1),
    ),
    flags=st.sampled_from([(), PORTABLE]),
)
def test_draws_from_logits_are_those_of_the_sampler(
    seed: int, size: int, rows: int, spread: float, params: SamplingParams, flags: Sequence[str]
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = spread * torch.randn(rows, size, generator=generator) + 5
    draws = [LogitsDraw(row, Noise(seed + i, position=i), params) for i, row in enumerate(logits)]
    tokens = NativeDraws(checked(library(*flags))).from_logits(draws)
    sampler = Sampler(params, size, [])
    with patch.object(noises, "_faster", None):
        expected = [d.noise.draw(sampler.distribution(d.logits, []), 0) for d in draws]
    assert [token for token in tokens if token is not None] == [
        known for known, token in zip(expected, tokens, strict=True) if token is not None
    ]
    if not params.min_p and params.top_p == 1:  # else rounding may decide what is left
        assert list(tokens).count(None) < 2  # two tokens are too close in one draw of 100,000


@pytest.mark.parametrize("size", [5, 200, 9000])
def test_nothing_is_drawn_from_logits_that_are_no_numbers(size: int) -> None:
    logits = torch.zeros(5, size)
    logits[0] = -math.inf
    logits[1, size // 2], logits[2, size - 1] = math.nan, math.inf
    of_rows = [LogitsDraw(row, Noise(7), SamplingParams()) for row in logits]
    *wrong, plain, other = (draws := NativeDraws(checked(library()))).from_logits(of_rows)
    assert wrong == [None] * 3
    assert plain == other is not None
    logits[4, plain] = -math.inf  # a token that is never drawn
    assert draws.from_logits(of_rows)[4] not in (None, plain)
    doubles = LogitsDraw(logits[3].double(), Noise(7), SamplingParams())
    assert draws.from_logits([doubles]) == [None]


def test_nothing_is_drawn_where_rounding_decides() -> None:
    draws, noise = NativeDraws(checked(library())), Noise(5)
    times = torch.from_numpy(np.exp(-noise.scores(Distribution(torch.full((2,), 0.5)), 0)))
    even = (times / times.sum()).float()  # as likely as their noise is against them
    assert draws.from_probs(noise, Distribution(even), 0, 0) is None
    assert draws.from_logits([LogitsDraw(even.log(), noise, SamplingParams())]) == [None]
    for favoured in (0, 1):
        probs = even.clone()
        probs[favoured] *= 1.001
        assert draws.from_probs(noise, Distribution(probs / probs.sum()), 0, 0) == favoured
        assert draws.from_logits([LogitsDraw(probs.log(), noise, SamplingParams())]) == [favoured]


def test_a_native_model_draws_natively(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(tiny_model(head_dim=32), runtime="native")
    prompt = {"prompt_token_ids": [1, 2, 3]}
    sampled = SamplingParams(max_tokens=5, temperature=1, seed=3)
    (expected,) = llm.generate([prompt], sampled)
    monkeypatch.setattr(noises, "_faster", None)
    (by_python,) = llm.generate([prompt], sampled)
    assert by_python.outputs[0].token_ids == expected.outputs[0].token_ids
    monkeypatch.undo()
    monkeypatch.delattr(Noise, "scores")
    monkeypatch.delattr(Sampler, "distribution")  # p is not even computed
    (found,) = llm.generate([prompt], sampled)
    assert found.outputs[0].token_ids == expected.outputs[0].token_ids


def test_a_step_draws_for_all_requests_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(tiny_model(head_dim=32), runtime="native", max_num_seqs=5)
    calls: list[int] = []
    from_logits = NativeDraws.from_logits

    def counted(self: NativeDraws, draws: Sequence[LogitsDraw]) -> Sequence[int | None]:
        calls.append(len(draws))
        return from_logits(self, draws)

    monkeypatch.setattr(NativeDraws, "from_logits", counted)
    others: list[dict[str, Any]] = [{"temperature": 0.0}, {"presence_penalty": 1.0, "seed": 3}]
    kinds = [*({"seed": seed, "top_p": 0.9} for seed in range(3)), *others]
    params = [SamplingParams(max_tokens=6, ignore_eos=True, **kind) for kind in kinds]
    llm.generate([{"prompt_token_ids": [1, 2, 3]}] * 5, params)
    assert calls == [4] * 6  # all but the greedy one


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("key_heads", 3, "4 attention heads cannot share 3"),
        ("width", 17, "head_dim must be one of"),
    ],
)
def test_sizes_that_its_code_has_no_room_for(field: str, value: int, message: str) -> None:
    """Also those of packed files, whose configuration may be another one than when it was made."""
    weights = LlamaWeights(tiny_model())
    setattr(weights, field, value)
    with pytest.raises(ModelError, match=message):
        NativeDecoder(weights)
