"""Errors of the cache's disk: it is full, or cannot be written. `store` and `fetch` use them."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tokenleap.errors import ModelError
from tokenleap.models.progress import bytes_text

__all__ = [
    "CacheError",
    "FullDiskError",
    "check_space",
    "disk_errors",
    "full_disk",
    "tells_of_full_disk",
]

_FULL = {errno.ENOSPC, errno.EDQUOT}
# safetensors, tokenizers and pip report a full disk only in their messages.
_FULL_TEXTS = tuple(os.strerror(number) for number in _FULL)


class CacheError(ModelError):
    """The cache folder cannot be written, or its disk is full."""


class FullDiskError(CacheError):
    """Its disk is full."""


def tells_of_full_disk(message: str) -> bool:
    """Whether the message of an error says that the disk is full."""
    return any(text in message for text in _FULL_TEXTS)


def full_disk() -> OSError:
    """The operating system's own error for a full disk."""
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def check_space(folder: Path, needed_bytes: int) -> None:
    """Raise the error of a full disk before any work is done.

    Raises:
        OSError: If less than `needed_bytes` are free where `folder` is.
    """
    if _free_bytes(folder) < needed_bytes:
        raise full_disk()


@contextmanager
def disk_errors(folder: Path, needed_bytes: int = 0) -> Iterator[None]:
    """Turn errors of the operating system into a `CacheError` about the cache folder.

    Args:
        folder: The cache folder.
        needed_bytes: Free space in bytes that the work needs, for the message.

    Raises:
        CacheError: In place of an `OSError`.
    """
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
