"""How `tokenleap tune-layers` shows its result: the trials, the best one, and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from tokenleap.cli.console import display, plain

if TYPE_CHECKING:
    from tokenleap.drafters.tuned_layers import TunedLayers
    from tokenleap.tuning.layer_laboratory import LayerLaboratory
    from tokenleap.tuning.skip_sets import Trial
    from tokenleap.tuning.tune_layers import LayerSearch

__all__ = ["show_tuning"]


def show_tuning(
    found: LayerSearch, laboratory: LayerLaboratory, tuned: TunedLayers, num_prompts: int
) -> None:
    """Print the trials, their speed, and whether skipping layers pays on this machine."""
    console = display()
    how = f"temperature {laboratory.temperature:g}" if laboratory.temperature else "greedy"
    used = laboratory.num_texts
    prompts = f"{used} prompts" if used == num_prompts else f"{used} of {num_prompts} prompts"
    console.print(
        plain(
            f"{tuned.measured['model']}, {how}, {prompts}, {laboratory.positions} tokens; alpha of "
            f"{len(found.estimates)} choices measured, {len(found.trials)} run"
        )
    )
    console.print()
    console.print(_table(found))
    console.print()
    for line in _verdict(found, tuned):
        console.print(plain(line))


def _table(found: LayerSearch) -> Table:
    headings = ("left out\nattention", "\nMLP", "\nalpha", "\nc", "\ngamma", "speed-up\npredicted")
    table = Table(box=None, pad_edge=False, header_style="head", padding=(0, 2, 0, 0))
    for heading in (*headings, "\nmeasured", "\nrange", "\nruns"):
        table.add_column(heading, justify="right", no_wrap=True)
    for trial in sorted(found.trials, key=lambda t: (-len(t.runs), -t.ratio)):
        style = "draft" if trial is found.best else ""
        table.add_row(*(plain(cell, style) for cell in _cells(trial)))
    return table


def _cells(trial: Trial) -> Sequence[str]:
    estimate = trial.estimate
    kinds = [sublayer.kind for sublayer in estimate.skip]
    return (
        str(kinds.count("attention")),
        str(kinds.count("mlp")),
        f"{estimate.alpha:.3f}",
        f"{estimate.cost:.3f}",
        str(trial.gamma),
        f"{trial.predicted:.2f}x",
        f"{trial.ratio:.2f}x",
        f"{trial.low:.2f}-{trial.high:.2f}",
        str(len(trial.runs)),
    )


def _verdict(found: LayerSearch, tuned: TunedLayers) -> list[str]:
    best = found.best
    assert best is not None, "the caller has checked that there was a run"
    lines = [
        f"Attention left out in layers: {_listed(tuned.skip_attention)}.",
        f"MLP left out in layers: {_listed(tuned.skip_mlp)}.",
    ]
    if best.ratio > 1:
        lines.append(f"Best: {best.ratio:.2f}x plain decoding, drafting {best.gamma}.")
    else:
        lines.append(
            f"None is faster than plain decoding here: the best, drafting {best.gamma}, reaches "
            f"{best.ratio:.2f}x of its speed. Use another method on this machine."
        )
    if not found.confirmed:
        times = "once" if len(best.runs) == 1 else f"{len(best.runs)} times"
        lines.append(f"It was run {times} only: to be sure, give more --seconds or --trials.")
    return lines


def _listed(layers: Sequence[int]) -> str:
    return ", ".join(map(str, layers)) or "none"
