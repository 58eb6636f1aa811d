"""Writing a file completely or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

__all__ = ["write_whole"]


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Write a temporary file beside it, then rename. Write to a pipe or a device directly.

    Args:
        path: the file. It gets the usual mode, even if `write` makes private files.
        write: writes the whole file to the path that it is given.

    Raises:
        OSError: the file cannot be written. What else `write` raises is passed on. The file's old
            content is then untouched.
    """
    path = path.resolve()
    if path.exists() and not path.is_file():
        write(path)
        return
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.touch()
    try:
        mode = beside.stat().st_mode
        write(beside)
        beside.chmod(mode)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
