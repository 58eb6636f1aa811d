"""Files that hold the shape of a static tree.

`tokenleap tree` writes them, and the option `tree` reads them. A file is one JSON object with the
fields of `TreeFile`: {"format": "tokenleap-tree-1", "paths": [[0], [1], [0, 0]], ...}.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tokenleap.core.files import read_json
from tokenleap.errors import TokenleapError

__all__ = ["MAX_DEPTH", "MAX_NODES", "MAX_RANKS", "TreeFile", "closed", "is_tree_file"]

FORMAT = "tokenleap-tree-1"

MAX_NODES = 256
MAX_DEPTH = 64
MAX_RANKS = 64
"""Most children of a node."""


@dataclass(frozen=True)
class TreeFile:
    """The shape of a tree, and the measurement that it was optimised for.

    Args:
        paths: [n] every node as the ranks on the path down to it, as in `shapes.Paths`.
        acceptance: the positional acceptance vector that it is optimal for.
        expected_tokens: expected tokens per target pass under this vector.
        method: the method that drafted while the vector was measured; None if it was given.
        model: the target of the measurement; None if the vector was given.
    """

    paths: tuple[tuple[int, ...], ...]
    acceptance: tuple[float, ...] = ()
    expected_tokens: float | None = None
    method: str | None = None
    model: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """The content of the file, for `json.dump`."""
        return {"format": FORMAT, **asdict(self)}

    @staticmethod
    def load(path: str | Path) -> TreeFile:
        """Read and check a file.

        Raises:
            TokenleapError: the file cannot be read, holds no tree, or holds a tree that exceeds
                `MAX_NODES` or `MAX_DEPTH`.
        """
        value = _read(Path(path))
        if not isinstance(value, dict) or value.get("format") != FORMAT:
            raise TokenleapError(
                f"{path} is not a tree: expected an object with format '{FORMAT}', as written by "
                "`tokenleap tree --output`."
            )
        _check_origin(path, value)
        return TreeFile(
            _checked_paths(path, value.get("paths")),
            tuple(value.get("acceptance", ())),
            *(value.get(name) for name in ("expected_tokens", "method", "model")),
        )


def is_tree_file(value: object) -> bool:
    """Whether a value of the option `tree` names a file: a `Path`, or text that ends in .json."""
    return isinstance(value, Path) or (isinstance(value, str) and value.endswith(".json"))


def _read(path: Path) -> Any:
    try:
        return read_json(path.expanduser())
    except OSError as error:
        raise TokenleapError(f"cannot read tree {path}: {error.strerror or error}.") from error
    except ValueError as error:
        raise TokenleapError(f"{path} is not a tree: not JSON in UTF-8 ({error}).") from error


def _checked_paths(path: str | Path, paths: Any) -> tuple[tuple[int, ...], ...]:
    if not isinstance(paths, list) or not paths or not all(map(_is_path, paths)):
        raise TokenleapError(
            f"{path} is a damaged tree: paths must be a list of lists of ranks, each between 0 "
            f"and {MAX_RANKS - 1}."
        )
    deepest = max(map(len, paths))
    if deepest > MAX_DEPTH:
        raise TokenleapError(f"{path}: the tree is {deepest} levels deep, more than {MAX_DEPTH}.")
    nodes = len(closed(paths))
    if nodes > MAX_NODES:
        raise TokenleapError(f"{path}: the tree has {nodes} nodes, more than {MAX_NODES}.")
    return tuple(map(tuple, paths))


def _check_origin(path: str | Path, value: dict[str, Any]) -> None:
    acceptance = value.get("acceptance", [])
    if not isinstance(acceptance, list) or not all(map(_is_number, acceptance)):
        raise TokenleapError(f"{path} is a damaged tree: acceptance must be a list of numbers.")
    tokens = value.get("expected_tokens")
    if tokens is not None and not _is_number(tokens):
        raise TokenleapError(f"{path} is a damaged tree: expected_tokens must be a number.")
    for name in ("method", "model"):
        if not isinstance(value.get(name), str | None):
            raise TokenleapError(f"{path} is a damaged tree: {name} must be text.")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_path(path: Any) -> bool:
    return (
        isinstance(path, list)
        and bool(path)
        and all(type(rank) is int and 0 <= rank < MAX_RANKS for rank in path)
    )


def closed(paths: Sequence[Sequence[int]]) -> set[tuple[int, ...]]:
    """All nodes of a tree as paths of ranks.

    Args:
        paths: some of the nodes. Their ancestors, and the earlier siblings of all these, are added.
    """
    return {
        (*path[:depth], rank)
        for path in paths
        for depth, last in enumerate(path)
        for rank in range(last + 1)
    }
