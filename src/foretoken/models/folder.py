"""Checks of a Hugging Face model folder that read no weights.

`resolver` calls `check_folder`, and `load` the others.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from foretoken.errors import ModelError

__all__ = ["check_folder", "read_config", "weight_files"]

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_KERNELS = {"attn_implementation", "experts_implementation"}
"""Settings that may name a repository of kernels."""


def check_folder(folder: Path) -> None:
    """Check that a folder has a readable config and all the weight files it should have.

    Raises:
        ModelError: If it lacks one of them.
    """
    read_config(folder)
    weight_files(folder)


def read_config(folder: Path) -> dict[str, Any]:
    """The content of a folder's `config.json`.

    Raises:
        ModelError: If there is none, it is not a JSON object, or it names code on the Hub.
    """
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} is not a Hugging Face model folder: it has no config.json")
    config = _read_object(folder / "config.json")
    for part in (config, *config.values()):
        for name in _KERNELS & (part.keys() if isinstance(part, dict) else set()):
            if "/" in str(part[name]):  # Transformers would fetch and run it
                raise ModelError(
                    f"{folder / 'config.json'} names code on the Hugging Face Hub ({name}), which "
                    "is never run; remove that setting"
                )
    return config


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that hold a folder's weights.

    Raises:
        ModelError: If the folder has no safetensors, or not all of its shards.
    """
    if (folder / _WEIGHTS).is_file():
        return [folder / _WEIGHTS]
    if not (folder / _INDEX).is_file():
        raise ModelError(_no_weights(folder))
    shards = _read_object(folder / _INDEX).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise ModelError(f"{folder / _INDEX} has no weight_map; get the model again")
    files = [folder / str(name) for name in sorted(set(shards.values()))]
    if missing := [file.name for file in files if not file.is_file()]:
        raise ModelError(
            f"{folder} lacks {len(missing)} of its {len(files)} weight files, {missing[0]} first; "
            f"get the model again"
        )
    return files


def _no_weights(folder: Path) -> str:
    if next(folder.glob("*.bin"), None) is not None:
        return (
            f"{folder} holds its weights only as pickle files (.bin), which are never loaded "
            f"because they can run code; convert them to safetensors first"
        )
    if (gguf := next(folder.glob("*.gguf"), None)) is not None:
        return f"{folder} has no {_WEIGHTS}; to use its GGUF file, name the file: {gguf}"
    return f"{folder} has no weights: neither {_WEIGHTS} nor {_INDEX} is there"


def _read_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} is not a JSON object")
    return content
