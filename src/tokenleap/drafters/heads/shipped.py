"""Where heads are: those that come with the package, by the alias of their model, and others.

`make drafter` makes them; docs/training.md has the recipe. Nothing here loads PyTorch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenleap.errors import ModelError

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


def with_shipped(fields: Mapping[str, Any], alias: object, *, trees: bool = True) -> dict[str, Any]:
    """A `speculative_config`; without a head, `hybrid` and `eagle` take the model's own of ours."""
    if "model" in fields or fields.get("method") not in ("hybrid", "eagle"):
        return dict(fields)
    own = shipped_config(alias, trees=trees and "tree" not in fields)
    if own is None:
        return dict(fields)
    if fields["method"] == "eagle":
        own = {**own["drafter"], "model": own["model"]}
    return {**own, **fields}


def existing_folder(path: str | Path) -> Path:
    if not Path(path).is_dir():
        raise ModelError(f"there is no folder {path}: give the folder of a trained head.")
    return Path(path)
