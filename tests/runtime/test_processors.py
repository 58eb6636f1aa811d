"""The native kernels on other processors: `tests/native/passes.cpp`, compiled and emulated."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tokenleap.runtime.native import build

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).parents[1] / "native" / "passes.cpp"
KERNELS = Path(build.__file__).parent
FLAGS = ["-std=c++17", "-O2", "-ffp-contract=off", "-fno-strict-aliasing", "-fopenmp"]
CROSS, EMULATOR = "aarch64-linux-gnu-g++", ("qemu-aarch64", "qemu-aarch64-static")
HOW = "apt install g++-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user"


def made(compiler: str, folder: Path, *flags: str) -> Path:
    """The compiled program."""
    path = folder / f"passes{len(list(folder.iterdir()))}"
    command = [compiler, *FLAGS, *flags, f"-I{KERNELS}", str(PROGRAM), "-o", str(path)]
    subprocess.run(command, check=True, timeout=1200)
    return path


def sums(*command: str) -> list[str]:
    """A line for each decoder; fails if a token's bits depend on its pass."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) == 70
    return done.stdout.splitlines()


def compiler() -> str:
    """The compiler of the native runtime, if there is one."""
    found = shutil.which("g++")
    if found is None:
        pytest.skip("there is no g++")
    return found


def processor_flags() -> set[str]:
    """What Linux says that an x86-64 processor has."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return {flag for line in lines if line.startswith("flags") for flag in line.split()}


def test_this_processor(tmp_path: Path) -> None:
    sums(str(made(compiler(), tmp_path, "-march=native")))


def test_avx2_has_the_bits_of_the_portable_code(tmp_path: Path) -> None:
    if not {"avx2", "fma", "f16c"} <= processor_flags():
        pytest.skip("this processor has no AVX2")
    flags = ("-march=x86-64", "-mavx2", "-mfma", "-mf16c")
    found, portable = (
        sums(str(made(compiler(), tmp_path, *flags, *more)))
        for more in ((), ("-DTOKENLEAP_PORTABLE",))
    )
    assert found == portable


@pytest.mark.parametrize("variant", build.variants("aarch64"), ids=lambda variant: variant.name)
def test_aarch64_has_the_bits_of_the_portable_code(variant: build.Variant, tmp_path: Path) -> None:
    emulator = next(filter(None, map(shutil.which, EMULATOR)), None)
    if shutil.which(CROSS) is None or emulator is None:
        pytest.skip(f"there is no cross-compiler or no emulator: {HOW}")
    portable = made(compiler(), tmp_path, "-march=native", "-DTOKENLEAP_PORTABLE")
    other = made(CROSS, tmp_path, "-static", *variant.flags)
    assert sums(emulator, str(other)) == sums(str(portable))
