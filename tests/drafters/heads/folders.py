"""Faults of a head's folder, for the tests of all kinds of folders."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.tiny import tiny_model
from tokenleap import LLM
from tokenleap.errors import TokenleapError

Fault: TypeAlias = tuple[Callable[[Path], object], str]
"""Damage to a folder, and a pattern of the error message."""


def change_tensors(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def change_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def change_inside(folder: Path, name: str, **fields: Any) -> None:
    """Change fields of an object in the configuration."""
    inner = json.loads((folder / "config.json").read_text())[name]
    change_config(folder, **{name: {**inner, **fields}})


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def load_head(folder: Path, method: str, **fields: Any) -> LLM:
    """A tiny model, with these fields in its configuration, that drafts with the folder's head."""
    return LLM(tiny_model(**fields), speculative_config={"method": method, "model": str(folder)})


def assert_refused(folder: Path, fault: Fault, load: Callable[[Path], object]) -> None:
    """That loading the damaged folder is an error of one line."""
    damage, message = fault
    damage(folder)
    with pytest.raises(TokenleapError, match=message) as caught:
        load(folder)
    assert "\n" not in str(caught.value)


FILE_FAULTS: dict[str, Fault] = {
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "does not exist"),
    "no config": (lambda f: (f / "config.json").unlink(), "config.json does not exist"),
    "no JSON": (lambda f: (f / "config.json").write_text("{"), "cannot be read"),
    "no object": (lambda f: (f / "config.json").write_text("[]"), "no JSON object"),
    "truncated": (truncate, "cannot be read"),
}
"""Faults of any folder."""

FAULTS: dict[str, Fault] = {
    **FILE_FAULTS,
    "no map": (lambda f: change_tensors(f, lambda t: t.pop("d2t")), "'d2t' is missing"),
    "a falling map": (
        lambda f: change_tensors(f, lambda t: t.update(d2t=-2 * torch.arange(48))),
        "ascending",
    ),
    "a map beyond the vocabulary": (
        lambda f: change_tensors(f, lambda t: t.update(d2t=torch.full((48,), 60))),
        "below 96",
    ),
}
"""Those of the folder of a head that can draft 48 of 96 tokens."""
