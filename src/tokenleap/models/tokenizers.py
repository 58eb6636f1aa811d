"""`find_tokenizer`: the tokenizer that a folder or a model's name stands for."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from tokenleap.models.load import load_tokenizer
from tokenleap.models.resolver import resolve

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["find_tokenizer"]


def find_tokenizer(name: str | Path) -> PreTrainedTokenizerBase | None:
    """Load the tokenizer in a folder, which need not hold a model, or that of a model.

    Args:
        name: The folder, or what `resolve` takes.

    Returns:
        The tokenizer, or None if there are no tokenizer files.

    Raises:
        ModelError: If there is no such folder or model, or the files are damaged.
    """
    folder = os.path.expanduser(name)  # noqa: PTH111 - never raises
    is_folder = os.path.isdir(folder)  # noqa: PTH112 - never raises
    return load_tokenizer(Path(folder) if is_folder else resolve(name))
