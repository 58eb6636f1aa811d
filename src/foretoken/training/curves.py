"""The course of a training as `curves.csv` and `curves.png`."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from foretoken.core.files import write_whole
from foretoken.training.progress import Evaluation

__all__ = ["save_curves"]


def save_curves(folder: Path, history: Sequence[Evaluation]) -> None:
    """Write both files anew; each is complete or as it was."""
    write_whole(folder / "curves.csv", lambda path: path.write_text(_table(history)))
    write_whole(folder / "curves.png", lambda path: _draw(path, history))


def _table(history: Sequence[Evaluation]) -> str:
    levels = range(1, 1 + max((len(each.by_position) for each in history), default=0))
    text = io.StringIO()
    rows = csv.writer(text)
    rows.writerow(
        [
            *("step", "loss", "best"),
            *(f"acceptance_{level}" for level in levels),
            *(f"mean_acceptance_length_{level}" for level in levels),
        ]
    )
    for each in history:
        numbers = [each.loss, *each.by_position, *each.mean_lengths]
        loss, *others = (f"{number:.4f}" for number in numbers)
        rows.writerow([each.step, loss, int(each.best), *others])
    return text.getvalue()


def _draw(path: Path, history: Sequence[Evaluation]) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    loss, positions, lengths = figure.subplots(1, 3)
    steps = [each.step for each in history]
    loss.plot(steps, [each.loss for each in history])
    loss.set_title("Loss of the first level")
    for level in range(len(history[0].by_position) if history else 0):
        positions.plot(steps, [e.by_position[level] for e in history], label=f"{level + 1}")
        lengths.plot(steps, [e.mean_lengths[level] for e in history], label=f"{level + 1}")
    positions.set_title("Acceptance by position, held out")
    lengths.set_title("Mean acceptance length of chains")
    for axes in (loss, positions, lengths):
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
    if history:
        lengths.legend(fontsize="small")
    figure.savefig(path, format="png", dpi=120)
