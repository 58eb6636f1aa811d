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
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer

from benchmarks import BenchmarkError, flags
from benchmarks.loading import Loaded, llm_for, load
from benchmarks.report import (
    command_line,
    in_one_line,
    machine,
    markdown_table,
    one_line_errors,
    progress_bar,
)
from tokenleap import LLM, SamplingParams
from tokenleap.bench.own import encode, prompt_limit
from tokenleap.bench.prompts_file import read_prompts, stratified
from tokenleap.bench.rows import Interval, bootstrap_ratio, geometric_mean
from tokenleap.bench.run import order

__all__ = ["BASELINE", "Cell", "Contestant", "cells", "contestants", "main", "measure"]

BATCH_SIZES = (1, 2, 4, 8, 16, 32)
BASELINE = "none, eager"
RUNTIMES = {"eager": "torch", "compiled": "compiled"}

Batch = Sequence[list[int]]
"""Prompts that are generated for together, as token ids."""


@dataclass(frozen=True)
class Contestant:
    """A method on a runtime.

    Args:
        llm: shared by the methods of a runtime.
        config: the method.
    """

    llm: LLM
    config: Mapping[str, Any]

    def generate(self, batch: Batch, max_tokens: int) -> list[tuple[int, ...]]:
        """Output tokens of each prompt."""
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        outputs = self.llm.generate(list(batch), params, speculative_config=self.config)
        return [output.token_ids for output in outputs]


def contestants(
    loaded: Loaded, num_speculative_tokens: int, most_rows: int, *, compiled: bool
) -> dict[str, Contestant]:
    """Every method on every runtime, on one set of weights.

    Args:
        loaded: the model.
        num_speculative_tokens: draft length of `ngram`.
        most_rows: largest batch.
        compiled: whether torch.compile takes part.
    """
    methods: dict[str, dict[str, Any]] = {
        "none": {"method": "none"},
        "ngram": {
            "method": "ngram",
            "num_speculative_tokens": num_speculative_tokens,
            "controller": "fixed",
        },
    }
    found = {}
    for way, runtime in RUNTIMES.items():
        if way == "compiled" and not compiled:
            continue
        llm = llm_for(loaded, methods["none"], runtime=runtime, max_num_seqs=most_rows)
        found.update({f"{name}, {way}": Contestant(llm, each) for name, each in methods.items()})
    return found


@dataclass(frozen=True)
class Cell:
    """One contestant at one batch size, compared with the baseline.

    Args:
        contestant: its label.
        batch_size: prompts generated for together.
        ratio: of tokens/s.
        speed: tokens/s, the geometric mean over batches.
        differing: batches with an output that differs from the baseline's.
    """

    contestant: str
    batch_size: int
    ratio: Interval
    speed: float
    differing: int

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**vars(self), "ratio": vars(self.ratio)}


def measure(
    run: Mapping[str, Contestant],
    batches: Sequence[Batch],
    rounds: int,
    max_tokens: int,
    clock: Callable[[], float] = time.perf_counter,
    advance: Callable[[], object] = lambda: None,
) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Time batches of one size.

    Args:
        run: the contestants.
        batches: of prompts.
        rounds: timed runs of each contestant and batch. One run before them warms up.
        max_tokens: generated per prompt.
        clock: seconds. `generate` returns after the device has finished.
        advance: called after every run.

    Returns:
        By contestant: tokens/s of every batch (medians over rounds), and the number of batches
        whose output differs from the baseline's.
    """
    speeds: dict[str, list[float]] = {label: [] for label in run}
    differing = dict.fromkeys(run, 0)
    for batch in batches:
        seconds: dict[str, list[float]] = {label: [] for label in run}
        outputs: dict[str, list[tuple[int, ...]]] = {}
        for index in range(rounds + 1):
            for label in order(list(run), index):
                began = clock()
                outputs[label] = run[label].generate(batch, max_tokens)
                seconds[label].append(clock() - began)
                advance()
        for label in run:
            tokens = sum(len(output) for output in outputs[label])
            speeds[label].append(tokens / median(seconds[label][1:]))
            differing[label] += outputs[label] != outputs[BASELINE]
    return speeds, differing


def cells(
    size: int, speeds: Mapping[str, Sequence[float]], differing: Mapping[str, int], seed: int
) -> list[Cell]:
    """Every contestant compared with the baseline at one batch size."""
    base = speeds[BASELINE]
    return [
        Cell(
            label,
            size,
            bootstrap_ratio([own / plain for own, plain in zip(found, base, strict=True)], seed),
            geometric_mean(found),
            differing[label],
        )
        for label, found in speeds.items()
    ]


def main(
    prompts: flags.Prompts,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the results to this file, too.")
    ] = None,
    model: flags.Model = "smollm2-135m",
    batch_size: Annotated[
        list[int] | None,
        typer.Option(min=1, max=64, help="(Repeatable.) Default: 1, 2, 4, 8, 16, 32."),
    ] = None,
    batches: Annotated[int, typer.Option(min=1, help="Batches of each size.")] = 4,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of every batch.")] = 3,
    num_speculative_tokens: Annotated[
        int, typer.Option(min=1, max=63, help="Draft length of ngram.")
    ] = 5,
    max_tokens: flags.MaxTokens = 128,
    max_prompt_tokens: flags.MaxPromptTokens = 256,
    compiled: Annotated[
        bool, typer.Option("--compiled", help="With torch.compile, too: takes minutes.")
    ] = False,
    seed: flags.Seed = 0,
    dtype: flags.Dtype = "auto",
) -> None:
    """Measure methods and runtimes on a GPU, and print Markdown tables."""
    with one_line_errors():
        if not torch.cuda.is_available():
            raise BenchmarkError("this needs a CUDA device, and there is none.")
        if json_file is not None and not json_file.parent.is_dir():
            raise BenchmarkError(f"--json: there is no folder {json_file.parent}.")
        loaded = load(model, dtype, "cuda")
        sizes = sorted(set(batch_size or BATCH_SIZES))
        run = contestants(loaded, num_speculative_tokens, max(sizes), compiled=compiled)
        sample = stratified(read_prompts(prompts), max(sizes) * batches, seed)
        llm = run[BASELINE].llm
        limit = prompt_limit(llm.max_model_len, max_prompt_tokens, max_tokens)
        ids = [encode(llm, prompt.text, limit) for prompt in sample]
        groups = {size: groups_of(ids, size, batches) for size in sizes}
        found = _all_sizes(run, groups, rounds, max_tokens, seed)
    facts = machine(llm.device, llm.dtype)
    print(report(found, facts))
    if json_file is not None:
        written = {"facts": facts, "cells": [cell.as_dict() for cell in found]}
        json_file.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")


def _all_sizes(
    run: Mapping[str, Contestant],
    groups: Mapping[int, Sequence[Batch]],
    rounds: int,
    max_tokens: int,
    seed: int,
) -> list[Cell]:
    found: list[Cell] = []
    with progress_bar() as bar:
        for size, batches in groups.items():
            total = len(batches) * len(run) * (rounds + 1)
            task = bar.add_task(f"batches of {size}", total=total)
            advance = partial(bar.advance, task)
            measured = measure(run, batches, rounds, max_tokens, advance=advance)
            found += cells(size, *measured, seed)
    return found


def groups_of(ids: Sequence[list[int]], size: int, most: int) -> list[Batch]:
    """The prompts in at most `most` batches of one size.

    Raises:
        BenchmarkError: there are too few prompts for one batch.
    """
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
    return "\n\n".join(
        [
            command_line("benchmarks.gpu"),
            in_one_line(facts),
            f"Tokens/s over those of {BASELINE}, by batch size:",
            _table(found, lambda cell: str(cell.ratio)),
            "Tokens/s of all sequences together:",
            _table(found, lambda cell: f"{cell.speed:.0f}"),
            agreement,
        ]
    )


def _table(found: Sequence[Cell], text: Callable[[Cell], str]) -> str:
    sizes = list(dict.fromkeys(cell.batch_size for cell in found))
    places = {(cell.contestant, cell.batch_size): cell for cell in found}
    labels = dict.fromkeys(cell.contestant for cell in found)
    rows = [[label, *(text(places[label, size]) for size in sizes)] for label in labels]
    return markdown_table(["", *map(str, sizes)], rows)


if __name__ == "__main__":
    typer.run(main)
