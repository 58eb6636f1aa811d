"""Compiles the C++ code for this processor at its first use, and loads the library.

The library is stored in the cache folder or, if that cannot be written, in a temporary one. Its
name is a hash of sources, flags, compiler and processor, so that a change of any of them makes a
new library. Without a compiler, `choose.py` takes PyTorch's operations, which are slower.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from filelock import FileLock

from foretoken.models.disk import CacheError, disk_errors
from foretoken.models.store import cache_dir

__all__ = ["NativeLibraryError", "compiler_version", "library"]

_log = logging.getLogger(__name__)

_SOURCES = Path(__file__).parent
_FLAGS = (
    "-std=c++17",
    "-O3",
    "-march=native",
    *(("-mprefer-vector-width=512",) if platform.machine() in ("x86_64", "AMD64") else ()),
    "-ffp-contract=off",  # so that inlining does not change the rounding (invariant 7)
    "-fno-strict-aliasing",  # several small numbers are read as one word
    "-fopenmp",  # of g++, which PyTorch has loaded already: both share its threads
    "-fPIC",
    "-shared",
)
_INSTALL = "for example with `apt install g++` or `dnf install gcc-c++`"
_SUFFIXES = (".cpp", ".h")
_TIMEOUT = 300.0
_SIZE = 5_000_000
"""More bytes than the library and the compiler's own files take."""


class NativeLibraryError(Exception):
    """The library is not available on this machine; the message says why."""


def library(*flags: str) -> ctypes.CDLL:
    """The compiled library.

    Args:
        *flags: further flags for the compiler.

    Raises:
        NativeLibraryError: it cannot be compiled or loaded.
    """
    made = _library(*flags)
    if isinstance(made, NativeLibraryError):
        raise made
    return made


def compiler_version() -> str:
    """The first line that the compiler says about itself.

    Raises:
        NativeLibraryError: there is no compiler, or it cannot be run.
    """
    return _run([_compiler(), "--version"]).partition("\n")[0]


@cache
def _library(*flags: str) -> ctypes.CDLL | NativeLibraryError:
    """The library, or why there is none. After a failure, the compiler is not called again."""
    if os.name != "posix" or platform.machine() not in ("x86_64", "aarch64", "arm64"):
        return NativeLibraryError(
            f"it does not support {platform.system()} on {platform.machine()}"
        )
    try:
        return _load(_compiled(_compiler(), flags))
    except NativeLibraryError as error:
        return error
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home folder
        return NativeLibraryError(str(error))


def _load(path: Path) -> ctypes.CDLL:
    """Load a library that only this user can have written, because its code will run."""
    for place in (path.parent, path):
        state = place.stat()
        if state.st_uid != os.getuid() or state.st_mode & 0o022:
            raise NativeLibraryError(
                f"other users may write to {place}: remove it, or run chmod go-w on it"
            )
    return ctypes.CDLL(str(path))


def _compiled(compiler: str, flags: tuple[str, ...]) -> Path:
    """The library in the cache, or in a temporary folder if the cache cannot be written."""
    name = f"{_key(compiler, flags)}.so"
    try:
        with disk_errors(cache_dir(), _SIZE):
            return _made(cache_dir() / "native" / name, compiler, flags)
    except CacheError as error:
        # The same one for all processes of this user, so that each need not compile. `_load` makes
        # sure that it belongs to this user.
        folder = Path(tempfile.gettempdir()) / f"foretoken-{os.getuid()}"
        _log.warning("%s. Until then, the native runtime is compiled in %s.", error, folder)
        return _made(folder / name, compiler, flags)


def _made(path: Path, compiler: str, flags: tuple[str, ...]) -> Path:
    """The library at this place, compiled now if it is not there."""
    folder = path.parent
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with FileLock(folder / ".lock"):
            if not path.exists():
                _compile(compiler, flags, path)
    return path


def _compiler() -> str:
    for name in (os.environ.get("CXX"), "g++", "clang++"):
        if name and (found := shutil.which(name)):
            return found
    raise NativeLibraryError(f"there is no C++ compiler; install g++, {_INSTALL}")


def _key(compiler: str, flags: tuple[str, ...]) -> str:
    parts = [*_FLAGS, *flags, _run([compiler, "--version"]), _processor()]
    parts += [file.read_text() for file in sorted(_SOURCES.iterdir()) if file.suffix in _SUFFIXES]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def _processor() -> str:
    """The properties of the processor that `-march=native` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


def _compile(compiler: str, flags: tuple[str, ...], path: Path) -> None:
    """Compile to a temporary file and rename it, so that no process loads an incomplete one."""
    _log.info("compiling the native runtime with %s; this takes half a minute", compiler)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        _run([compiler, *_FLAGS, *flags, str(_SOURCES / "decoder.cpp"), "-o", str(made)])
        made.chmod(0o700)
        made.replace(path)


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT, check=False
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise NativeLibraryError(f"{command[0]} cannot be run: {error}") from error
    if done.returncode:
        _log.debug("%s", done.stderr)
        lines = [line for line in done.stderr.splitlines() if "error" in line]
        reason = lines[0] if lines else f"status {done.returncode}"
        raise NativeLibraryError(f"{command[0]} failed: {reason}")
    return done.stdout
