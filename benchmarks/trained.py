"""All drafters that can be trained, on one budget: the same text, equally often.

The first method writes the text, as `tokenleap train` does, and all others learn from it. Every
method has its default options, but draft models begin with the target's first layers. Each is then
measured by the engine on held-out prompts, one at a time.

    python -m benchmarks.trained --out build/trained --tokens 100000

A run that was stopped continues; methods that are done are not trained again. `--again` measures
these once more. It writes `trained.json` and `trained.md`, and prints the table.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks import BenchmarkError, harness
from benchmarks.harness import machine, one_line_errors, report, table
from tokenleap import LLM
from tokenleap.core.files import write_whole
from tokenleap.training.method import (
    DataSettings,
    TrainingSettings,
    training_method,
    training_methods,
)
from tokenleap.training.run import TrainingRun

METHODS = tuple(
    name for name, method in training_methods().items() if method.for_sources is not True
)
"""Those for decoder-only models."""

_FROM_TARGET = {"start": "target"}
_OPTIONS: dict[str, dict[str, Any]] = {"distill": _FROM_TARGET, "boost": _FROM_TARGET}


@one_line_errors()
def main(
    out: Annotated[Path, typer.Option(help="Folder for everything.")],
    model: harness.Model = "smollm2-135m",
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of answers to learn.")] = 100_000,
    held_out_tokens: Annotated[int, typer.Option(min=1, help="And for evaluation.")] = 20_000,
    epochs: Annotated[float, typer.Option(min=0, help="Passes over the text.")] = 2.0,
    batch_tokens: Annotated[
        int, typer.Option(min=16, help="Of a step. Little text needs small batches.")
    ] = 4096,
    method: Annotated[
        list[str] | None, typer.Option(help="A method (repeatable). Default: all.")
    ] = None,
    file: Annotated[
        list[Path] | None,
        typer.Option(help="Data as for `tokenleap train --data` (repeatable). Default: self."),
    ] = None,
    again: Annotated[bool, typer.Option(help="Measure what is done once more.")] = False,
    dtype: harness.Dtype = "auto",
) -> None:
    """Train every method on the same text, measure all, and print a table."""
    chosen = tuple(method or METHODS)
    if unknown := [name for name in chosen if name not in METHODS]:
        raise BenchmarkError(f"there is no {unknown[0]!r} here: choose of {', '.join(METHODS)}.")
    llm = LLM(model, dtype=dtype, max_num_seqs=32, speculative_config={"method": "none"})
    data = DataSettings(tuple(file or ()), tokens, held_out_tokens)
    settings = TrainingSettings(epochs=epochs, batch_tokens=batch_tokens)
    found = {}
    for name in chosen:
        found[name] = _report(llm, model, name, data, settings, out, again=again)
        _save(out, found, llm)
    print((out / "trained.md").read_text())


def _report(
    llm: LLM,
    model: str,
    name: str,
    data: DataSettings,
    settings: TrainingSettings,
    out: Path,
    *,
    again: bool,
) -> dict[str, Any]:
    """The report of one method, with the minutes of CPU time that it took."""
    folder = out / name
    done = folder / "report.json"
    before: dict[str, Any] = json.loads(done.read_text()) if done.exists() else {}
    if before and not again:
        return before
    _share_text(out, folder)
    began = time.process_time()
    method = training_method(name, _OPTIONS.get(name, {}))
    run = TrainingRun(llm, model, method, data, settings, folder, _Lines(name))
    torch.manual_seed(settings.seed)
    report = run.run()
    assert report is not None, "there is one process"
    minutes = before.get("cpu_minutes", (time.process_time() - began) / 60)
    found = {**asdict(report), "cpu_minutes": minutes}
    write_whole(done, lambda to: to.write_text(json.dumps(found, indent=2) + "\n"))
    return found


def _share_text(out: Path, folder: Path) -> None:
    """Copy the text that another method has learnt, if there is any."""
    mine = folder / "training" / "data"
    if mine.exists():
        return
    for other in sorted(out.glob("*/report.json")):
        shutil.copytree(other.parent / "training" / "data", mine)
        return


class _Lines:
    """Progress on stderr, a line at a time; see `training.report.Reporter`."""

    def __init__(self, method: str) -> None:
        self._method = method

    def say(self, text: str) -> None:
        typer.echo(f"{self._method}: {text}", err=True)

    @contextmanager
    def stage(self, doing: str, total: int) -> Iterator[Callable[[int, str], None]]:
        self.say(doing)
        yield lambda count, remark: None


def _save(out: Path, found: dict[str, dict[str, Any]], llm: LLM) -> None:
    first = next(iter(found.values()))["training"]
    learnt = (
        f"{first['conversations']:,} conversations, {first['answer_tokens']:,} tokens of answers."
    )
    text = report("trained", machine(llm.device, llm.dtype), table(list(found), _columns(found)))
    write_whole(out / "trained.json", lambda to: to.write_text(json.dumps(found, indent=2) + "\n"))
    write_whole(out / "trained.md", lambda to: to.write_text(f"{text}\n\n{learnt}\n"))


def _columns(found: Mapping[str, Any]) -> dict[str, Callable[[str], str]]:
    def chains(name: str) -> str:
        lengths = found[name]["best"]["mean_lengths"]
        return f"{lengths[min(4, len(lengths)) - 1]:.2f}"

    def perplexity(name: str) -> str:
        changed = found[name]["perplexity"]
        return f"{changed['target']:.2f} -> {changed['new']:.2f}" if changed else ""

    return {
        "method": lambda name: f"`{name}`",
        "acceptance by position": lambda name: " ".join(
            f"{share:.0%}" for share in found[name]["best"]["by_position"]
        ),
        "chains of 4, simulated": chains,
        "tokens a pass, served": lambda name: f"{found[name]['served']['mean_length']:.2f}",
        "a level of drafting": lambda name: f"{found[name]['served']['draft_share']:.1%}",
        "speed": lambda name: f"{found[name]['served']['speed_up']:.2f}x",
        "minutes of CPU": lambda name: f"{found[name]['cpu_minutes']:.0f}",
        "perplexity": perplexity,
    }


if __name__ == "__main__":
    typer.run(main)
