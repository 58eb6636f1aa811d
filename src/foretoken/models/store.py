"""The cache of converted models. Each has a folder, built elsewhere and then renamed into place.

    <cache>/models/<name>/             a Hugging Face folder and its manifest, foretoken.json
    <cache>/models/.building-<random>/ a folder that the process with the lock is building
    <cache>/.lock                      held while the cache is changed

A folder without a leading dot is complete, because one rename puts it there. Reading therefore
needs no lock. The process that holds the lock may delete every other building folder: only a dead
process can have left it. `resolver` and `foretoken models` call this module.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from filelock import FileLock, Timeout

from foretoken.errors import ModelError
from foretoken.models.disk import check_space, disk_errors
from foretoken.models.progress import say

__all__ = ["CachedModel", "build", "cache_dir", "cached", "find", "remove"]

# Increased when conversion changes what it writes; older folders are then rebuilt.
FORMAT_VERSION = 1

_MANIFEST = "foretoken.json"
_BUILDING = ".building-"


@dataclass(frozen=True, slots=True)
class CachedModel:
    """One converted model in the cache.

    Attributes:
        name: An alias, or the name given to a converted GGUF file.
        folder: The Hugging Face folder.
        size_bytes: Size of the folder's files in bytes.
        source: Where the model came from: a package requirement or the path of a GGUF file.
    """

    name: str
    folder: Path
    size_bytes: int
    source: str


@dataclass(frozen=True, slots=True)
class _Manifest:
    """The content of `foretoken.json`: source, format version, and files."""

    source: str
    format_version: int = FORMAT_VERSION
    notes: dict[str, str] = field(default_factory=dict)
    files: dict[str, int] = field(default_factory=dict)  # sizes in bytes by name

    @classmethod
    def read(cls, folder: Path) -> _Manifest | None:
        """A folder's manifest, or None if it is missing or unreadable."""
        try:
            content = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
            return cls(**content)
        except (OSError, ValueError, TypeError):
            return None

    def describes(self, folder: Path) -> bool:
        """Whether a folder still has all its files, in their original sizes."""
        try:
            return all((folder / name).stat().st_size == size for name, size in self.files.items())
        except OSError:
            return False


def cache_dir() -> Path:
    """The folder of the cache: `$FORETOKEN_CACHE`, or `~/.cache/foretoken` without it."""
    configured = os.environ.get("FORETOKEN_CACHE")
    return Path(configured).expanduser() if configured else Path.home() / ".cache" / "foretoken"


def find(name: str) -> Path | None:
    """The folder of a converted model, or None if it is not cached, damaged or of an old format.

    It compares the sizes of the files with the manifest. It hashes nothing.
    """
    folder = _models_dir() / name
    manifest = _Manifest.read(folder)
    if manifest is None or manifest.format_version != FORMAT_VERSION:
        return None
    return folder if manifest.describes(folder) else None


def cached() -> list[CachedModel]:
    """Every converted model in the cache, in alphabetical order of names."""
    models = []
    for folder in sorted(_models_dir().glob("[!.]*")):
        manifest = _Manifest.read(folder)
        if manifest is not None:
            size = sum(manifest.files.values())
            models.append(CachedModel(folder.name, folder, size, manifest.source))
    return models


def remove(name: str) -> CachedModel:
    """Delete one converted model from the cache.

    Args:
        name: Its name, as listed by `cached`.

    Returns:
        What was deleted.

    Raises:
        ModelError: If there is no such model in the cache, or it cannot be deleted.
    """
    with _locked():
        models = {model.name: model for model in cached()}
        if name not in models:
            known = ", ".join(models) or "nothing"
            raise ModelError(f"no cached model {name!r}: {cache_dir()} holds {known}")
        with disk_errors(cache_dir()):
            _discard(models[name].folder)
        return models[name]


def build(
    name: str, source: str, needed_bytes: int, fill: Callable[[Path, Path], dict[str, str]]
) -> Path:
    """Build a converted model, unless another process does so in the meantime.

    Args:
        name: The folder's name in the cache.
        source: Where the model comes from, for the listing.
        needed_bytes: Free space in bytes that building needs at its peak.
        fill: Called with a scratch folder, deleted afterwards, and the folder to fill. Returns
            notes for the manifest.

    Returns:
        The finished folder.

    Raises:
        ModelError: If the cache cannot be written, the disk is full, or `fill` raises it.
    """
    with _locked():
        # Another process may have finished it while this one waited for the lock.
        if (folder := find(name)) is not None:
            return folder
        folder = _models_dir() / name
        with disk_errors(cache_dir(), needed_bytes), _building() as building:
            check_space(building, needed_bytes)
            scratch, product = building / "scratch", building / "product"
            scratch.mkdir()
            product.mkdir()
            notes = fill(scratch, product)
            _seal(product, source, notes)
            if folder.exists():  # damaged, or written by another version
                _discard(folder)
            product.rename(folder)
        return folder


def _models_dir() -> Path:
    return cache_dir() / "models"


@contextmanager
def _locked() -> Iterator[None]:
    """Hold the cache's lock; print a line if another process has it."""
    with disk_errors(cache_dir()):
        _models_dir().mkdir(parents=True, exist_ok=True)
        lock = FileLock(cache_dir() / ".lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            say("Waiting for another process that is preparing a model ...")
            lock.acquire()
    try:
        for leftover in _models_dir().glob(f"{_BUILDING}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        yield
    finally:
        lock.release()


@contextmanager
def _building() -> Iterator[Path]:
    """A temporary folder beside the finished ones, so that a rename can move between them."""
    building = Path(tempfile.mkdtemp(prefix=_BUILDING, dir=_models_dir()))
    try:
        yield building
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _discard(folder: Path) -> None:
    """Delete a finished folder. It is renamed first, so that half of one never looks complete."""
    with _building() as doomed:
        folder.rename(doomed / folder.name)


def _seal(folder: Path, source: str, notes: dict[str, str]) -> None:
    """Write the manifest, and flush all files of the folder to disk."""
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    manifest = folder / _MANIFEST
    content = asdict(_Manifest(source=source, notes=notes, files=files))
    manifest.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    for path in folder.iterdir():
        # safetensors makes its files readable by their owner only; use the manifest's permissions.
        path.chmod(manifest.stat().st_mode)
        with path.open("rb") as file:
            os.fsync(file.fileno())
