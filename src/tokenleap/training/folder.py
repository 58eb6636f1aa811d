"""`TrainingFolder`: the files of one training.

OUT/config.json, OUT/model.safetensors    the best drafter so far
OUT/training/settings.json                what it is made with
OUT/training/data/*.jsonl                 conversations
OUT/training/features/                    what training needs of the target's passes
OUT/training/checkpoints/                 where to continue
OUT/training/curves.csv, curves.png       the course
OUT/training/report.json                  what it brings

If several drafters are trained one after the other, number N is in OUT/drafter-N, and its
checkpoints and curves are in OUT/training/drafter-N.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenleap.core.files import read_json, validated, write_whole
from tokenleap.errors import ConfigError
from tokenleap.training.checkpoints import checkpoints_in

__all__ = ["DrafterFolder", "TrainingFolder"]


@dataclass(frozen=True)
class DrafterFolder:
    """Where one drafter of a training is.

    Args:
        out: the folder that serves it.
        work: its curves, and what is needed to continue.
    """

    out: Path
    work: Path

    @property
    def checkpoints(self) -> Path:
        """Where to continue."""
        return self.work / "checkpoints"

    @property
    def rounds(self) -> Path:
        """Text that the drafter writes while it learns."""
        return self.work / "on_policy"


class TrainingFolder:
    """Where everything is. The data are called "train" and "held_out".

    Args:
        out: the folder of the drafter.
    """

    def __init__(self, out: Path) -> None:
        self.out, self.work = out, out / "training"
        self.report = self.work / "report.json"
        self._settings = self.work / "settings.json"

    def drafter(self, number: int, of: int) -> DrafterFolder:
        """Where a drafter is, by its number from 0, if so many are trained."""
        if of == 1:
            return DrafterFolder(self.out, self.work)
        name = f"drafter-{number + 1}"
        return DrafterFolder(self.out / name, self.work / name)

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
        return any(checkpoints_in(each) for each in self.work.rglob("checkpoints"))

    @property
    def free_bytes(self) -> int:
        """Space on its disk; the folder need not exist."""
        folder = self.work.resolve()
        there = next(each for each in (folder, *folder.parents) if each.exists())
        return shutil.disk_usage(there).free

    def check(self, wanted: dict[str, Any]) -> None:
        """Refuse a folder that has another training, or a drafter of another one.

        Args:
            wanted: what the training is made with.

        Raises:
            ConfigError: it has.
        """
        if self._settings.exists():
            try:
                found = validated(dict[str, Any], read_json(self._settings))
            except ValueError as error:
                raise ConfigError(
                    f"{self._settings} is damaged: {error}: delete {self.work}."
                ) from None
            if found != wanted:
                changed = {*found, *wanted}
                other = next(k for k in sorted(changed) if found.get(k) != wanted.get(k))
                raise ConfigError(
                    f"{self.out} has a training with another '{other}': choose another folder, "
                    f"or delete {self.work}."
                )
        elif (self.out / "config.json").exists():
            raise ConfigError(f"{self.out} already has a drafter: choose another folder.")

    def claim(self, wanted: dict[str, Any]) -> None:
        """Say in the folder what it is for."""
        text = json.dumps(wanted, indent=2) + "\n"
        self.work.mkdir(parents=True, exist_ok=True)
        write_whole(self._settings, lambda to: to.write_text(text))
