"""Loads the library of the C++ code: the wheel's best one for this processor, or compiles it.

A wheel has a library for each row of variants.json (CMakeLists.txt). A checkout has none, nor has
a wheel that was made without a compiler: then the code is compiled for this processor at its first
use. The result is stored in the cache folder or, if that cannot be written or others may write
there, in a temporary one. Its name is a hash of sources, flags, compiler and processor, so that a
change of any of them makes a new library. Without a compiler, `choose.py` takes PyTorch's
operations, which are slower.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from filelock import FileLock

from tokenleap.models.store import CacheError, cache_dir, disk_errors
from tokenleap.runtime.llama import DecoderSizes, LlamaWeights, family_of
from tokenleap.runtime.native.pack import GROUP, Format

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_log = logging.getLogger(__name__)

_SOURCES = Path(__file__).parent
_PREBUILT = _SOURCES / "lib"  # only in wheels, so these libraries are always of these sources
_TABLE = json.loads((_SOURCES / "variants.json").read_text(encoding="utf-8"))
_NO_ROWS: dict[str, Any] = {"flags": [], "variants": []}
_ALIASES = {"amd64": "x86_64", "arm64": "aarch64"}  # of Windows and macOS
_MACHINE = _ALIASES.get(platform.machine().lower(), platform.machine())
# Rounding must not depend on inlining (-ffp-contract, invariant 7), and several small numbers are
# read as one word (-fno-strict-aliasing).
_FLAGS = (
    *_TABLE["flags"],
    "-mcpu=native" if _MACHINE == "aarch64" else "-march=native",
    *_TABLE.get(_MACHINE, _NO_ROWS)["flags"],
    # Of the OpenMP that PyTorch has loaded already: both share its threads.
    *(
        ("-Xclang", "-fopenmp", "-undefined", "dynamic_lookup")
        if sys.platform == "darwin"
        else ("-fopenmp",)
    ),
    "-fPIC",
    "-shared",
)
_INSTALL = "for example with `apt install g++` or `dnf install gcc-c++`"
_SUFFIXES = (".cpp", ".h")
_TIMEOUT = 900.0
_SECONDS = 20  # that g++ 12 takes on a core of a Xeon
_SIZE = 5_000_000  # more bytes than the library and the compiler's own files take


class NativeLibraryError(Exception):
    """The library is not available on this machine; the message says why."""


@dataclass(frozen=True)
class Variant:
    """A library for all processors with certain features."""

    name: str
    flags: tuple[str, ...]
    """Those of the compiler that use the features."""
    needs: frozenset[str]
    """The features, as `torch.cpu.get_capabilities` names them."""

    def runs_on(self, features: Mapping[str, object]) -> bool:
        return all(features.get(name) is True for name in self.needs)


def variants(machine: str = _MACHINE) -> list[Variant]:
    """The libraries in a wheel for a kind of machine, best last: each adds to the one before it."""
    found = [Variant("", (), frozenset())]
    for row in _TABLE.get(machine, _NO_ROWS)["variants"]:
        flags, needs = (*found[-1].flags, *row["flags"]), found[-1].needs.union(row["needs"])
        found.append(Variant(row["name"], flags, needs))
    return found[1:]


def best_variant(features: Mapping[str, object], machine: str = _MACHINE) -> str | None:
    """The name of the best one that a processor runs; None if it runs none."""
    able = [variant.name for variant in variants(machine) if variant.runs_on(features)]
    return able[-1] if able else None


def library(*flags: str) -> ctypes.CDLL:
    """The library for this processor; with flags, one that is compiled with them, too."""
    made = _library(*flags)
    if isinstance(made, NativeLibraryError):
        raise made
    return made


def library_origin() -> str:
    """Where `library()` comes from: the wheel, or a compiler here."""
    path = Path(library()._name)
    if path.parent == _PREBUILT:
        return f"prebuilt for {path.stem}"
    version, _, _ = _run([_compiler(), "--version"]).partition("\n")
    return f"compiled here by {version}"


@cache
def _library(*flags: str) -> ctypes.CDLL | NativeLibraryError:
    """The library, or why there is none. After a failure, the compiler is not called again."""
    if not flags and (prebuilt := _prebuilt()) is not None:
        return prebuilt
    if os.name != "posix" or _MACHINE not in _TABLE:
        return NativeLibraryError(
            f"it does not support {platform.system()} on {platform.machine()}"
        )
    try:
        return _loaded_somewhere(_compiler(), flags)
    except NativeLibraryError as error:
        return error
    except (CacheError, OSError, RuntimeError) as error:  # RuntimeError: there is no home folder
        return NativeLibraryError(str(error))


def _prebuilt() -> ctypes.CDLL | None:
    """The wheel's library for this processor, if it has one."""
    name = best_variant(torch.cpu.get_capabilities())
    path = next((path for path in _PREBUILT.glob("*") if path.stem == name), None)
    if path is None:
        return None
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        _log.warning("cannot load %s: %s; the native runtime is compiled here.", path, error)
        return None


def _loaded_somewhere(compiler: str, flags: tuple[str, ...]) -> ctypes.CDLL:
    name, temporary = f"{_key(compiler, flags)}.so", Path(tempfile.gettempdir())
    # The same one for all processes of this user, so that each need not compile.
    own = f"tokenleap-{os.geteuid()}"
    try:
        with disk_errors(cache_dir(), _SIZE):
            return _loaded(_own_folder(cache_dir(), "native"), name, compiler, flags)
    except CacheError as error:
        where = temporary / own
        _log.warning("%s. Until then, the native runtime is compiled in %s.", error, where)
    try:
        return _loaded(_own_folder(temporary, own), name, compiler, flags)
    except CacheError:  # another user was there first
        with tempfile.TemporaryDirectory(prefix="tokenleap-") as fresh:
            return _loaded(Path(fresh).resolve(), name, compiler, flags)


def _loaded(folder: Path, name: str, compiler: str, flags: tuple[str, ...]) -> ctypes.CDLL:
    """The library of this name in a folder, compiled now if it is not there."""
    path = folder / name
    if not path.exists():
        with FileLock(folder / ".lock"):
            if not path.exists():
                _compile(compiler, flags, path)
    # It stays open: another library that got its number would be taken for this one.
    opened = _opened(path, os.O_RDONLY | os.O_NONBLOCK)
    link = Path(f"/proc/self/fd/{opened}")  # what was checked; elsewhere, by its checked path
    try:
        return ctypes.CDLL(str(link if link.exists() else path))
    except OSError as error:
        raise CacheError(
            f"cannot load {path}: {error}; delete it, or set TOKENLEAP_CACHE to another folder"
        ) from error


def _own_folder(base: Path, name: str) -> Path:
    """A folder that only this user and root can change, made now if it is not there."""
    base.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder = base.resolve() / name
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    os.close(_opened(folder))
    return folder


def _opened(path: Path, flags: int | None = None) -> int:
    """Open what only this user and root can change, because its code will run.

    Every part of the path is opened in the folder before it, after a check of that folder's owner
    and permissions. No link is followed.
    """
    parts = [*reversed(path.parents), path]
    folder = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY  # O_PATH: it may be unreadable
    opened = os.open(parts[0], folder)
    try:
        for part in parts[1:]:
            _check_owner(part.parent, os.fstat(opened), may_be_sticky=True)
            kind = folder if flags is None or part != path else flags
            try:
                inner = os.open(part.name, kind | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=opened)
            except OSError as error:
                if part.is_symlink():
                    raise _unsafe(part, "is a link") from error
                raise
            os.close(opened)
            opened = inner
        _check_owner(path, os.fstat(opened), may_be_sticky=False)
    except BaseException:
        os.close(opened)
        raise
    return opened


def _check_owner(path: Path, state: os.stat_result, *, may_be_sticky: bool) -> None:
    """Refuse what others than this user and root can change.

    In a sticky folder such as /tmp, others can replace only what is theirs.
    """
    # The owner of "/" is root: in a container, root may have another number.
    if state.st_uid not in (0, os.geteuid(), Path("/").stat().st_uid):
        raise _unsafe(path, "belongs to another user")
    others = stat.S_IWOTH if _is_own_group(state.st_gid) else stat.S_IWOTH | stat.S_IWGRP
    sticky = may_be_sticky and state.st_mode & stat.S_ISVTX
    if state.st_mode & others and not sticky:
        raise _unsafe(path, "is writable for other users")


def _is_own_group(group: int) -> bool:
    """Whether a group is root's, or has this user alone, as many systems make one for each user."""
    import grp  # these are not on Windows, where this module says that it has no library
    import pwd

    if group == 0:
        return True
    try:
        found, user = grp.getgrgid(group), pwd.getpwuid(os.geteuid())
    except KeyError:
        return False
    own = user.pw_gid == group and user.pw_name == found.gr_name
    return own and set(found.gr_mem) <= {user.pw_name}


def _unsafe(path: Path, why: str) -> CacheError:
    return CacheError(
        f"no code is loaded from {path}, which {why}: make it yours alone (chown, chmod go-w), "
        "or set TOKENLEAP_CACHE to a folder of your own"
    )


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
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


def _compile(compiler: str, flags: tuple[str, ...], path: Path) -> None:
    """Compile to a temporary file and rename it, so that no process loads an incomplete one."""
    _log.info("compiling the native runtime, about %d s, once (%s)", _SECONDS, compiler)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        command = [compiler, *_FLAGS, *flags, str(_SOURCES / "decoder.cpp"), "-o", str(made)]
        _run(command, TMPDIR=folder)  # what the compiler writes on the way is as safe as the rest
        made.chmod(0o500)
        made.replace(path)


def _run(command: list[str], **environment: str) -> str:
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT,
            check=False,
            env={**os.environ, **environment},
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise NativeLibraryError(f"{command[0]} cannot be run: {error}") from error
    if done.returncode:
        _log.debug("%s", done.stderr)
        lines = [line for line in done.stderr.splitlines() if "error" in line]
        reason = lines[0] if lines else f"status {done.returncode}"
        raise NativeLibraryError(f"{command[0]} failed: {reason}")
    return done.stdout


_PLACES = ("cpu", "meta")
_WIDTHS = (32, 64, 96, 128, 256)
MOST_HIDDEN_SIZE = 16384
"""`MOST_HIDDEN_SIZE` in rows.h: functions of `Run` have room for this many numbers."""

FORMATS = {torch.float32: Format.FLOAT32, torch.bfloat16: Format.BFLOAT16}


def why_not_native(model: PreTrainedModel) -> str | None:
    """Why the C++ code cannot run the model, on any machine; None if it can."""
    if family_of(model) is None:
        return f"it does not support {type(model).__name__}, or not with this configuration"
    if (reason := wrong_place(model, _PLACES)) is not None:
        return reason
    weights = LlamaWeights(model)
    if (reason := wrong_sizes(weights)) is not None:
        return reason
    if any(parameter.device.type not in _PLACES for parameter in model.parameters()):
        return "some of the model's weights are not in CPU memory"
    embeddings, outputs = len(weights.embedding), len(weights.head.weight)
    if embeddings < outputs:
        return f"the model has {outputs} output tokens and only {embeddings} embeddings"
    return None


def wrong_place(model: PreTrainedModel, places: Collection[str]) -> str | None:
    """Why the C++ code has no kernels for a model's dtype, or where it is; None if it has."""
    if model.device.type in places and model.dtype in FORMATS:
        return None
    return (
        f"it supports only float32 and bfloat16 on CPUs, not {model.dtype} on {model.device.type}"
    )


def why_no_library() -> str | None:
    """Why the C++ code is not available on this machine; None if it is. Compiles it if needed."""
    try:
        library()
    except NativeLibraryError as error:
        return str(error)
    return None


def wrong_sizes(sizes: DecoderSizes) -> str | None:
    """Which of the sizes the kernels do not support."""
    if sizes.heads % sizes.key_heads:
        return f"{sizes.heads} attention heads cannot share {sizes.key_heads} key-value heads"
    return wrong_shape(sizes.width, sizes.hidden_size, sizes.inner_size)


def wrong_shape(width: int, hidden_size: int, inner_size: int) -> str | None:
    """The same of a head's width, of the residual stream, and of what an MLP computes within."""
    sizes = (hidden_size, inner_size)
    if width not in _WIDTHS:
        return f"head_dim must be one of {', '.join(map(str, _WIDTHS))}, and is {width}"
    if any(size % GROUP for size in sizes):
        return f"hidden_size and intermediate_size must be multiples of {GROUP}, and are {sizes}"
    if hidden_size > MOST_HIDDEN_SIZE:
        return f"hidden_size must be at most {MOST_HIDDEN_SIZE}, and is {hidden_size}"
    return None
