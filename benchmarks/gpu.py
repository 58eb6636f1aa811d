"""On a GPU: `none` and `ngram` with PyTorch's operations, and with compiled MLPs.

`eager` launches every operation from the host (runtime "torch"); `compiled` (with `--compiled`)
runs the module's MLPs under `torch.compile`. Decoding is greedy; prefill counts, too. In every
round each contestant runs the batch once, in alternating order.

    python -m benchmarks.gpu --prompts spec_bench.jsonl --json gpu.json

Prints Markdown tables: tokens/s over those of `none, eager`, with a 95 % interval over batches
(a single batch has none), and tokens/s. Without a CUDA device nothing is measured.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import geometric_mean, median
from typing import Annotated, Any

import torch
import typer

from benchmarks import BenchmarkError, harness
from benchmarks.harness import Loaded, in_turn, llm_for, load, machine, one_line_errors
from tokenleap import LLM, SamplingParams
from tokenleap.bench.report import markdown_table
from tokenleap.bench.summary import Interval, bootstrap_ratio

BATCH_SIZES = (1, 2, 4, 8, 16, 32)
BASELINE = "none, eager"
RUNTIMES = {"eager": "torch", "compiled": "compiled"}

Batch = Sequence[list[int]]
"""Prompts that are generated for together, as token ids."""


@dataclass(frozen=True)
class Contestant:
    """A method on a runtime; the methods of a runtime share an `LLM`."""

    llm: LLM
    config: Mapping[str, Any]

    def generate(self, batch: Batch, max_tokens: int) -> list[tuple[int, ...]]:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        outputs = self.llm.generate(list(batch), params, speculative_config=self.config)
        return [output.token_ids for output in outputs]


def contestants(
    loaded: Loaded, num_speculative_tokens: int, most_rows: int, *, compiled: bool
) -> dict[str, Contestant]:
    """Every method on every runtime, on one set of weights."""
    ngram = {"num_speculative_tokens": num_speculative_tokens, "controller": "fixed"}
    methods: dict[str, dict[str, Any]] = {
        "none": {"method": "none"},
        "ngram": {"method": "ngram", **ngram},
    }
    found: dict[str, Contestant] = {}
    for way, runtime in RUNTIMES.items():
        if compiled or way != "compiled":
            llm = llm_for(loaded, methods["none"], runtime=runtime, max_num_seqs=most_rows)
            found |= {f"{name}, {way}": Contestant(llm, each) for name, each in methods.items()}
    return found


@dataclass(frozen=True)
class Cell:
    """One contestant at one batch size; `differing` counts batches with other outputs."""

    contestant: str
    batch_size: int
    ratio: Interval
    speed: float
    differing: int


def measure(
    run: Mapping[str, Contestant],
    batches: Sequence[Batch],
    rounds: int,
    max_tokens: int,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Cell]:
    """Time batches of one size. A run of each before the first round warms up."""

    def generate(label: str, batch: Batch) -> tuple[float, list[tuple[int, ...]]]:
        began = clock()
        outputs = run[label].generate(batch, max_tokens)
        return clock() - began, outputs

    size = len(batches[0])
    found = in_turn(list(run), batches, rounds, generate, warm_up=1, doing=f"batches of {size}")
    speeds: dict[str, list[float]] = {}
    differing = dict.fromkeys(run, 0)
    for label, by_batch in found.items():
        for place, runs in enumerate(by_batch):
            outputs = runs[-1][1]
            seconds = median(taken for taken, _ in runs)
            speeds.setdefault(label, []).append(sum(map(len, outputs)) / seconds)
            differing[label] += outputs != found[BASELINE][place][-1][1]
    return [
        Cell(label, size, _over(own, speeds[BASELINE]), geometric_mean(own), differing[label])
        for label, own in speeds.items()
    ]


def _over(own: Sequence[float], base: Sequence[float]) -> Interval:
    return bootstrap_ratio([one / other for one, other in zip(own, base, strict=True)])


@one_line_errors()
def main(
    prompts: harness.Prompts,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the results to this file, too.")
    ] = None,
    model: harness.Model = "smollm2-135m",
    batch_size: Annotated[
        list[int] | None,
        typer.Option(min=1, max=64, help="(Repeatable.) Default: 1, 2, 4, 8, 16, 32."),
    ] = None,
    batches: Annotated[int, typer.Option(min=1, help="Batches of each size.")] = 4,
    rounds: harness.Rounds = 3,
    num_speculative_tokens: Annotated[
        int, typer.Option(min=1, max=63, help="Draft length of ngram.")
    ] = 5,
    max_tokens: harness.MaxTokens = 128,
    max_prompt_tokens: harness.MaxPromptTokens = 256,
    compiled: Annotated[
        bool, typer.Option("--compiled", help="With torch.compile, too: takes minutes.")
    ] = False,
    seed: harness.Seed = 0,
    dtype: harness.Dtype = "auto",
) -> None:
    """Measure methods and runtimes on a GPU, and print Markdown tables."""
    if not torch.cuda.is_available():
        raise BenchmarkError("this needs a CUDA device, and there is none.")
    if json_file is not None and not json_file.parent.is_dir():
        raise BenchmarkError(f"--json: there is no folder {json_file.parent}.")
    sizes = sorted(set(batch_size or BATCH_SIZES))
    loaded = load(model, dtype, "cuda")
    run = contestants(loaded, num_speculative_tokens, max(sizes), compiled=compiled)
    llm = run[BASELINE].llm
    sample = harness.sample_of(prompts, max(sizes) * batches, seed)
    ids = harness.encoded(llm, sample, max_prompt_tokens, max_tokens)
    groups = [groups_of(ids, size, batches) for size in sizes]
    found = [cell for group in groups for cell in measure(run, group, rounds, max_tokens)]
    facts = machine(llm.device, llm.dtype)
    print(report(found, facts))
    if json_file is not None:
        written = {"facts": facts, "cells": [asdict(cell) for cell in found]}
        json_file.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")


def groups_of(ids: Sequence[list[int]], size: int, most: int) -> list[Batch]:
    """The prompts in at most `most` batches of one size."""
    groups = [ids[start : start + size] for start in range(0, len(ids) - size + 1, size)]
    if not groups:
        raise BenchmarkError(
            f"--batch-size {size} needs as many prompts, and there are {len(ids)}."
        )
    return groups[:most]


def report(found: Sequence[Cell], facts: Mapping[str, Any]) -> str:
    """Both tables, the machine, and whether outputs agree."""
    differing = [f"{cell.contestant} at {cell.batch_size}" for cell in found if cell.differing]
    agreement = (
        f"Outputs that differ from those of {BASELINE} (another shape may round differently): "
        f"{'; '.join(differing)}."
        if differing
        else f"All outputs are those of {BASELINE}."
    )
    return harness.report(
        "gpu",
        facts,
        f"Tokens/s over those of {BASELINE}, by batch size:",
        _table(found, lambda cell: str(cell.ratio)),
        "Tokens/s of all sequences together:",
        _table(found, lambda cell: f"{cell.speed:.0f}"),
        agreement,
    )


def _table(found: Sequence[Cell], text: Callable[[Cell], str]) -> str:
    sizes = list(dict.fromkeys(cell.batch_size for cell in found))
    places = {(cell.contestant, cell.batch_size): cell for cell in found}
    labels = dict.fromkeys(cell.contestant for cell in found)
    rows = [[label, *(text(places[label, size]) for size in sizes)] for label in labels]
    return markdown_table(["", *map(str, sizes)], rows)


if __name__ == "__main__":
    typer.run(main)
