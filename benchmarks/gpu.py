"""What graphs and steps on the device are worth on a GPU: `none` and `ngram`, three ways each.

`eager` launches every operation from the host, `graphs` replays one CUDA graph per pass, and
`on the device` replays one per step, drafting and acceptance included. All of them run the same
operations on the same weights, greedily, and prompts as well as outputs count. Batches are timed
one after the other; in every round each contestant runs the batch once, in alternating order.

    python -m benchmarks.gpu --prompts spec_bench.jsonl --json gpu.json

Prints Markdown tables: tokens/s over those of plain eager decoding, with a 95 % interval over
batches (a single batch has none), and tokens/s. Without a CUDA device nothing is measured.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Annotated, Any

import torch
import typer
from transformers import PreTrainedModel

from benchmarks import BenchmarkError, flags
from benchmarks.loading import load
from benchmarks.prompts import encode, prompt_limit, read_prompts, stratified
from benchmarks.report import command_line, machine, markdown_table, one_line_errors, progress_bar
from benchmarks.speed_run import check_writable
from foretoken import LLM, SamplingParams
from foretoken.bench.ratios import Interval, bootstrap_ratio, geometric_mean
from foretoken.bench.rounds import order
from foretoken.control import Fixed
from foretoken.core.acceptance.coupled import Coupled
from foretoken.decode import step
from foretoken.drafters.base import Drafter
from foretoken.drafters.ngram import NgramDrafter, NgramOptions
from foretoken.drafters.none import NoDrafter
from foretoken.engine.scheduler import Engine
from foretoken.request import Request
from foretoken.runtime.cuda.decoder import decoder_for
from foretoken.runtime.cuda.graphs import Capture, CudaGraphs
from foretoken.runtime.cuda.network import CudaNetwork
from foretoken.runtime.cuda.slab import StaticSlab
from foretoken.runtime.cuda.step import DeviceStep
from foretoken.runtime.target import Target

__all__ = ["BASELINE", "Batch", "Cell", "cells", "contestants", "main", "measure"]

BATCH_SIZES = (1, 2, 4, 8, 16, 32)
BASELINE = "none, eager"

Batch = Sequence[Sequence[int]]
"""Prompts that are generated together, as token ids."""


@dataclass(frozen=True)
class Contestant:
    """An engine with its target."""

    engine: Engine
    target: Target

    def generate(self, batch: Batch, max_tokens: int) -> list[list[int]]:
        """Output tokens of each prompt."""
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        size, most = self.target.vocab_size, self.target.most_tokens
        requests = [Request(ids, params, vocab_size=size, max_model_len=most) for ids in batch]
        for request in requests:
            self.engine.add(request)
        while self.engine.busy:
            self.engine.step()
        return [request.output_ids for request in requests]


def contestants(
    module: PreTrainedModel,
    capture: Callable[[], Capture],
    num_speculative_tokens: int,
    most_rows: int,
    compiler: str | None = None,
) -> dict[str, Contestant]:
    """All of them on one set of weights.

    Args:
        module: the loaded model.
        capture: makes graphs; called once for every set of them.
        num_speculative_tokens: draft length of `ngram`.
        most_rows: largest batch.
        compiler: a backend of `torch.compile`; None leaves out what is compiled.
    """
    decoder, device = decoder_for(module), module.device
    ways = {
        "eager": CudaNetwork(decoder, device, None),
        "graphs": CudaNetwork(decoder, device, capture()),
        "on the device": CudaNetwork(decoder, device, capture()),
    }
    if compiler is not None:
        ways["on the device, compiled"] = CudaNetwork(decoder, device, capture(), compiler)
    drafters: dict[str, Callable[[], tuple[Drafter, int]]] = {
        "none": lambda: (NoDrafter(), 0),
        "ngram": lambda: (NgramDrafter(NgramOptions()), num_speculative_tokens),
    }
    found = {}
    for way, network in ways.items():
        target = _target(module, network)
        advance = DeviceStep(target) if way.startswith("on the device") else step
        for method, make in drafters.items():
            drafter, length = make()
            engine = Engine(target, drafter, Coupled(), Fixed(length), most_rows, step=advance)
            found[f"{method}, {way}"] = Contestant(engine, target)
    return found


def _target(module: PreTrainedModel, network: CudaNetwork) -> Target:
    target = Target(module, runtime="torch").with_network(network)
    target._slab = StaticSlab()
    return target


@dataclass(frozen=True)
class Cell:
    """One contestant at one batch size, against the baseline.

    Args:
        contestant: its label.
        batch_size: prompts generated together.
        ratio: of tokens/s.
        speed: tokens/s, the geometric mean over batches.
        differing: batches with an output that is not the baseline's.
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
    clock: Callable[[], float],
    advance: Callable[[], object] = lambda: None,
) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Time batches of one size.

    Args:
        run: the contestants.
        batches: what they generate for.
        rounds: runs of each contestant and batch that count; one more comes first, in which graphs
            are captured.
        max_tokens: generated per prompt.
        clock: seconds, once the device is done.
        advance: called after every run.

    Returns:
        Tokens/s of every batch (medians over rounds) and the number of batches whose output
        differs from the baseline's, by contestant.
    """
    speeds: dict[str, list[float]] = {label: [] for label in run}
    differing = dict.fromkeys(run, 0)
    for batch in batches:
        seconds: dict[str, list[float]] = {label: [] for label in run}
        outputs: dict[str, list[list[int]]] = {}
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
    """Every contestant against the baseline at one batch size."""
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
    json_file: flags.JsonFile = None,
    model: flags.Model = "smollm2-135m",
    batch_size: Annotated[
        list[int] | None,
        typer.Option(min=1, max=64, help="(Repeatable.) Default: 1, 2, 4, 8, 16, 32."),
    ] = None,
    batches: Annotated[int, typer.Option(min=1, help="Batches of each size.")] = 4,
    rounds: flags.Rounds = 3,
    num_speculative_tokens: Annotated[
        int, typer.Option(min=1, max=63, help="Draft length of ngram.")
    ] = 5,
    max_tokens: flags.MaxTokens = 128,
    max_prompt_tokens: flags.MaxPromptTokens = 256,
    compiled: Annotated[
        bool, typer.Option("--compiled", help="With torch.compile, too: minutes for every shape.")
    ] = False,
    seed: flags.Seed = 0,
    dtype: flags.Dtype = "auto",
) -> None:
    """Measure what CUDA graphs and device steps are worth, and print Markdown tables."""
    with one_line_errors():
        if not torch.cuda.is_available():
            raise BenchmarkError(
                "no CUDA device is available here, and this measures nothing else."
            )
        check_writable(json_file)
        loaded = load(model, dtype, "cuda")
        sizes = sorted(set(batch_size or BATCH_SIZES))
        run = contestants(
            loaded.module,
            lambda: CudaGraphs(loaded.module.device),
            num_speculative_tokens,
            max(sizes),
            "inductor" if compiled else None,
        )
        sample = stratified(read_prompts(prompts), max(sizes) * batches, seed)
        reader = LLM(loaded.module, tokenizer=loaded.tokenizer, runtime="torch")
        limit = prompt_limit(reader, max_prompt_tokens, max_tokens)
        ids = [encode(reader, prompt, limit) for prompt in sample]
        groups = {size: groups_of(ids, size, batches) for size in sizes}
        found = _all_sizes(run, groups, rounds, max_tokens, seed)
    facts = {
        **machine(loaded.module.device),
        "dtype": str(loaded.module.dtype).removeprefix("torch."),
    }
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
            measured = measure(
                run, batches, rounds, max_tokens, _when_done, partial(bar.advance, task)
            )
            found += cells(size, *measured, seed)
    return found


def groups_of(ids: Sequence[Sequence[int]], size: int, most: int) -> list[Batch]:
    """The prompts in batches of one size, at most so many.

    Raises:
        BenchmarkError: there are too few for one.
    """
    groups = [ids[start : start + size] for start in range(0, len(ids) - size + 1, size)]
    if not groups:
        raise BenchmarkError(
            f"--batch-size {size} needs as many prompts, and there are {len(ids)}."
        )
    return groups[:most]


def _when_done() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()


def report(found: Sequence[Cell], facts: Mapping[str, Any]) -> str:
    """Both tables, what they were measured on, and whether outputs agree."""
    differing = [f"{cell.contestant} at {cell.batch_size}" for cell in found if cell.differing]
    agreement = (
        f"Outputs that are not those of {BASELINE} (another shape may round otherwise): "
        f"{'; '.join(differing)}."
        if differing
        else f"All outputs are those of {BASELINE}."
    )
    return "\n\n".join(
        [
            f"`{command_line('benchmarks.gpu')}`",
            ", ".join(f"{name} {value}" for name, value in facts.items() if value is not None),
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
