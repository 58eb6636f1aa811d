"""Whether the files of a model are still the same. The cache's names and entries tell by it."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from pathlib import Path

from tokenleap.errors import ModelError

__all__ = ["identity_of"]


def identity_of(files: Collection[Path]) -> str:
    """Text that differs when one of the files has changed.

    Size and modification time stand for the content: hashing gigabytes at each start is too slow.

    Raises:
        ModelError: a file is missing.
    """
    try:
        states = [(str(file.resolve()), file.stat()) for file in files]
    except OSError as error:
        raise ModelError(f"cannot read {error.filename}: {error.strerror}") from error
    key = "\0".join(f"{path}\0{at.st_size}\0{at.st_mtime_ns}" for path, at in states)
    return hashlib.sha256(key.encode()).hexdigest()[:32]
