"""Never slower: tokens/s with speculation against plain decoding, by batch size and kind of text.

The contract: with the `cost_model` controller at least 0.97 of `none` everywhere, in text made to
defeat the drafter as well (random tokens; sampling at temperature 1.5), and over 1 wherever a
`fixed` draft length would be. All prompts of a cell are generated as one batch; in every round each
variant runs once, in alternating order, and a round gives one ratio of tokens/s (prefill included;
prompts are cut short, so that it is little). Intervals are over rounds.

    python -m benchmarks.contract --prompts spec_bench.jsonl

Exits with 1 if an output differs from that of `none`, or if the contract is broken beyond doubt.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.loading import BASELINE, Method, llm_for, load
from benchmarks.prompts import Prompt, encode, read_prompts, stratified
from benchmarks.report import command_line, machine, markdown_table, one_line_errors, progress_bar
from benchmarks.speed_report import verdict
from benchmarks.speed_run import check_writable, random_ids
from foretoken import LLM, SamplingParams
from foretoken.bench.ratios import Interval, bootstrap_ratio
from foretoken.bench.rounds import order

__all__ = ["Cell", "broken_promises", "main"]

STEERED, FIXED = "cost_model", "fixed"
RANDOM, HOT = "random tokens", "temperature 1.5"
BATCH_SIZES = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True)
class Cell:
    """One batch size on one kind of text.

    Args:
        batch: prompts generated together.
        kind: of the text.
        ratios: per variant tokens/s over those of `none`.
        tokens_per_second: of `none`, the median over rounds.
        differing: outputs of any variant that are not those of `none`.
    """

    batch: int
    kind: str
    ratios: Mapping[str, Interval]
    tokens_per_second: float
    differing: int


@dataclass(frozen=True)
class Work:
    """What a cell generates."""

    batch: int
    kind: str
    prompts: Sequence[Sequence[int]]
    params: Sequence[SamplingParams]


def broken_promises(cells: Sequence[Cell]) -> list[str]:
    """Cells below the floor beyond doubt, and cells that miss what a fixed length gains."""
    said = []
    for cell in cells:
        steered, fixed = cell.ratios[STEERED], cell.ratios[FIXED]
        if verdict(steered) == "missed":
            said.append(f"batch {cell.batch}, {cell.kind}: {steered} is below the floor.")
        gains = fixed.low is not None and fixed.low > 1
        if gains and steered.high is not None and steered.high < 1:
            said.append(f"batch {cell.batch}, {cell.kind}: {steered}, where fixed has {fixed}.")
    return said


def main(
    prompts: Annotated[Path, typer.Option(help="Spec-Bench's JSON lines or others.")],
    method: Annotated[str, typer.Option(help="The drafter.")] = "ngram",
    model: Annotated[str, typer.Option(help="Folder, GGUF file or alias.")] = "smollm2-135m",
    batch_size: Annotated[
        list[int] | None, typer.Option(min=1, help="(Repeatable.) Default: 1, 2, 4, 8, 16, 32.")
    ] = None,
    kind: Annotated[list[str] | None, typer.Option(help="(Repeatable.) Default: all.")] = None,
    rounds: Annotated[int, typer.Option(min=2, help="Runs of each cell and variant.")] = 5,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens generated per prompt.")] = 64,
    max_prompt_tokens: Annotated[int, typer.Option(min=8, help="Of longer ones the ends.")] = 256,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write everything measured to this file.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the sample and of sampling.")] = 0,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="Where the model runs.")] = "auto",
) -> None:
    """Measure the contract and print a Markdown table."""
    with one_line_errors():
        check_writable(json_file)
        sizes = batch_size or BATCH_SIZES
        sample = stratified(read_prompts(prompts), max(sizes), seed)
        llms = _llms(model, method, max(sizes), dtype, device)
        work = [
            item
            for size in sizes
            for item in _work(
                llms[BASELINE.label], sample, size, max_tokens, max_prompt_tokens, seed
            )
            if not kind or item.kind in kind
        ]
        with progress_bar() as bar:
            cells = [_measure(llms, item, rounds) for item in bar.track(work, description="cells")]
    print(f"`{command_line('benchmarks.contract')}`\n")
    facts = {**machine(llms[BASELINE.label].device), "dtype": str(llms[BASELINE.label].dtype)}
    print(", ".join(f"{k} {v}" for k, v in facts.items() if v is not None) + "\n")
    print(_table(cells))
    broken = broken_promises(cells)
    differing = sum(cell.differing for cell in cells)
    print("\n" + "\n".join([*broken, f"Outputs that differ from those of none: {differing}."]))
    if json_file is not None:
        json_file.write_text(json.dumps([asdict(cell) for cell in cells], indent=1) + "\n")
    raise typer.Exit(1 if broken or differing else 0)


def _llms(model: str, method: str, most: int, dtype: str, device: str) -> dict[str, LLM]:
    loaded = load(model, dtype, device)
    variants = [
        BASELINE,
        Method(STEERED, {"method": method, "controller": "cost_model"}),
        Method(FIXED, {"method": method}),
    ]
    return {variant.label: llm_for(loaded, variant, max_num_seqs=most) for variant in variants}


def _work(
    llm: LLM, sample: Sequence[Prompt], size: int, max_tokens: int, limit: int, seed: int
) -> Iterator[Work]:
    """A batch of every kind, and two that are made to defeat drafters."""

    def params(temperature: float) -> list[SamplingParams]:
        return [
            SamplingParams(
                temperature=temperature, seed=seed + row, max_tokens=max_tokens, ignore_eos=True
            )
            for row in range(size)
        ]

    for kind in dict.fromkeys(prompt.kind for prompt in sample):
        chosen = [prompt for prompt in sample if prompt.kind == kind][:size]
        ids = [encode(llm, chosen[row % len(chosen)], limit) for row in range(size)]
        yield Work(size, kind, ids, params(0.0))
    texts = [encode(llm, sample[row % len(sample)], limit) for row in range(size)]
    yield Work(size, HOT, texts, params(1.5))
    noise = [random_ids(llm, seed + row, min(limit, 128)) for row in range(size)]
    yield Work(size, RANDOM, noise, params(1.5))


def _measure(llms: Mapping[str, LLM], work: Work, rounds: int) -> Cell:
    speeds: dict[str, list[float]] = {label: [] for label in llms}
    expected: list[tuple[int, ...]] = []
    differing = 0
    gc.collect()
    for index in range(rounds + 1):  # the first round warms up
        for label in order(list(llms), index):
            began = time.perf_counter()
            outputs = llms[label].generate(work.prompts, work.params)
            seconds = time.perf_counter() - began
            found = [output.token_ids for output in outputs]
            expected = expected or found
            differing += sum(a != b for a, b in zip(found, expected, strict=True))
            if index:
                speeds[label].append(sum(map(len, found)) / seconds)
    base = speeds[BASELINE.label]
    return Cell(
        batch=work.batch,
        kind=work.kind,
        ratios={
            label: bootstrap_ratio([a / b for a, b in zip(speeds[label], base, strict=True)])
            for label in (STEERED, FIXED)
        },
        tokens_per_second=sorted(base)[len(base) // 2],
        differing=differing,
    )


def _table(cells: Sequence[Cell]) -> str:
    header = ("batch: text", "tokens/s none", STEERED, FIXED, "contract", "differing")
    rows = [
        [
            f"{cell.batch}: {cell.kind}",
            f"{cell.tokens_per_second:.0f}",
            str(cell.ratios[STEERED]),
            str(cell.ratios[FIXED]),
            verdict(cell.ratios[STEERED]),
            str(cell.differing),
        ]
        for cell in cells
    ]
    return markdown_table(header, rows)


if __name__ == "__main__":
    typer.run(main)
