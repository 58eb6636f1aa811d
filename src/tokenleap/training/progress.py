"""What a training says about its course, and where it stands."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tokenleap.core.files import write_whole

__all__ = ["Evaluation", "Panel", "Progress", "Step", "save_curves", "save_panels", "save_table"]


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
    """What held-out conversations show after a step.

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
        """What the best drafter has most of."""
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
