"""Heads that come with the package, by the alias of the model they were trained for.

`make drafter` makes them; docs/training.md has the recipe.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).parent / "pretrained"


def shipped_head(alias: object) -> Path | None:
    """The folder of the head that was trained for a model; None if there is none."""
    heads = {path.parent.name: path.parent for path in _FOLDER.glob("*/config.json")}
    return heads.get(alias) if isinstance(alias, str) else None


def shipped_config(alias: object, *, trees: bool) -> dict[str, Any] | None:
    """The default `speculative_config` of a model with a head of ours; None if it has none."""
    head = shipped_head(alias)
    if head is None:
        return None
    drafter: dict[str, Any] = {"method": "eagle"}
    if trees:
        drafter |= {"tree": "dynamic", "tree_depth": 4, "num_speculative_tokens": 8}
    return {"method": "hybrid", "model": str(head), "drafter": drafter}
