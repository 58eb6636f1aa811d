"""What folders of our own form note in `config.json` on the training and its target.

{"tokenleap": {"verifier": {"name_or_path": ..., "architectures": [...]},
"verifier_layers": 30, ...}}
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Gt
from pydantic import BaseModel, ConfigDict

from tokenleap.drafters.heads.folder import Verifier, validated

__all__ = ["noted", "notes_of"]


class _Verifier(BaseModel):
    model_config = ConfigDict(extra="ignore")

    name_or_path: str
    architectures: tuple[str, ...] = ()


class _Notes(BaseModel):
    model_config = ConfigDict(extra="allow")

    verifier: _Verifier
    verifier_layers: Annotated[int, Gt(0)] | None = None


def noted(fields: Mapping[str, Any], path: Path) -> tuple[Verifier, Mapping[str, Any]]:
    """The target that one of our own folders names, and what else it notes on the training.

    Args:
        fields: of its `config.json`, as `notes_of` makes them.
        path: of this file.

    Raises:
        ModelError: they are not there.
    """
    notes = validated(_Notes, fields.get("tokenleap"), path)
    named = notes.verifier
    verifier = Verifier(named.name_or_path, named.architectures, notes.verifier_layers)
    return verifier, notes.model_extra or {}


def notes_of(verifier: Verifier, notes: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `config.json` that `noted` reads."""
    named = {"name_or_path": verifier.name_or_path, "architectures": list(verifier.architectures)}
    return {"tokenleap": {**notes, "verifier": named, "verifier_layers": verifier.num_layers}}
