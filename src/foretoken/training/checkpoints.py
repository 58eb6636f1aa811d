"""`Checkpoints`: the states of a training on the disk, from which it continues."""

from __future__ import annotations

import shutil
from pathlib import Path

from accelerate import Accelerator
from safetensors import SafetensorError

from foretoken.errors import TrainingError, in_one_line

__all__ = ["Checkpoints", "checkpoints_in"]

_PREFIX, _OLD = "checkpoint-", "-old"


class Checkpoints:
    """Saves and loads what Accelerate prepared or was told to save.

    Args:
        accelerator: of this process.
        folder: of the checkpoints.
    """

    def __init__(self, accelerator: Accelerator, folder: Path) -> None:
        self._accelerator, self._folder = accelerator, folder

    def load(self) -> None:
        """Continue from the last checkpoint, if there is one."""
        if found := checkpoints_in(self._folder):
            self._accelerator.load_state(str(found[-1]))

    def save(self, step: int) -> None:
        """Save the state after a step; the one before is deleted when this one is complete.

        Raises:
            TrainingError: it cannot be written.
        """
        name = f"{_PREFIX}{step}"
        beside = self._folder / "saving"
        if self._accelerator.is_main_process:
            shutil.rmtree(beside, ignore_errors=True)
        self._accelerator.wait_for_everyone()
        try:
            self._accelerator.save_state(str(beside))
        except (OSError, RuntimeError, SafetensorError) as error:
            shutil.rmtree(beside, ignore_errors=True)
            raise TrainingError(
                f"{beside} cannot be written: {in_one_line(error)}. The checkpoint before is kept."
            ) from None
        self._accelerator.wait_for_everyone()
        if self._accelerator.is_main_process:
            _replace(beside, self._folder / name)


def _replace(new: Path, place: Path) -> None:
    """Rename a checkpoint to its place, and delete all others.

    One of the same step is renamed first, so that there is a complete one at any time.
    """
    if place.exists():
        old = place.with_name(f"{place.name}{_OLD}")
        shutil.rmtree(old, ignore_errors=True)
        place.rename(old)
    new.rename(place)
    for each in checkpoints_in(place.parent):
        if each != place:
            shutil.rmtree(each)


def checkpoints_in(folder: Path) -> list[Path]:
    """Complete checkpoints, the last one at the end."""
    found = folder.glob(f"{_PREFIX}*")
    return sorted(found, key=_age)


def _age(checkpoint: Path) -> tuple[int, bool]:
    """Its step, and whether it is in its place: one that was to be replaced is older."""
    name = checkpoint.name.removeprefix(_PREFIX)
    return int(name.removesuffix(_OLD)), not name.endswith(_OLD)
