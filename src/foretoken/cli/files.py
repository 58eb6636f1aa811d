"""Writing a result file completely or not at all; for every command with an --output file."""

from __future__ import annotations

import os
from pathlib import Path

from foretoken.cli.root import UsageError

__all__ = ["check_writable", "write_whole"]


def check_writable(path: Path) -> None:
    """Refuse a path that cannot be written to, before the work begins.

    Raises:
        UsageError: the path's folder does not exist, or the path is a folder itself.
    """
    if path.is_dir():
        raise UsageError(f"{path} is a folder: name a file")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"there is no folder {path.parent} to write {path.name} to")


def write_whole(path: Path, text: str) -> None:
    """Write a temporary file beside it, then rename. Write to a pipe or a device directly.

    Raises:
        OSError: the file cannot be written. Its old content is untouched.
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
