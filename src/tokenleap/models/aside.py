"""Models that are built in a temporary folder, because the cache cannot be written.

The folder stays until the process ends. `resolver` and `runtime/packed.py` build GGUF files with
it, which have nothing else to run from.
"""

from __future__ import annotations

import atexit
import logging
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from threading import Lock

from tokenleap.models import store
from tokenleap.models.disk import CacheError, FullDiskError, check_space, disk_errors

__all__ = ["build"]

_log = logging.getLogger(__name__)

_built: dict[tuple[str, store.Kind], Path] = {}
_locks: dict[tuple[str, store.Kind], Lock] = {}  # so that no two threads build the same


def build(
    name: str,
    source: str,
    needed_bytes: int,
    fill: Callable[[Path, Path], dict[str, str]],
    kind: store.Kind = store.MODEL,
    replaces: str | None = None,
) -> Path:
    """Build a folder in the cache or, if the cache cannot be written, in a temporary place.

    Arguments are those of `store.build`.

    Raises:
        CacheError: There is no room.
        ModelError: If `fill` raises it.
    """
    try:
        return store.build(name, source, needed_bytes, fill, kind, replaces)
    except FullDiskError:
        raise
    except CacheError as error:
        with _locks.setdefault((name, kind), Lock()):
            if (name, kind) not in _built:
                _log.warning("%s. Until then, %s is prepared at every start.", error, source)
                _built[name, kind] = _build(source, needed_bytes, fill, kind)
            return _built[name, kind]


def _build(
    source: str,
    needed_bytes: int,
    fill: Callable[[Path, Path], dict[str, str]],
    kind: store.Kind,
) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="tokenleap-"))
    try:
        with disk_errors(folder, needed_bytes):
            check_space(folder, needed_bytes)
            made = store.fill_in(folder, source, fill, kind)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return made
