"""The cache of models: converted ones, and packed weights.

Each has a folder, which is built elsewhere and then renamed into place:

    <cache>/models/<name>/                      the files, and their manifest, manifest.json
    <cache>/models/.building-<name>-<random>/   a folder that is being built, or deleted
    <cache>/locks/<name>.lock                   held while the folder <name> is built or deleted

A folder without a leading dot is complete, because one rename puts it there. Reading therefore
needs no lock. The holder of a name's lock may delete the building folders of that name: only a dead
process can have left them. Files are read-only, and the manifest has their checksums. A file is
compared with its checksum if its size, modification time or inode are not those in `.verified`, of
when it was compared before: hashing gigabytes at each start is too slow. `resolver`,
`runtime/packed.py` and `tokenleap models` call this module.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import shutil
import sys
import tempfile
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import ClassVar

from filelock import FileLock, Timeout
from pydantic import ConfigDict, StrictInt

from tokenleap.core.files import FIRST_NAME, read_json, validated, write_whole
from tokenleap.errors import ModelError

_log = logging.getLogger(__name__)

# Increased when conversion changes what it writes; older folders are then rebuilt.
FORMAT_VERSION = 1

_MANIFEST = "manifest.json"
_VERIFIED = ".verified"
_BUILDING = ".building-"
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Kind:
    """The kind of a cache folder, and what makes it out of date."""

    name: str = "model"  # "model" for a Hugging Face folder, "packed" for packed weights
    version: int = FORMAT_VERSION
    identity: str = ""  # of the files that it was made from; empty if the folder's name tells


MODEL = Kind()


@dataclass(frozen=True, slots=True)
class CachedModel:
    """One model in the cache."""

    name: str  # an alias, or the name given to a converted file or to packed weights
    folder: Path
    size_bytes: int
    source: str  # a requirement, a GGUF file, or the folder that was packed
    kind: str = MODEL.name
    runs: str | None = None


DAMAGED = "damaged"
"""The kind of a model whose manifest cannot be read."""


@dataclass(frozen=True, slots=True)
class _Manifest:
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    source: str
    format_version: int = FORMAT_VERSION
    kind: str = MODEL.name
    identity: str = ""
    notes: dict[str, str] = field(default_factory=dict)
    files: dict[str, StrictInt] = field(default_factory=dict)  # sizes in bytes by name
    sums: dict[str, StrictInt] = field(default_factory=dict)  # CRC-32 by name; none if older

    @classmethod
    def read(cls, folder: Path) -> _Manifest | None:
        try:
            return validated(cls, read_json(folder / _MANIFEST))
        except (OSError, ValueError):
            return None

    @property
    def made_as(self) -> Kind:
        return Kind(self.kind, self.format_version, self.identity)

    def damaged(self, folder: Path, *, anew: bool = False) -> list[str]:
        """The files that are not what they were; all compared with their checksums if `anew`."""
        known = {} if anew else _verified(folder)
        states = {name: _state(folder / name) for name in self.files}
        wrong = [name for name, size in self.files.items() if states[name][:1] != [size]]
        new = [name for name in self.sums if known.get(name) != states.get(name)]
        if wrong or not new:
            return wrong
        try:
            found = _sums_of(folder / name for name in new)
        except OSError:  # the disk itself says so
            return new
        wrong = [name for name, each in zip(new, found, strict=True) if each != self.sums[name]]
        with suppress(OSError):  # a cache that cannot be written is compared every time
            _note_verified(folder, {name: states[name] for name in states if name not in wrong})
        return wrong


def _state(path: Path) -> list[int]:
    """Size, modification time and inode of a file; empty if there is none."""
    try:
        at = path.stat()
    except OSError:
        return []
    return [at.st_size, at.st_mtime_ns, at.st_ino]


def _sums_of(paths: Iterable[Path]) -> list[int]:
    """The CRC-32 of each file; 1.8 GB/s on one core, which SHA-256 and BLAKE2 do not reach."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(_sum_of, paths))


def _sum_of(path: Path) -> int:
    total, chunk = 0, memoryview(bytearray(_CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(chunk):
            total = zlib.crc32(chunk[:size], total)
    return total


def _verified(folder: Path) -> dict[str, list[int]]:
    """The states of a folder's files when they were compared with their checksums."""
    try:
        found = read_json(folder / _VERIFIED)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _note_verified(folder: Path, states: dict[str, list[int]]) -> None:
    text = json.dumps(states)
    write_whole(folder / _VERIFIED, lambda to: to.write_text(text, encoding="utf-8"))


def cache_dir() -> Path:
    """The folder of the cache: `$TOKENLEAP_CACHE`, or `~/.cache/tokenleap` without it.

    One with the project's first name is moved there, if there is none yet.
    """
    configured = os.environ.get("TOKENLEAP_CACHE")
    if configured:
        return Path(configured).expanduser()
    folder = Path.home() / ".cache" / "tokenleap"
    if not folder.exists():
        _take_over(folder.with_name(FIRST_NAME), folder)
    return folder


def _take_over(old: Path, folder: Path) -> None:
    """Move a cache; what was packed from its own models, by their paths, is packed again."""
    with suppress(OSError):  # moved by another process, or immovable: a new one is made
        for manifest in old.glob(f"models/*/{FIRST_NAME}.json"):
            if f'"{old}{os.sep}' in manifest.read_text(encoding="utf-8"):
                shutil.rmtree(manifest.parent)
            else:
                manifest.rename(manifest.with_name(_MANIFEST))
        old.rename(folder)


def key_of(text: str) -> str:
    """A short name for a path, so that equal names in two folders do not meet in the cache."""
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def find(name: str, kind: Kind = MODEL) -> Path | None:
    """A model's folder, or None if it is not cached, damaged or not of this kind.

    Sizes are compared with the manifest, and files that have changed with their checksums.
    """
    folder = _models_dir() / name
    manifest = _Manifest.read(folder)
    if manifest is None or manifest.made_as != kind:
        return None
    return None if manifest.damaged(folder) else folder


def check(name: str) -> list[str] | None:
    """The files of a cached model that do not have their checksums; the model is made again.

    None if an older version made it without checksums, and all sizes are right.
    """
    folder = _known(name).folder
    manifest = _Manifest.read(folder)
    damaged = [_MANIFEST] if manifest is None else manifest.damaged(folder, anew=True)
    return damaged if damaged or (manifest and manifest.sums) else None


def cached() -> list[CachedModel]:
    models = []
    for folder in sorted(_models_dir().glob("[!.]*")):
        manifest = _Manifest.read(folder)
        if manifest is not None:
            size = sum(manifest.files.values())
            runs = manifest.notes.get("runs")
            found = CachedModel(folder.name, folder, size, manifest.source, manifest.kind, runs)
            models.append(found)
        elif folder.is_dir():
            size = sum(each.stat().st_size for each in folder.iterdir() if each.is_file())
            models.append(CachedModel(folder.name, folder, size, "unknown", DAMAGED))
    return models


def remove(name: str) -> CachedModel:
    """Delete one model from the cache. Processes that have mapped its files go on with them."""
    model = _known(name)
    with _locked(name), disk_errors(cache_dir()):
        _discard(model.folder)
    return model


def _known(name: str) -> CachedModel:
    models = {model.name: model for model in cached()}
    if name not in models:
        known = ", ".join(models) or "nothing"
        raise ModelError(f"no cached model {name!r}: {cache_dir()} holds {known}")
    return models[name]


def build(
    name: str,
    source: str,
    needed_bytes: int,
    fill: Callable[[Path, Path], dict[str, str]],
    kind: Kind = MODEL,
    replaces: str | None = None,
) -> Path:
    """Build a model's folder, unless another process does so in the meantime.

    `fill` gets a scratch folder, deleted afterwards, and the folder to fill; it returns notes.
    """
    with _locked(name):
        # Another process may have finished it while this one waited for the lock.
        if (folder := find(name, kind)) is not None:
            return folder
        folder = _models_dir() / name
        if (older := _Manifest.read(folder)) is not None and older.made_as == kind:
            _log.warning("%s is damaged, and is made again from %s", folder, source)
        with disk_errors(cache_dir(), needed_bytes), _building(name) as building:
            check_space(building, needed_bytes)
            product = fill_in(building, source, fill, kind)
            if folder.exists():  # damaged, or written by another version
                _discard(folder)
            product.rename(folder)
            if replaces is not None:
                _discard_older(folder, replaces)
        return folder


def fill_in(
    building: Path, source: str, fill: Callable[[Path, Path], dict[str, str]], kind: Kind
) -> Path:
    scratch, product = building / "scratch", building / "product"
    scratch.mkdir()
    product.mkdir()
    notes = fill(scratch, product)
    _seal(product, source, notes, kind)
    return product


def _models_dir() -> Path:
    return cache_dir() / "models"


@contextmanager
def _locked(name: str) -> Iterator[None]:
    """Hold the lock of a name; print a line if another process has it."""
    with disk_errors(cache_dir()):
        _models_dir().mkdir(parents=True, exist_ok=True)
        lock = _lock(name)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            say("Waiting for another process that is preparing this model ...")
            lock.acquire()
    try:
        _clean_up(name)
        yield
    finally:
        lock.release()


def _lock(name: str) -> FileLock:
    locks = cache_dir() / "locks"
    locks.mkdir(exist_ok=True)
    return FileLock(locks / f"{name}.lock")


def _clean_up(held: str) -> None:
    """Delete what dead processes have left: building folders whose name's lock is free."""
    for leftover in _models_dir().glob(f"{_BUILDING}*"):
        name, _, _ = leftover.name.removeprefix(_BUILDING).rpartition("-")
        if name == held:
            shutil.rmtree(leftover, ignore_errors=True)
            continue
        try:
            with _lock(name).acquire(timeout=0):
                shutil.rmtree(leftover, ignore_errors=True)
        except (Timeout, OSError):
            pass  # it is being built


@contextmanager
def _building(name: str) -> Iterator[Path]:
    """A temporary folder beside the finished ones, so that a rename can move between them."""
    building = Path(tempfile.mkdtemp(prefix=f"{_BUILDING}{name}-", dir=_models_dir()))
    try:
        yield building
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _discard(folder: Path) -> None:
    """Delete a finished folder. It is renamed first, so that half of one never looks complete."""
    with _building(folder.name) as doomed:
        folder.rename(doomed / folder.name)


def _discard_older(folder: Path, beginning: str) -> None:
    for older in _models_dir().glob(f"{beginning}*"):
        if older != folder:
            with suppress(FileNotFoundError):  # another process has deleted it
                _discard(older)


def _seal(folder: Path, source: str, notes: dict[str, str], kind: Kind) -> None:
    """Write the manifest, make all files read-only, and flush them to disk."""
    paths = {path.name: path for path in sorted(folder.iterdir())}
    sums = dict(zip(paths, _sums_of(paths.values()), strict=True))
    files = {name: path.stat().st_size for name, path in paths.items()}
    made = _Manifest(source, kind.version, kind.name, kind.identity, notes, files, sums)
    manifest = folder / _MANIFEST
    manifest.write_text(json.dumps(asdict(made), indent=2) + "\n", encoding="utf-8")
    # safetensors makes its files readable by their owner only; use the manifest's permissions.
    mode = manifest.stat().st_mode & ~0o222
    for path in folder.iterdir():
        path.chmod(mode)
        with path.open("rb") as file:
            os.fsync(file.fileno())
    _note_verified(folder, {name: _state(path) for name, path in paths.items()})


_FULL = {errno.ENOSPC, errno.EDQUOT}
# safetensors, tokenizers and pip report a full disk only in their messages.
_FULL_TEXTS = tuple(os.strerror(number) for number in _FULL)


class CacheError(ModelError):
    """The cache folder cannot be written, or its disk is full."""


class FullDiskError(CacheError):
    """Its disk is full."""


def tells_of_full_disk(message: str) -> bool:
    return any(text in message for text in _FULL_TEXTS)


def full_disk() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def check_space(folder: Path, needed_bytes: int) -> None:
    """Raise the error of a full disk before any work is done."""
    if _free_bytes(folder) < needed_bytes:
        raise full_disk()


@contextmanager
def disk_errors(folder: Path, needed_bytes: int = 0) -> Iterator[None]:
    """Turn errors of the operating system into a `CacheError` about the cache folder."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise FullDiskError(
                f"the disk is full: {folder} needs {bytes_text(needed_bytes)} free and has "
                f"{bytes_text(_free_bytes(folder))}; free some space or set TOKENLEAP_CACHE to a "
                f"folder on another disk"
            ) from error
        raise CacheError(
            f"cannot write the cache folder {folder}: {error.strerror or error}; make it a folder "
            f"you can write to, or set TOKENLEAP_CACHE to another one"
        ) from error


def _free_bytes(folder: Path) -> int:
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    return shutil.disk_usage(existing).free


def identity_of(files: Collection[Path]) -> str:
    """Text that differs when one of the files has changed.

    Size and modification time stand for the content: hashing gigabytes at each start is too slow.
    """
    try:
        states = [(str(file.resolve()), file.stat()) for file in files]
    except OSError as error:
        raise ModelError(f"cannot read {error.filename}: {error.strerror}") from error
    key = "\0".join(f"{path}\0{at.st_size}\0{at.st_mtime_ns}" for path, at in states)
    return hashlib.sha256(key.encode()).hexdigest()[:32]


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def bytes_text(count: int) -> str:
    """A number of bytes as people write it, in decimal units: `93 MB`."""
    amount = float(count)
    for unit in ("bytes", "kB", "MB", "GB"):
        if amount < 999.5:  # 999.5 and more would print as 1000
            return f"{amount:.3g} {unit}"
        amount /= 1000
    return f"{amount:.3g} TB"


@contextmanager
def progress(doing: str, usually: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    if not sys.stderr.isatty():
        say(f"{doing} ({bytes_text(total_bytes)}, usually {usually}) ...")
        yield lambda _done: None
        return
    # Importing Rich takes a tenth of a second, so it is imported only for a bar.
    from rich import progress as rich_progress
    from rich.console import Console

    with rich_progress.Progress(
        rich_progress.TextColumn("{task.description}"),
        rich_progress.BarColumn(),
        rich_progress.DownloadColumn(),
        rich_progress.TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as bar:
        task = bar.add_task(doing, total=total_bytes)
        yield lambda done: bar.update(task, completed=min(done, total_bytes))
