"""The contract "never slower": tokens/s with speculation over those of plain decoding.

A user who names a method and no controller gets the default controller, `cost_model`. The contract
has two parts, for every batch size and every kind of text:

- `contract`: the default has at least 0.97 of the tokens/s of `none`. Two kinds of text are made to
  defeat drafters: random tokens, and sampling at temperature 1.5.
- `over 1`: where a fixed draft length of 5 is faster than `none`, the default is, too.

A cell is one batch size and one kind of text. Its verdict follows from a 95 % interval of the ratio
over rounds (`contract_rounds` says which interval, and when it is looked at):

- `shown`: the interval is above 0.97 (for `over 1`: above 1).
- `broken`: the interval is below 0.97 (below 1).
- `open` (`not shown`): the interval contains it.

    python -m benchmarks.contract --prompts spec_bench.jsonl --output contract.jsonl --minutes 120

After `--rounds` rounds of every cell, `--minutes` goes on with the open cells until none is left or
the time is up. Every round is a line of `--output`, from which an interrupted run continues. Exits
with 1 if an output differs from that of `none`, or if a cell is broken.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from benchmarks import BenchmarkError, flags
from benchmarks.contract_rounds import DEFAULT, FIXED, Cell, Result, broken_promises, measure
from benchmarks.contract_run import HOT, RANDOM, Texts, run_round, warm_up
from benchmarks.loading import llm_for, load
from benchmarks.report import (
    command_line,
    in_one_line,
    machine,
    markdown_table,
    one_line_errors,
)
from tokenleap import LLM
from tokenleap.bench.contestants import BASELINE, methods
from tokenleap.bench.own import prompt_limit
from tokenleap.bench.prompts_file import Prompt, read_prompts, stratified
from tokenleap.bench.run import Journal

__all__ = ["main"]

BATCH_SIZES = (1, 2, 4, 8, 16, 32)


def main(
    prompts: flags.Prompts,
    method: Annotated[str, typer.Option(help="A drafter, or JSON of its config.")] = "ngram",
    model: flags.Model = "smollm2-135m",
    batch_size: Annotated[
        list[int] | None, typer.Option(min=1, help="(Repeatable.) Default: 1, 2, 4, 8, 16, 32.")
    ] = None,
    kind: flags.Kinds = None,
    rounds: Annotated[int, typer.Option(min=3, help="Rounds of each cell.")] = 5,
    minutes: Annotated[
        float | None, typer.Option(min=0, help="Time limit; open cells get more rounds.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="JSON lines, one per round; an existing file is continued.")
    ] = None,
    max_tokens: flags.MaxTokens = 64,
    max_prompt_tokens: flags.MaxPromptTokens = 256,
    seed: flags.Seed = 0,
    dtype: flags.Dtype = "auto",
    device: flags.Device = "auto",
) -> None:
    """Measure the contract and print a Markdown table."""
    settings = {
        "prompts": prompts.name,
        "method": method,
        "model": model,
        "dtype": dtype,
        "device": device,
        "seed": seed,
        "max_tokens": max_tokens,
        "max_prompt_tokens": max_prompt_tokens,
        "rounds": rounds,  # when cells are looked at may not depend on what was seen
    }
    with one_line_errors():
        sizes = batch_size or list(BATCH_SIZES)
        journal = Journal(output, "tokenleap contract 4", settings)
        everything = read_prompts(prompts)
        sample = stratified(everything, len(everything), seed)
        llms = _llms(model, method, max(sizes), dtype, device)
        plain = llms[BASELINE.label]
        limit = prompt_limit(plain.max_model_len, max_prompt_tokens, max_tokens)
        texts = Texts(plain, sample, max_tokens, limit, seed)
        warm_up(llms, texts, max(sizes))
        found = measure(
            _cells(sample, sizes, kind),
            journal,
            rounds,
            lambda cell, index: run_round(llms, texts, cell, index),
            None if minutes is None else 60 * minutes,
        )
    print(_report(found, plain))
    failed = broken_promises(found) or any(result.differing for result in found)
    raise typer.Exit(1 if failed else 0)


def _cells(
    sample: Sequence[Prompt], sizes: Sequence[int], wanted: Sequence[str] | None
) -> list[Cell]:
    """Every batch size with every wanted kind of text; by default all kinds."""
    kinds = [*dict.fromkeys(prompt.kind for prompt in sample), HOT, RANDOM]
    for name in wanted or ():
        if name not in kinds:
            raise BenchmarkError(f"--kind {name}: not among {', '.join(kinds)}.")
    return [Cell(size, name) for size in sizes for name in wanted or kinds]


def _llms(model: str, method: str, most: int, dtype: str, device: str) -> dict[str, LLM]:
    loaded = load(model, dtype, device)
    _, drafter = methods([method], None, None)
    configs = {
        BASELINE.label: BASELINE.config,
        DEFAULT: drafter.config,
        FIXED: {**drafter.config, "controller": "fixed", "num_speculative_tokens": 5},
    }
    return {label: llm_for(loaded, each, max_num_seqs=most) for label, each in configs.items()}


def _rounds(result: Result) -> str:
    """The number of rounds, and of those at the last look if there were more since."""
    looked = result.judged in (0, result.rounds)
    return str(result.rounds) if looked else f"{result.judged} of {result.rounds}"


def _report(found: Sequence[Result], llm: LLM) -> str:
    states = [result.state for result in found]
    header = ("batch: text", "rounds", "tokens/s none", DEFAULT, FIXED, "contract", "over 1")
    rows = [
        [
            str(result.cell),
            _rounds(result),
            f"{result.tokens_per_second:.0f}",
            *(str(result.ratios.get(label, "-")) for label in (DEFAULT, FIXED)),
            result.state,
            result.gain,
            str(result.differing),
        ]
        for result in found
    ]
    counts = ", ".join(f"{states.count(state)} {state}" for state in ("shown", "open", "broken"))
    differing = sum(result.differing for result in found)
    return "\n\n".join(
        [
            command_line("benchmarks.contract"),
            in_one_line(machine(llm.device, llm.dtype)),
            markdown_table((*header, "differing"), rows),
            *broken_promises(found),
            f"Cells: {counts}. Outputs that differ from those of none: {differing}.",
        ]
    )


if __name__ == "__main__":
    typer.run(main)
