"""Writing a result file completely or not at all; for every command with an --output file."""

from __future__ import annotations

from pathlib import Path

from tokenleap.cli.root import UsageError
from tokenleap.core import files

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
    """Write text in UTF-8 (see `core.files.write_whole`).

    Raises:
        OSError: the file cannot be written. Its old content is untouched.
    """
    files.write_whole(path, lambda beside: beside.write_text(text, encoding="utf-8"))
