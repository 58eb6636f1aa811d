"""A folder of draft models that belong together, as `tokenleap train boost` writes it.

Each has a folder of its own inside it, and `config.json` names them:

    {"model_type": "tokenleap_drafters", "drafters": ["drafter-1", "drafter-2"]}
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenleap.core.files import read_json, write_whole
from tokenleap.errors import ConfigError, ModelError, in_one_line

__all__ = ["drafters_in", "write_drafters"]

_CONFIG, _TYPE = "config.json", "tokenleap_drafters"


def write_drafters(folder: Path, names: Sequence[str]) -> None:
    """Say which folders of draft models inside this folder belong together."""
    text = json.dumps({"model_type": _TYPE, "drafters": list(names)}, indent=2) + "\n"
    try:
        write_whole(folder / _CONFIG, lambda to: to.write_text(text, encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{folder} cannot be written: {in_one_line(error)}.") from None


def drafters_in(folder: str | Path) -> list[dict[str, Any]]:
    """A configuration for each draft model of a folder."""
    found = [Path(folder) / name for name in _names(Path(folder))]
    if missing := [each for each in found if not _is_file(each / _CONFIG)]:
        raise ConfigError(
            f"there is no draft model in {missing[0]!s:.300}, of which {folder} tells."
        )
    return [{"method": "draft_model", "model": str(each)} for each in found]


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # it is no name of a file
        return False


def _names(folder: Path) -> list[str]:
    try:
        config = read_json(folder / _CONFIG)
        names = config["drafters"] if config["model_type"] == _TYPE else None
    except (OSError, ValueError, KeyError, TypeError):
        names = None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(
            f"{folder} has no draft models that belong together: give a folder that `tokenleap "
            "train boost` has written, or a list of configurations."
        )
    return names
