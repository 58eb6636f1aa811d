"""`TrainingFolder`: the files of one training.

OUT/config.json, OUT/model.safetensors    the best head so far
OUT/training/settings.json                what it is made with
OUT/training/data/*.jsonl                 conversations
OUT/training/features/                    what training needs of the target's passes
OUT/training/checkpoints/                 where to continue
OUT/training/curves.csv, curves.png       the course
OUT/training/report.json                  what it brings
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from foretoken.core.files import write_whole
from foretoken.errors import ConfigError
from foretoken.training.checkpoints import checkpoints_in

__all__ = ["TrainingFolder"]


class TrainingFolder:
    """Where everything is. The data are called "train" and "held_out".

    Args:
        head: the folder of the head.
    """

    def __init__(self, head: Path) -> None:
        self.head, self.work = head, head / "training"
        self.checkpoints = self.work / "checkpoints"
        self.report = self.work / "report.json"
        self._settings = self.work / "settings.json"

    def conversations(self, name: str) -> Path:
        """The file of the conversations."""
        return self.work / "data" / f"{name}.jsonl"

    def features(self, name: str) -> Path:
        """The folder of their features."""
        return self.work / "features" / name

    @property
    def has_features(self) -> bool:
        """Whether all features are there."""
        return all((self.features(name) / "index.json").exists() for name in ("train", "held_out"))

    @property
    def has_begun(self) -> bool:
        """Whether there is a checkpoint, from which training continues."""
        return bool(checkpoints_in(self.checkpoints))

    @property
    def free_bytes(self) -> int:
        """Space on its disk; the folder need not exist."""
        folder = self.work.resolve()
        there = next(each for each in (folder, *folder.parents) if each.exists())
        return shutil.disk_usage(there).free

    def check(self, wanted: dict[str, Any]) -> None:
        """Refuse a folder that has another training, or a head of another one.

        Args:
            wanted: what the training is made with.

        Raises:
            ConfigError: it has.
        """
        if self._settings.exists():
            found = json.loads(self._settings.read_text())
            if found != wanted:
                changed = {*found, *wanted}
                other = next(k for k in sorted(changed) if found.get(k) != wanted.get(k))
                raise ConfigError(
                    f"{self.head} has a training with another '{other}': choose another folder, "
                    f"or delete {self.work}."
                )
        elif (self.head / "config.json").exists():
            raise ConfigError(f"{self.head} already has a head: choose another folder.")

    def claim(self, wanted: dict[str, Any]) -> None:
        """Say in the folder what it is for."""
        text = json.dumps(wanted, indent=2) + "\n"
        self.work.mkdir(parents=True, exist_ok=True)
        write_whole(self._settings, lambda to: to.write_text(text))
