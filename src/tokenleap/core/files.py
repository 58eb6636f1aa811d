"""Reading JSON that others wrote, writing a file completely or not at all, and journals."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

FIRST_NAME, _NAME = "foretoken", "tokenleap"
"""The project's names before its first release; files may still have them."""

_Fields = TypeVar("_Fields")

MAX_DEPTH = 100  # levels of JSON: what copies or compares a value later recurses, too

_MAX_BYTES = 1 << 30


def read_json(path: Path) -> Any:
    """The JSON value that a file holds; of one with the project's first name, in its new one."""
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size > _MAX_BYTES:
            raise ValueError("it is larger than 1 GiB")
        content = file.read()
    value = parsed_json(content)
    return renamed(value) if isinstance(value, dict) else value


def renamed(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a file, whose key and kinds that begin with `FIRST_NAME` have the new name."""

    def name(key: str, value: Any) -> Any:
        if key in ("format", "model_type") and isinstance(value, str):
            return re.sub(f"^{FIRST_NAME}", _NAME, value)
        return value

    return {_NAME if key == FIRST_NAME else key: name(key, fields[key]) for key in fields}


def parsed_json(text: str | bytes) -> Any:
    """The value of a JSON text."""
    try:
        text = text.decode() if isinstance(text, bytes) else text
        value = json.loads(text)
    except RecursionError:
        raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels") from None
    if any(depth == MAX_DEPTH for depth, _ in enumerate(levels(value))):
        raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels")
    if "\\ud" in text or "\\uD" in text:  # only an escape can stand for half of a character
        json.dumps(value, ensure_ascii=False).encode()
    return value


def levels(value: Any) -> Iterator[list[Any]]:
    """The objects and lists in a JSON value, from the outermost in; it does not recurse."""
    level = [value] if isinstance(value, dict | list | tuple) else []
    while level:
        yield level
        parts = (each.values() if isinstance(each, dict) else each for each in level)
        level = [x for part in parts for x in part if isinstance(x, dict | list | tuple)]


def validated(kind: type[_Fields], fields: Any) -> _Fields:
    """Fields of a file as a pydantic model, a dataclass, or any other type."""
    try:
        return TypeAdapter(kind).validate_python(fields)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        wrong = f"{name}: {first['msg'].lower()}" if name else first["msg"].lower()
    raise ValueError(wrong)  # without pydantic's error: see `Config`


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Write a temporary file beside it, then rename. Write to a pipe or a device directly."""
    path = path.resolve()
    if path.exists() and not path.is_file():
        write(path)
        return
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.touch()
    try:
        mode = (path if path.exists() else beside).stat().st_mode
        write(beside)
        beside.chmod(mode)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


class JsonLines:
    """A file of JSON lines that only grows, from which an interrupted run continues.

    A kill may cut its last line off: what has no line end does not count.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, lines: Iterable[str], *, sync: bool = False) -> None:
        """Add lines; with `sync` they are on the disk before this returns."""
        with self.path.open("a", encoding="utf-8") as file:
            file.writelines(line + "\n" for line in lines)
            if sync:
                file.flush()
                os.fsync(file.fileno())

    def __iter__(self) -> Iterator[bytes]:
        """The whole lines."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            for line in file:
                if line.endswith(b"\n"):
                    yield line

    def mend(self) -> None:
        """Remove half a line at the end.

        Raises:
            ValueError: it is none of an object, so it is not the end of such a file.
        """
        if not self.path.exists():
            return
        data = self.path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            if not data.startswith(b"{", whole):
                raise ValueError(f"{self.path} does not end in a JSON object")
            os.truncate(self.path, whole)
