"""Files that are there whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from foretoken.cli.root import UsageError

__all__ = ["check_writable", "write_whole"]


def check_writable(path: Path) -> None:
    """Find out before the work that its result has nowhere to go.

    Raises:
        UsageError: there is no such folder, or the path is a folder itself.
    """
    if path.is_dir():
        raise UsageError(f"{path} is a folder: name a file")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"there is no folder {path.parent} to write {path.name} to")


def write_whole(path: Path, text: str) -> None:
    """Write beside the file, then rename; a pipe or a device is written to directly.

    Raises:
        OSError: it cannot be written; what was there before is untouched.
    """
    path = path.resolve()
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
