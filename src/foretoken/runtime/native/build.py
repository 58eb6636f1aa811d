"""Compiles the C++ sources for this processor, once, and loads them.

The library is kept in the cache folder under a name made of everything that went into it, so that
another processor or compiler, or a newer source, gets a library of its own. Where there is no
compiler nothing is lost but speed: the caller runs PyTorch's operations instead.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from filelock import FileLock

from foretoken.models.store import cache_dir

__all__ = ["NativeLibraryError", "library"]

_SOURCES = Path(__file__).parent
_FLAGS = (
    "-std=c++17",
    "-O3",
    "-march=native",
    "-mprefer-vector-width=512",
    "-ffp-contract=off",  # the same rounding wherever an expression is inlined (law 7)
    "-fopenmp",  # PyTorch has loaded its library already, so that both share the threads
    "-fPIC",
    "-shared",
)
_TIMEOUT = 300.0


class NativeLibraryError(Exception):
    """The library cannot be had here; the message says why."""


@cache
def library(*flags: str) -> ctypes.CDLL:
    """The compiled library.

    Args:
        *flags: given to the compiler beside the usual ones.

    Raises:
        NativeLibraryError: no compiler, or it failed.
    """
    if platform.machine() not in ("x86_64", "AMD64", "aarch64", "arm64"):
        raise NativeLibraryError(f"not written for processors of type {platform.machine()}")
    compiler = _compiler()
    folder = cache_dir() / "native"
    path = folder / f"{_key(compiler, flags)}.so"
    try:
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            with FileLock(folder / ".lock"):
                if not path.exists():
                    _compile(compiler, flags, path)
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeLibraryError(str(error)) from error


def _compiler() -> str:
    for name in (os.environ.get("CXX"), "g++", "clang++"):
        if name and (found := shutil.which(name)):
            return found
    raise NativeLibraryError("there is no C++ compiler (g++ or clang++) to compile it with")


def _key(compiler: str, flags: tuple[str, ...]) -> str:
    parts = [*_FLAGS, *flags, _run([compiler, "--version"]), _processor()]
    parts += [file.read_text() for file in sorted(_SOURCES.iterdir()) if file.suffix in _SUFFIXES]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


_SUFFIXES = (".cpp", ".h")


def _processor() -> str:
    """What `-march=native` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


def _compile(compiler: str, flags: tuple[str, ...], path: Path) -> None:
    """Into a file aside, which then takes its name: whoever sees it sees all of it."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        _run([compiler, *_FLAGS, *flags, str(_SOURCES / "decoder.cpp"), "-o", str(made)])
        made.replace(path)


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT, check=False
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise NativeLibraryError(f"{command[0]} cannot be run: {error}") from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line]
        reason = lines[0] if lines else f"status {done.returncode}"
        raise NativeLibraryError(f"{command[0]} failed: {reason}")
    return done.stdout
