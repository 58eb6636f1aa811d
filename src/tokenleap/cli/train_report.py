"""What `tokenleap train` says: what the training will take, how far it is, and what came of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tokenleap.cli.console import display, errors, plain

if TYPE_CHECKING:
    from tokenleap.training.estimate import Estimate
    from tokenleap.training.report import TrainingReport

__all__ = ["ShownProgress", "expectation", "show_report"]


def expectation(found: Estimate) -> str:
    """How long a training takes, and what it needs."""
    parts = (
        f"{_time(found.writing_hours)} to write the text",
        f"{_time(found.feature_hours)} for its features ({found.disk_bytes / 1e9:.1f} GB of disk)",
        f"{_time(found.training_hours)} to train",
    )
    needed = found.training_bytes
    return (
        f"This will take about {_time(found.hours)} here: {', '.join(parts)}. Training needs "
        f"{_size(needed.memory)} of memory besides the target, and {_size(needed.disk)} of disk."
    )


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB"


def _time(hours: float) -> str:
    return f"{hours:.1f} hours" if hours >= 1 else f"{max(1, round(60 * hours))} min"


class ShownProgress:
    """See `training.report.Reporter`: a bar on a terminal, lines elsewhere; both on stderr."""

    def __init__(self) -> None:
        self._console = errors()
        self._console.quiet = int(os.environ.get("RANK", "0")) > 0  # of `accelerate launch`

    def say(self, text: str) -> None:
        """One line."""
        self._console.print(plain(text), soft_wrap=True)

    @contextmanager
    def stage(self, doing: str, total: int) -> Iterator[Callable[[int, str], None]]:
        """A part of the work."""
        if not self._console.is_terminal:
            yield self._lines(doing, total)
            return
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TimeRemainingColumn(),
            TextColumn("{task.fields[remark]}"),
        )
        with Progress(*columns, console=self._console) as progress:
            task = progress.add_task(doing, total=total, remark="")

            def done(count: int, remark: str) -> None:
                progress.update(task, completed=count, remark=remark)

            yield done

    def _lines(self, doing: str, total: int) -> Callable[[int, str], None]:
        """A line for every twentieth of the work."""
        last = -1

        def done(count: int, remark: str) -> None:
            nonlocal last
            part = 20 * count // max(1, total)
            if part != last:
                last = part
                self.say(f"{doing}: {count / max(1, total):.0%}, {remark}")

        return done


def show_report(report: TrainingReport, usage: str, out: Path) -> None:
    """Print how good the drafter in `out` is, and how it is used."""
    served, console = report.served, display()
    positions = " ".join(f"{share:.0%}" for share in served.by_position)
    console.print(
        plain(
            f"{out}: {served.mean_length:.2f} tokens a pass with chains of "
            f"{len(served.by_position)} on {served.prompts} held-out prompts (acceptance by "
            f"position {positions}); a draft level takes {served.draft_share:.0%} of a pass; "
            f"{served.speed_up:.2f} times the speed of plain decoding with the default controller."
        ),
        soft_wrap=True,
    )
    if changed := report.perplexity:
        told = (
            f"{out} is a new model, and its output is not the target's: drafts are lossless with "
            f"respect to the new one only. Its perplexity on the held-out answers is "
            f"{changed.new:.3f}, the target's {changed.target:.3f}."
        )
        console.print(plain(told), soft_wrap=True)
    for line in report.advice:
        console.print(plain(line), soft_wrap=True)
    note = f"Use it: {usage}"
    note += os.linesep + f"{out / 'training'} can be deleted."
    console.print(plain(note, "note"), soft_wrap=True)
