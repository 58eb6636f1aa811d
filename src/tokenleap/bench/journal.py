"""Records as JSON lines, appended one by one, from which an interrupted run continues."""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path
from typing import Any

from tokenleap.core.files import parsed_json
from tokenleap.errors import TokenleapError

__all__ = ["Journal"]

_CHECK = "checksum"


class Journal:
    """A file of JSON objects; the first one has the settings that all others depend on.

    A file made with other settings is refused, so that a summary never mixes different runs. So is
    one with a line that was changed: each ends with the checksum of what it says.

    Args:
        path: created if it does not exist; None keeps the records in memory only.
        format_name: marks the first line as that of such a file.
        settings: everything the records depend on.

    Raises:
        TokenleapError: the file is not such a file, cannot be used, or its settings differ.
    """

    def __init__(self, path: Path | None, format_name: str, settings: dict[str, Any]) -> None:
        self._path = path
        self.records: list[dict[str, Any]] = []
        header = {"format": format_name, **settings}
        try:
            if path is None or not path.exists() or not self._load(path, header):
                self._append(header)
        except OSError as error:
            raise TokenleapError(f"cannot use {path}: {error.strerror}.") from error

    def add(self, record: dict[str, Any]) -> None:
        """Add a record; it is on disk before this returns."""
        self.records.append(record)
        self._append(record)

    def _load(self, path: Path, header: dict[str, Any]) -> bool:
        """Read the file; False if it has not even a whole header."""
        content = path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]  # a kill may have cut off the last line
        if not whole:
            if not _line(header).encode().startswith(content):
                raise TokenleapError(f"{path} is not a results file; choose another --output.")
            os.truncate(path, 0)
            return False
        try:
            found, *self.records = [parsed_json(line) for line in whole.splitlines()]
        except ValueError as error:
            raise TokenleapError(f"{path} is not a results file: {error}.") from error
        if not all(isinstance(record, dict) for record in (found, *self.records)):
            raise TokenleapError(f"{path} is not a results file: expected JSON objects.")
        if found.get("format") != header["format"]:
            raise TokenleapError(f"{path} is not a results file; choose another --output.")
        for number, record in enumerate((found, *self.records), 1):
            if record.pop(_CHECK, None) != _checksum(record):
                raise TokenleapError(
                    f"{path}: line {number} has changed since it was written, or is of an older "
                    "version; choose another --output."
                )
        # JSON turns tuples into lists: compare like with like.
        _check_header(path, found, json.loads(json.dumps(header)))
        if whole != content:
            os.truncate(path, len(whole))
        return True

    def _append(self, record: dict[str, Any]) -> None:
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(_line(record) + "\n")


def _line(record: dict[str, Any]) -> str:
    return json.dumps({**record, _CHECK: _checksum(record)})


def _checksum(record: dict[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(record).encode()):08x}"


def _check_header(path: Path, found: dict[str, Any], wanted: dict[str, Any]) -> None:
    changed = [name for name in wanted if found.get(name) != wanted[name]]
    if changed:
        name = changed[0]
        raise TokenleapError(
            f"{path} was made with {name} {found.get(name)!r}, and this run has {wanted[name]!r}; "
            "choose another --output."
        )
