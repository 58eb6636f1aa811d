"""Never slower: tokens/s with speculation against plain decoding, by batch size and kind of text.

The contract: whoever names a method and no controller (`cost_model` then decides) has at least 0.97
of `none` everywhere, in text made to defeat the drafter as well (random tokens; sampling at
temperature 1.5), and over 1 wherever a `fixed` draft length would be. A cell is a batch size and a
kind of text; its prompts are generated as one batch. In a round of a cell each variant runs once,
in alternating order, which gives one ratio of tokens/s (prefill included; prompts are cut short, so
that it is little). Rounds go around the cells, so that the controller meets each kind of text
coming from another one. A cell is `shown` or `broken` once it has had `--rounds` and the 95 %
interval over its rounds lies on one side of 0.97, and `open` until then.

    python -m benchmarks.contract --prompts spec_bench.jsonl --output contract.jsonl --minutes 120

Every round is a line of `--output`, and a run that was broken off goes on from there. With
`--minutes`, cells that are open after their rounds get more of them until none is open or the time
is up. Exits with 1 if an output differs from that of `none`, or if the contract is broken.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks import BenchmarkError, flags
from benchmarks.contract_rounds import DEFAULT, FIXED, Cell, Result, broken_promises, measure
from benchmarks.loading import BASELINE, Method, llm_for, load
from benchmarks.prompts import Prompt, encode, prompt_limit, read_prompts, stratified
from benchmarks.report import command_line, machine, markdown_table, one_line_errors
from benchmarks.speed_run import random_ids
from foretoken import LLM, SamplingParams
from foretoken.bench.journal import Journal
from foretoken.bench.rounds import order

__all__ = ["main"]

RANDOM, HOT = "random tokens", "temperature 1.5"
BATCH_SIZES = (1, 2, 4, 8, 16, 32)
WARM_UP_TOKENS = 600
"""Asked for before anything is timed: the library then measures what passes cost, once."""


def main(
    prompts: flags.Prompts,
    method: Annotated[str, typer.Option(help="The drafter.")] = "ngram",
    model: flags.Model = "smollm2-135m",
    batch_size: Annotated[
        list[int] | None, typer.Option(min=1, help="(Repeatable.) Default: 1, 2, 4, 8, 16, 32.")
    ] = None,
    kind: flags.Kinds = None,
    rounds: Annotated[int, typer.Option(min=2, help="Rounds of each cell.")] = 5,
    minutes: Annotated[
        float | None, typer.Option(min=0, help="Time limit, spent on cells that are open.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="JSON lines, a round each; one that exists is continued.")
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
    }
    with one_line_errors():
        sizes = batch_size or list(BATCH_SIZES)
        journal = Journal(output, "foretoken contract 1", settings)
        sample = stratified(read_prompts(prompts), max(BATCH_SIZES), seed)
        llms = _llms(model, method, max(sizes), dtype, device)
        limit = prompt_limit(llms[BASELINE.label], max_prompt_tokens, max_tokens)
        texts = _Texts(llms[BASELINE.label], sample, max_tokens, limit, seed)
        _warm_up(llms, texts, max(sizes))
        found = measure(
            _cells(sample, sizes, kind),
            journal,
            rounds,
            lambda cell, index: _round(llms, texts, cell, index),
            None if minutes is None else 60 * minutes,
        )
    print(_report(found, llms[BASELINE.label]))
    failed = broken_promises(found) or any(result.differing for result in found)
    raise typer.Exit(1 if failed else 0)


def _cells(
    sample: Sequence[Prompt], sizes: Sequence[int], wanted: Sequence[str] | None
) -> list[Cell]:
    """Every batch size on the kinds wanted, or on all and the two that defeat drafters."""
    kinds = [*dict.fromkeys(prompt.kind for prompt in sample), HOT, RANDOM]
    for name in wanted or ():
        if name not in kinds:
            raise BenchmarkError(f"--kind {name}: not among {', '.join(kinds)}.")
    return [Cell(size, name) for size in sizes for name in wanted or kinds]


def _llms(model: str, method: str, most: int, dtype: str, device: str) -> dict[str, LLM]:
    loaded = load(model, dtype, device)
    variants = [
        BASELINE,
        Method(DEFAULT, {"method": method}),
        Method(FIXED, {"method": method, "controller": "fixed"}),
    ]
    return {variant.label: llm_for(loaded, variant, max_num_seqs=most) for variant in variants}


@dataclass(frozen=True)
class _Texts:
    """What cells generate from.

    Args:
        llm: whose tokenizer it is.
        sample: prompts of all kinds.
        max_tokens: generated for each.
        limit: most tokens of a prompt.
        seed: of random tokens and of sampling.
    """

    llm: LLM
    sample: Sequence[Prompt]
    max_tokens: int
    limit: int
    seed: int

    def prompts(self, cell: Cell) -> list[list[int]]:
        """As many as the batch takes; of too few some twice."""
        rows = range(cell.batch)
        if cell.kind == RANDOM:
            return [random_ids(self.llm, self.seed + row, min(self.limit, 128)) for row in rows]
        chosen = [p for p in self.sample if cell.kind in (HOT, p.kind)]
        return [encode(self.llm, chosen[row % len(chosen)], self.limit) for row in rows]

    def params(self, cell: Cell, max_tokens: int | None = None) -> list[SamplingParams]:
        """Greedy, or hot where the drafter is to be defeated."""
        return [
            SamplingParams(
                temperature=1.5 if cell.kind in (HOT, RANDOM) else 0.0,
                seed=self.seed + row,
                max_tokens=max_tokens or self.max_tokens,
                ignore_eos=True,
            )
            for row in range(cell.batch)
        ]


def _warm_up(llms: Mapping[str, LLM], texts: _Texts, most: int) -> None:
    cell = Cell(most, HOT)
    for llm in llms.values():
        llm.generate(texts.prompts(cell), texts.params(cell, max(16, WARM_UP_TOKENS // most)))


def _round(llms: Mapping[str, LLM], texts: _Texts, cell: Cell, index: int) -> dict[str, Any]:
    prompts, params = texts.prompts(cell), texts.params(cell)
    speeds: dict[str, float] = {}
    found: dict[str, list[tuple[int, ...]]] = {}
    for label in order(list(llms), index):
        began = time.perf_counter()
        outputs = llms[label].generate(prompts, params)
        seconds = time.perf_counter() - began
        found[label] = [output.token_ids for output in outputs]
        speeds[label] = sum(map(len, found[label])) / seconds
    base = found[BASELINE.label]
    differing = sum(a != b for each in found.values() for a, b in zip(each, base, strict=True))
    return {"tokens_per_second": speeds, "differing": differing}


def _report(found: Sequence[Result], llm: LLM) -> str:
    facts = {**machine(llm.device), "dtype": str(llm.dtype).removeprefix("torch.")}
    states = [result.state for result in found]
    header = ("batch: text", "rounds", "tokens/s none", DEFAULT, FIXED, "contract", "differing")
    rows = [
        [
            str(result.cell),
            str(result.rounds),
            f"{result.tokens_per_second:.0f}",
            *(str(result.ratios.get(label, "-")) for label in (DEFAULT, FIXED)),
            result.state,
            str(result.differing),
        ]
        for result in found
    ]
    counts = ", ".join(f"{states.count(state)} {state}" for state in ("shown", "open", "broken"))
    differing = sum(result.differing for result in found)
    return "\n\n".join(
        [
            f"`{command_line('benchmarks.contract')}`",
            ", ".join(f"{name} {value}" for name, value in facts.items() if value is not None),
            markdown_table(header, rows),
            *broken_promises(found),
            f"Cells: {counts}. Outputs that differ from those of none: {differing}.",
        ]
    )


if __name__ == "__main__":
    typer.run(main)
