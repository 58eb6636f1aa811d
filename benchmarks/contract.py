"""Never slower: tokens/s with speculation against plain decoding, by batch size and kind of text.

The contract: whoever names a method and no controller (`cost_model` then decides) has at least 0.97
of `none` everywhere, in text made to defeat the drafter as well (random tokens; sampling at
temperature 1.5), and over 1 wherever a `fixed` draft length of 5 is. A cell is a batch size and a
kind of text. In a round of a cell each variant generates the tokens of at least sixteen requests,
as many in flight as the batch has: where one ends the next prompt joins, and the last ones are
broken off. Prompts are computed alike with speculation and without; what counts is tokens/s after
that. The variants take turns step by step, whoever has fewest tokens next: a machine with other
tenants is twice as fast in one second as in the next, and so all of them see the same of it. The
next round takes other prompts, as long as there are any, so that the intervals speak of the kind of
text. Rounds go around the cells, so that the controller meets each kind of text coming from another
one.

A cell is `shown` or `broken` once Student's interval over its rounds, of logarithms, lies on one
side of 0.97, and `open` until then. It is looked at after `--rounds`, and with `--minutes`, which
goes on with open cells until none is left or the time is up, whenever its rounds have doubled. The
intervals get wider from look to look, so that at most one cell in twenty gets a false verdict
however long the run (`contract_rounds`). The column `over 1` says of cells in which a fixed length
gains beyond doubt whether the default does; the contract is broken where it loses beyond doubt.

    python -m benchmarks.contract --prompts spec_bench.jsonl --output contract.jsonl --minutes 120

Every round is a line of `--output`, and a run that was broken off goes on from there. Exits with 1
if an output differs from that of `none`, or if the contract is broken.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
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
VERDICTS = ("contract", "over 1")
BATCH_SIZES = (1, 2, 4, 8, 16, 32)
REQUESTS = 16
"""A round has the tokens of so many at least: texts differ more than machines."""
WARM_UP_TOKENS = 600
"""Generated before anything is timed, so that the controller knows what passes cost."""


def main(
    prompts: flags.Prompts,
    method: Annotated[str, typer.Option(help="The drafter.")] = "ngram",
    model: flags.Model = "smollm2-135m",
    batch_size: Annotated[
        list[int] | None, typer.Option(min=1, help="(Repeatable.) Default: 1, 2, 4, 8, 16, 32.")
    ] = None,
    kind: flags.Kinds = None,
    rounds: Annotated[int, typer.Option(min=3, help="Rounds of each cell.")] = 5,
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
        "rounds": rounds,  # when cells are looked at: not to be chosen by what was seen
    }
    with one_line_errors():
        sizes = batch_size or list(BATCH_SIZES)
        journal = Journal(output, "foretoken contract 4", settings)
        everything = read_prompts(prompts)
        sample = stratified(everything, len(everything), seed)
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
        Method(FIXED, {"method": method, "controller": "fixed", "num_speculative_tokens": 5}),
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

    def prompts(self, cell: Cell, index: int) -> list[list[int]]:
        """Those of a round, as many as the batch takes; where they run out the first come again."""
        rows = _rows(cell, index)
        if cell.kind == RANDOM:
            return [random_ids(self.llm, self.seed + row, min(self.limit, 128)) for row in rows]
        chosen = [p for p in self.sample if cell.kind in (HOT, p.kind)]
        return [encode(self.llm, chosen[row % len(chosen)], self.limit) for row in rows]

    def params(self, cell: Cell, index: int, max_tokens: int | None = None) -> list[SamplingParams]:
        """Greedy, or hot where the drafter is to be defeated.

        The first ones end one after the other, as if they had begun so: requests come and go all
        the time, whoever generates.
        """
        longest = max_tokens or self.max_tokens
        return [
            SamplingParams(
                temperature=1.5 if cell.kind in (HOT, RANDOM) else 0.0,
                seed=self.seed + row,
                max_tokens=min(longest, ceil(longest * (number + 1) / cell.batch)),
                ignore_eos=True,
            )
            for number, row in enumerate(_rows(cell, index))
        ]


def _rows(cell: Cell, index: int) -> range:
    """The numbers of a round's requests among all of the cell's: as many as may be begun."""
    most = _requests(cell) + 2 * cell.batch
    return range(index * most, (index + 1) * most)


def _requests(cell: Cell) -> int:
    """Whose tokens make a round."""
    return max(REQUESTS, cell.batch)


def _warm_up(llms: Mapping[str, LLM], texts: _Texts, most: int) -> None:
    cell = Cell(most, HOT)
    for llm in llms.values():
        params = texts.params(cell, 0, max(16, WARM_UP_TOKENS // most))
        llm.generate(texts.prompts(cell, 0)[:most], params[:most])


class _Run:
    """A variant on its way through the prompts of a round.

    Args:
        llm: generates.
        prompts: token ids.
        params: of each.
        batch: requests in flight.
    """

    def __init__(
        self,
        llm: LLM,
        prompts: Sequence[list[int]],
        params: Sequence[SamplingParams],
        batch: int,
    ) -> None:
        self._engine, self._batch = llm._engine, batch
        self._requests = [
            request
            for prompt, one in zip(prompts, params, strict=True)
            for request in llm._requests(prompt, one, trace=False)
        ]
        self._begun = 0
        self._step_seconds = 0.0

    @property
    def outputs(self) -> list[list[int]]:
        """As far as they have come."""
        return [request.output_ids for request in self._requests]

    @property
    def num_tokens(self) -> int:
        """Of all outputs."""
        return sum(request.metrics.generated_tokens for request in self._requests)

    @property
    def seconds(self) -> float:
        """Of all steps, without those of computing prompts."""
        prefill = sum(request.metrics.prefill_seconds for request in self._requests)
        return self._step_seconds - prefill

    def step(self) -> None:
        """One more step of the engine, with requests that take the places of those that ended."""
        running = [r for r in self._requests[: self._begun] if not r.finished]
        for request in self._requests[self._begun :][: self._batch - len(running)]:
            self._engine.add(request)
            self._begun += 1
        began = time.perf_counter()
        self._engine.step()
        self._step_seconds += time.perf_counter() - began

    def close(self) -> None:
        """Break off what has not ended."""
        self._engine.abort(self._requests[: self._begun])


def _round(llms: Mapping[str, LLM], texts: _Texts, cell: Cell, index: int) -> dict[str, Any]:
    prompts, params = texts.prompts(cell, index), texts.params(cell, index)
    runs = {
        label: _Run(llms[label], prompts, params, cell.batch) for label in order(list(llms), index)
    }
    for llm in llms.values():  # cells share prompts: nobody is to find their outputs remembered
        llm.reset_drafter_memory()
    enough = texts.max_tokens * _requests(cell)
    # A full collection stops the process for as long as ten passes, whoever's turn it is.
    gc.collect()
    gc.freeze()
    try:
        while unfinished := [run for run in runs.values() if run.num_tokens < enough]:
            min(unfinished, key=lambda run: run.num_tokens).step()
    finally:
        gc.unfreeze()
        for run in runs.values():
            run.close()
    speeds = {label: run.num_tokens / run.seconds for label, run in runs.items()}
    base = runs[BASELINE.label].outputs
    differing = sum(
        _differ(*pair) for run in runs.values() for pair in zip(run.outputs, base, strict=True)
    )
    return {"tokens_per_second": speeds, "differing": differing}


def _differ(one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether two outputs are not the same as far as both go."""
    return any(a != b for a, b in zip(one, other, strict=False))


def _rounds(result: Result) -> str:
    """How many, and over how many of them it was looked at last."""
    looked = result.judged in (0, result.rounds)
    return str(result.rounds) if looked else f"{result.judged} of {result.rounds}"


def _report(found: Sequence[Result], llm: LLM) -> str:
    facts = {**machine(llm.device), "dtype": str(llm.dtype).removeprefix("torch.")}
    states = [result.state for result in found]
    header = ("batch: text", "rounds", "tokens/s none", DEFAULT, FIXED, *VERDICTS, "differing")
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
            f"`{command_line('benchmarks.contract')}`",
            ", ".join(f"{name} {value}" for name, value in facts.items() if value is not None),
            markdown_table(header, rows),
            *broken_promises(found),
            f"Cells: {counts}. Outputs that differ from those of none: {differing}.",
        ]
    )


if __name__ == "__main__":
    typer.run(main)
