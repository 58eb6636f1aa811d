"""`tokenleap tune-layers`: find the sublayers that `layer_skip` should skip."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from tokenleap.cli.console import as_json, display, errors, plain, say, working
from tokenleap.cli.options import ModelOptions, flat, in_panel, open_llm
from tokenleap.cli.plan_trials import read_texts
from tokenleap.cli.root import check_writable, examples, write_whole
from tokenleap.lines import shaped

if TYPE_CHECKING:
    from tokenleap.core.params import SamplingParams
    from tokenleap.drafters.options import TunedLayers
    from tokenleap.tuning.tune_layers import Deadline, LayerLaboratory, LayerSearch, Trial

__all__ = ["EXAMPLES", "show_tuning", "tune_layers"]


EXAMPLES = examples(
    "tokenleap tune-layers prompts.txt --output layers.json",
    "tokenleap tune-layers mine.jsonl -o layers.json --seconds 1800 --temperature 1",
    "tokenleap generate 'Dear' --method layer_skip "
    '--speculative-config \'{"layers": "layers.json"}\'',
)

CALIBRATED = 0.15
"""Share of the time limit after which no further prompt is added."""


@dataclass(frozen=True)
class SearchOptions:
    """How much to measure, and for how long."""

    max_tokens: Annotated[int, in_panel("Search", "Tokens per prompt.", min=2)] = 64
    trials: Annotated[
        int, in_panel("Search", "Maximum timed runs, each on all prompts.", min=1)
    ] = 30
    seconds: Annotated[
        float, in_panel("Search", "Time limit after the model is loaded.", min=1)
    ] = 600
    temperature: Annotated[
        float, in_panel("Search", "0 is greedy; 1 is the model's own distribution.", min=0)
    ] = 0

    def params(self) -> SamplingParams:
        """Parameters of the calibration texts, seeded so that every run generates the same ones."""
        from tokenleap.core.params import SamplingParams

        return SamplingParams(temperature=self.temperature, max_tokens=self.max_tokens, seed=0)


@flat
def tune_layers(
    prompts: Annotated[
        Path,
        typer.Argument(
            help="Text with a prompt per line, or .jsonl with a prompt per object.",
            metavar="PROMPTS_FILE",
            show_default=False,
        ),
    ],
    *,
    output: Annotated[
        Path, in_panel("Output", "The file to write.", "--output", "-o", metavar="FILE")
    ],
    search: SearchOptions,
    target: ModelOptions,
    json_output: Annotated[bool, in_panel("Output", "Print one JSON object.", "--json")] = False,
) -> None:
    """Find the sublayers to skip with --method layer_skip.

    Predicts from acceptance rates and pass times which choices of sublayers
    and draft lengths are fast. Then times the best ones, in turn with plain
    decoding, and saves the fastest (Zhang et al., "Draft & Verify").
    Ctrl-C saves the fastest of those that were run.
    """
    check_writable(output)
    texts = read_texts(prompts)
    with working("Starting", quiet=json_output):
        params = search.params()
    laboratory = _open(target, quiet=json_output)
    found, deadline = _search(laboratory, search)
    try:
        with _reporting(found, quiet=json_output) as report:
            report("Generating the calibration texts")
            encoded = [laboratory.llm.encode(shaped(laboratory.llm, text)) for text in texts]
            laboratory.calibrate(encoded, params, lambda: deadline.passed(CALIBRATED))
            found.run()
    except KeyboardInterrupt:
        if found.trials:
            _save(output, _tuned(found, laboratory, target))
            say(f"{output} has the fastest of the {len(found.trials)} choices that were run")
        raise
    tuned = _tuned(found, laboratory, target)
    _save(output, tuned)
    if json_output:
        runs = {"trials": _trials(found)}
        display().out(as_json({"output": str(output), **tuned.model_dump(), **runs}))
        return
    show_tuning(found, laboratory, tuned, len(texts))
    use = json.dumps({"layers": str(output)})
    note = f"\nSaved: --method layer_skip --speculative-config '{use}'."
    display().print(plain(note, "note"), soft_wrap=True)


def _open(target: ModelOptions, *, quiet: bool) -> LayerLaboratory:
    from tokenleap.config import SpeculativeConfig

    llm = open_llm(target, SpeculativeConfig(), quiet=quiet)
    from tokenleap.tuning.tune_layers import LayerLaboratory

    return LayerLaboratory(llm)


def _search(laboratory: LayerLaboratory, options: SearchOptions) -> tuple[LayerSearch, Deadline]:
    from tokenleap.tuning.tune_layers import Deadline, LayerSearch

    deadline = Deadline(options.seconds)
    return LayerSearch(laboratory, laboratory.num_layers, deadline, options.trials), deadline


@contextmanager
def _reporting(found: LayerSearch, *, quiet: bool) -> Iterator[Callable[[str], None]]:
    """Show the search's progress on stderr, if that is a terminal."""
    console = errors()
    if quiet or not console.is_terminal:
        yield lambda _: None
        return
    with console.status(plain("Starting ...", "note")) as status:
        found.report = lambda doing: status.update(plain(f"{doing} ...", "note"))
        yield found.report


def _tuned(found: LayerSearch, laboratory: LayerLaboratory, target: ModelOptions) -> TunedLayers:
    from tokenleap.drafters.options import TunedLayers
    from tokenleap.tuning.tune_layers import layers_of

    best = found.best
    assert best is not None, "the caller has checked that there was a run"
    measured: dict[str, Any] = {
        "model": target.model,
        "dtype": str(laboratory.llm.dtype).removeprefix("torch."),
        "device": str(laboratory.llm.device),
        "temperature": laboratory.temperature,
        "prompts": laboratory.num_texts,
        "positions": laboratory.positions,
        **best.as_dict(),
    }
    layers = layers_of(best.estimate.skip)
    return TunedLayers(
        skip_attention=layers["skip_attention"],
        skip_mlp=layers["skip_mlp"],
        num_hidden_layers=laboratory.num_layers,
        num_speculative_tokens=best.gamma,
        measured=measured,
    )


def _trials(found: LayerSearch) -> list[dict[str, Any]]:
    """All trials for JSON."""
    from tokenleap.tuning.tune_layers import layers_of

    return [{**layers_of(trial.estimate.skip), **trial.as_dict()} for trial in found.trials]


def _save(output: Path, tuned: TunedLayers) -> None:
    write_whole(output, as_json(tuned.model_dump()) + "\n")


# How `tokenleap tune-layers` shows its result: the trials, the best one, and what to do.


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
