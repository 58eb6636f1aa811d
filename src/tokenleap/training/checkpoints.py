"""`Checkpoints`: the states of a training on the disk, from which it continues.

    state.safetensors        weights, optimizers, schedules and progress
    random-0.safetensors     random number generators of process 0, and so on

Tensors are in safetensors, and everything else is JSON in their headers. Accelerate's own
checkpoints hold pickle files, which can run code, so they are not used.
"""

from __future__ import annotations

import csv
import io
import json
import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from accelerate import Accelerator
from pydantic import TypeAdapter
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from tokenleap.core.files import read_json, validated, write_whole
from tokenleap.errors import ConfigError, TrainingError, in_one_line

__all__ = [
    "Checkpoints",
    "DrafterFolder",
    "Evaluation",
    "Panel",
    "Progress",
    "Step",
    "TrainingFolder",
    "checkpoints_in",
    "save_curves",
    "save_panels",
    "save_table",
]

_PREFIX, _OLD = "checkpoint-", "-old"
_STATE = "state.safetensors"


class Checkpoints:
    """Saves and loads the state of a training."""

    def __init__(
        self,
        accelerator: Accelerator,
        folder: Path,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        schedules: Sequence[LRScheduler],
        progress: Progress,
    ) -> None:
        self._accelerator, self._folder, self._module = accelerator, folder, module
        self._optimizers, self._schedules, self._progress = optimizers, schedules, progress

    def load(self) -> None:
        """Continue from the last checkpoint, if there is one."""
        if not (found := checkpoints_in(self._folder)):
            return
        place = found[-1]
        again = f"delete {self._folder} to begin the training again"
        if not (place / _STATE).exists():
            raise TrainingError(
                f"{place} is of an older version: it has pickle files, which are never loaded "
                f"because they can run code; {again}."
            )
        try:
            self._use(_read(place / _STATE))
            _restore_random(_read(place / self._random))
        except Exception as error:  # a damaged file has states that PyTorch stumbles over somewhere
            raise TrainingError(f"{place} cannot be read: {in_one_line(error)}; {again}.") from None

    def save(self, step: int) -> None:
        """Save the state after a step; the one before is deleted when this one is complete."""
        beside = self._folder / "saving"
        if self._accelerator.is_main_process:
            shutil.rmtree(beside, ignore_errors=True)
        self._accelerator.wait_for_everyone()
        try:
            beside.mkdir(parents=True, exist_ok=True)
            if self._accelerator.is_main_process:
                _write(beside / _STATE, self._state())
            _write(beside / self._random, _random_state())
        except (OSError, RuntimeError, SafetensorError) as error:
            shutil.rmtree(beside, ignore_errors=True)
            raise TrainingError(
                f"{beside} cannot be written: {in_one_line(error)}. The checkpoint before is kept."
            ) from None
        self._accelerator.wait_for_everyone()
        if self._accelerator.is_main_process:
            _replace(beside, self._folder / f"{_PREFIX}{step}")

    @property
    def _random(self) -> str:
        """The file of this process's random number generators."""
        return f"random-{self._accelerator.process_index}.safetensors"

    def _state(self) -> dict[str, Any]:
        scaler = self._accelerator.scaler
        return {
            "weights": self._module.state_dict(),
            "optimizers": [each.state_dict() for each in self._optimizers],
            "schedules": [each.state_dict() for each in self._schedules],
            "progress": asdict(self._progress),
            "scaler": None if scaler is None else scaler.state_dict(),
        }

    def _use(self, state: dict[str, Any]) -> None:
        progress = TypeAdapter(Progress).validate_python(state["progress"])
        self._module.load_state_dict(state["weights"])
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            _check_moments(optimizer, saved)
            optimizer.load_state_dict(saved)
        for schedule, saved in zip(self._schedules, state["schedules"], strict=True):
            if saved.keys() != schedule.state_dict().keys():
                raise ValueError("its schedules are of another kind")
            schedule.load_state_dict(saved)
        if self._accelerator.scaler is not None:
            self._accelerator.scaler.load_state_dict(state["scaler"])
        vars(self._progress).update(vars(progress))


def _check_moments(optimizer: Optimizer, saved: dict[str, Any]) -> None:
    """Refuse an optimizer's state that is not one of its weights, which PyTorch does not check."""
    shapes = [each.shape for group in optimizer.param_groups for each in group["params"]]
    for number, moments in saved["state"].items():
        shape = shapes[number]
        for name, tensor in moments.items():
            if name != "step" and tensor.shape != shape:
                raise ValueError(f"{name} of weight {number} has the shape {list(tensor.shape)}")


def _random_state() -> dict[str, Any]:
    """The states of all random number generators that training may use."""
    name, keys, *rest = cast(tuple[Any, ...], np.random.get_state())
    return {
        "python": random.getstate(),
        "numpy": (name, keys.tolist(), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def _restore_random(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])


def _write(path: Path, state: Any) -> None:
    """Write nested dictionaries, lists and tuples of tensors, numbers and texts."""
    tensors: dict[str, Tensor] = {}
    storages: set[int] = set()

    def kept(tensor: Tensor) -> int:
        """The number of a tensor; safetensors refuses several that share memory."""
        whole = tensor.detach().cpu().contiguous()
        if (storage := whole.untyped_storage().data_ptr()) in storages:
            whole = whole.clone()
        storages.add(storage)
        tensors[str(len(tensors))] = whole
        return len(tensors) - 1

    def plain(value: Any) -> Any:
        """A value in JSON. Dictionaries are lists of pairs, because their keys may be numbers."""
        match value:
            case Tensor():
                return {"tensor": kept(value)}
            case dict():
                return {"dict": [[key, plain(each)] for key, each in value.items()]}
            case tuple():
                return {"tuple": [plain(each) for each in value]}
            case list():
                return [plain(each) for each in value]
        return value

    text = json.dumps(plain(state))
    save_file(tensors, path, {"state": text})


def _read(path: Path) -> dict[str, Any]:
    """Read a file of `_write`."""
    with safe_open(path, "pt") as file:
        text = (file.metadata() or {})["state"]

        def value(found: dict[str, Any]) -> Any:
            """The value that an object of JSON stands for."""
            ((kind, content),) = found.items()
            made: dict[str, Callable[[Any], Any]] = {
                "tensor": lambda number: file.get_tensor(str(number)),
                "dict": dict,
                "tuple": tuple,
            }
            return made[kind](content)

        state = json.loads(text, object_hook=value)
    assert isinstance(state, dict)
    return state


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


# `TrainingFolder`: the files of one training.
#
# OUT/config.json, OUT/model.safetensors    the best drafter so far
# OUT/training/settings.json                what it is made with
# OUT/training/data/*.jsonl                 conversations
# OUT/training/features/                    what training needs of the target's passes
# OUT/training/checkpoints/                 where to continue
# OUT/training/curves.csv, curves.png       the course
# OUT/training/report.json                  what it brings
#
# If several drafters are trained one after the other, number N is in OUT/drafter-N, and its
# checkpoints and curves are in OUT/training/drafter-N.


@dataclass(frozen=True)
class DrafterFolder:
    """Where one drafter of a training is."""

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
    """Where everything is. The data are called "train" and "held_out"."""

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
        """Refuse a folder that has another training, or a drafter of another one."""
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


_SCORED_LENGTH = 4
"""Chains of this length decide which drafter is the best."""


@dataclass(frozen=True)
class Step:
    """One step of the optimizer.

    Args:
        accuracy: for each of them, the share of its places whose token was right.
    """

    step: int
    total: int
    tokens: int
    seconds: float
    losses: tuple[float, ...]
    accuracy: tuple[float, ...]


@dataclass(frozen=True)
class Evaluation:
    """Results on held-out conversations after a step.

    Args:
        by_position: for each level, the probability that it is accepted if those before were.
        mean_lengths: mean acceptance lengths of chains of 1 to L tokens.
    """

    step: int
    loss: float
    by_position: tuple[float, ...]
    mean_lengths: tuple[float, ...]
    best: bool

    @property
    def score(self) -> float:
        """The score by which the best drafter is chosen."""
        return self.mean_lengths[min(_SCORED_LENGTH, len(self.mean_lengths)) - 1]


@dataclass
class Progress:
    """Where training stands; a part of checkpoints."""

    step: int = 0
    epoch: int = 0
    batches: int = 0
    """Batches of this epoch that are done."""
    round: int = 0
    """See `rounds.Rounds`."""
    losses: list[float] = field(default_factory=list)
    """Of the steps since the last evaluation."""
    history: list[Evaluation] = field(default_factory=list)
    finished: bool = False
    averaged: bool = False
    """Whether the last weights were averaged."""

    @property
    def evaluated(self) -> int:
        """The last step after which there was an evaluation; 0 if there was none."""
        return self.history[-1].step if self.history else 0

    @property
    def since_best(self) -> int:
        """Evaluations after the best one."""
        best = [index for index, each in enumerate(self.history) if each.best]
        return len(self.history) - 1 - best[-1] if best else 0


# The course of a training as `curves.csv` and `curves.png`, and such files of other courses.


@dataclass(frozen=True)
class Panel:
    """One diagram of a picture.

    Args:
        lines: their names and values; a single line has no legend.
    """

    title: str
    x_title: str
    x: Sequence[float]
    lines: Mapping[str, Sequence[float]]


def save_curves(folder: Path, history: Sequence[Evaluation]) -> None:
    """Write both files anew; each is complete or as it was."""
    save_table(folder / "curves.csv", *_table(history))
    save_panels(folder / "curves.png", _panels(history))


def save_table(path: Path, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Write a CSV file; it is complete or as it was."""
    text = io.StringIO()
    csv.writer(text).writerows([header, *rows])
    write_whole(path, lambda beside: beside.write_text(text.getvalue()))


def save_panels(path: Path, panels: Sequence[Panel]) -> None:
    """Draw diagrams side by side as a PNG file; it is complete or as it was."""
    write_whole(path, lambda beside: _draw(beside, panels))


def _table(history: Sequence[Evaluation]) -> tuple[list[str], list[list[object]]]:
    levels = range(1, 1 + max((len(each.by_position) for each in history), default=0))
    header = [
        *("step", "loss", "best"),
        *(f"acceptance_{level}" for level in levels),
        *(f"mean_acceptance_length_{level}" for level in levels),
    ]
    rows: list[list[object]] = []
    for each in history:
        numbers = [each.loss, *each.by_position, *each.mean_lengths]
        loss, *others = (f"{number:.4f}" for number in numbers)
        rows.append([each.step, loss, int(each.best), *others])
    return header, rows


def _panels(history: Sequence[Evaluation]) -> list[Panel]:
    steps = [each.step for each in history]
    levels = range(len(history[0].by_position) if history else 0)
    positions = {f"{level + 1}": [e.by_position[level] for e in history] for level in levels}
    lengths = {f"{level + 1}": [e.mean_lengths[level] for e in history] for level in levels}
    return [
        Panel("Loss of the first level", "step", steps, {"": [each.loss for each in history]}),
        Panel("Acceptance by position, held out", "step", steps, positions),
        Panel("Mean acceptance length of chains", "step", steps, lengths),
    ]


def _draw(path: Path, panels: Sequence[Panel]) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    row = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, panel in zip(row, panels, strict=True):
        for name, values in panel.lines.items():
            axes.plot(panel.x, values, label=name)
        axes.set_title(panel.title)
        axes.set_xlabel(panel.x_title)
        axes.grid(alpha=0.3)
        if len(panel.lines) > 1:
            axes.legend(fontsize="small")
    figure.savefig(path, format="png", dpi=120)
