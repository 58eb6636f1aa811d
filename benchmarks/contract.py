"""The contract "never slower": tokens/s with speculation over those of plain decoding.

A user who names a method and no controller gets the default controller, `cost_model`. The contract
has two parts, for every batch size and every kind of text:

- `contract`: the default has at least 0.97 of the tokens/s of `none`. Two kinds of text are made to
  defeat drafters: random tokens, and sampling at temperature 1.5.
- `over 1`: where a fixed draft length of 5 is faster than `none`, the default is, too.

A cell is one batch size and one kind of text. Its verdict follows from a 95 % interval of the ratio
over rounds:

- `shown`: the interval is above 0.97 (for `over 1`: above 1).
- `broken`: the interval is below 0.97 (below 1).
- `open` (`not shown`): the interval contains it.

    python -m benchmarks.contract --prompts spec_bench.jsonl --output contract.jsonl --minutes 120

After `--rounds` rounds of every cell, `--minutes` goes on with the open cells until none is left or
the time is up. Every round is a line of `--output`, from which an interrupted run continues. Exits
with 1 if an output differs from that of `none`, or if a cell is broken.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import ceil
from statistics import median_high
from typing import Annotated, Any, NoReturn, Protocol

import typer

from benchmarks import BenchmarkError, harness
from benchmarks.harness import (
    Loaded,
    llm_for,
    load,
    machine,
    one_line_errors,
    report,
    sample_of,
    table,
)
from tokenleap import LLM, SamplingParams
from tokenleap.bench.contestants import BASELINE, methods
from tokenleap.bench.own import encode, prompt_limit, random_ids
from tokenleap.bench.prompts_file import Prompt
from tokenleap.bench.run import Journal, order
from tokenleap.bench.summary import Interval, t_ratio
from tokenleap.core import clock
from tokenleap.engine.jobs import JobSpec

BATCH_SIZES = (1, 2, 4, 8, 16, 32)

DEFAULT, FIXED = "default", "fixed"
"""The variants besides the baseline: the default controller, and a fixed draft length."""

FLOOR = 0.97
"""The contract: the least ratio of tokens/s to those of `none`."""

ERRORS = 0.05
"""The share of cells that may get a false verdict."""

RANDOM, HOT = "random tokens", "temperature 1.5"
REQUESTS = 16
"""Requests whose tokens make a round at least: single texts differ more than machines do."""
WARM_UP_TOKENS = 600
"""Generated before anything is timed, so that the controller knows what passes cost."""
RANDOM_TOKENS = 128
"""Length of a random prompt at most."""


@one_line_errors()
def main(
    prompts: harness.Prompts,
    method: Annotated[str, typer.Option(help="A drafter, or JSON of its config.")] = "ngram",
    model: harness.Model = "smollm2-135m",
    batch_size: Annotated[
        list[int] | None, typer.Option(min=1, help="(Repeatable.) Default: 1, 2, 4, 8, 16, 32.")
    ] = None,
    kind: harness.Kinds = None,
    rounds: Annotated[int, typer.Option(min=3, help="Rounds of each cell.")] = 5,
    minutes: Annotated[
        float | None, typer.Option(min=0, help="Time limit; open cells get more rounds.")
    ] = None,
    output: harness.Output = None,
    max_tokens: harness.MaxTokens = 64,
    max_prompt_tokens: harness.MaxPromptTokens = 256,
    seed: harness.Seed = 0,
    dtype: harness.Dtype = "auto",
    device: harness.Device = "auto",
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
    sizes = batch_size or list(BATCH_SIZES)
    journal = Journal(output, "tokenleap contract 4", settings)
    sample = sample_of(prompts, seed=seed)
    llms = _llms(model, method, max(sizes), dtype, device)
    plain = llms[BASELINE.label]
    limit = prompt_limit(plain.max_model_len, max_prompt_tokens, max_tokens)
    texts = Texts(plain, sample, max_tokens, limit, seed)
    warm_up(llms, texts, max(sizes))
    found = measure(
        cells_of(sizes, kinds_of(sample), kind),
        journal,
        rounds,
        lambda cell, index: run_round(llms, texts, cell, index),
        None if minutes is None else 60 * minutes,
    )
    conclude("contract", machine(plain.device, plain.dtype), found)


def conclude(program: str, facts: Mapping[str, Any], found: Sequence[Result]) -> NoReturn:
    """Print the table, and exit with 1 if a promise is broken."""
    print(report(program, facts, *_findings(found)))
    failed = broken_promises(found) or any(result.differing for result in found)
    raise typer.Exit(1 if failed else 0)


def cells_of(
    sizes: Sequence[int], kinds: Sequence[str], wanted: Sequence[str] | None
) -> list[Cell]:
    for name in wanted or ():
        if name not in kinds:
            raise BenchmarkError(f"--kind {name}: not among {', '.join(kinds)}.")
    return [Cell(size, name) for size in sizes for name in wanted or kinds]


def _llms(model: str, method: str, most: int, dtype: str, device: str) -> dict[str, LLM]:
    _, drafter = methods([method], None, None)
    return variants(load(model, dtype, device), drafter.config, most)


def variants(loaded: Loaded, config: Mapping[str, Any], most: int) -> dict[str, LLM]:
    """The variants of a drafter, for batches up to `most`."""
    configs = {
        BASELINE.label: BASELINE.config,
        DEFAULT: config,
        FIXED: {**config, "controller": "fixed", "num_speculative_tokens": 5},
    }
    return {label: llm_for(loaded, each, max_num_seqs=most) for label, each in configs.items()}


def _rounds(result: Result) -> str:
    """The number of rounds, and of those at the last look if there were more since."""
    looked = result.judged in (0, result.rounds)
    return str(result.rounds) if looked else f"{result.judged} of {result.rounds}"


def _findings(found: Sequence[Result]) -> list[str]:
    states = [result.state for result in found]
    counts = ", ".join(f"{states.count(state)} {state}" for state in ("shown", "open", "broken"))
    differing = sum(result.differing for result in found)
    cells = table(
        found,
        {
            "batch: text": lambda result: result.cell,
            "rounds": _rounds,
            "tokens/s none": lambda result: f"{result.tokens_per_second:.0f}",
            DEFAULT: lambda result: result.ratios.get(DEFAULT, "-"),
            FIXED: lambda result: result.ratios.get(FIXED, "-"),
            "contract": lambda result: result.state,
            "over 1": lambda result: result.gain,
            "differing": lambda result: result.differing,
        },
    )
    return [
        cells,
        *broken_promises(found),
        f"Cells: {counts}. Outputs that differ from those of none: {differing}.",
    ]


# Verdicts on cells, and which cell gets the next round
#
# A test that is repeated after every round and stops at the first verdict finds one in noise sooner
# or later. So a cell is looked at only after its `--rounds` rounds, and again whenever their number
# has doubled; in between its verdict stays. The k-th look uses Student's interval of the logarithms
# at level 1 - 0.05 / 2^k. All looks at a cell together then give a false verdict in at most 5 % of
# cells, however long the run.


@dataclass(frozen=True)
class Cell:
    """One batch size on one kind of text."""

    batch: int
    kind: str

    def __str__(self) -> str:
        return f"{self.batch}: {self.kind}"


@dataclass(frozen=True)
class Result:
    """The measurements of a cell so far.

    Ratios (of tokens/s over those of `none`, by variant) and speed (the median of `none`) are
    computed from the `judged` rounds of the last look; before the first look (0), from all rounds.
    """

    cell: Cell
    rounds: int
    judged: int
    ratios: Mapping[str, Interval]
    tokens_per_second: float
    differing: int

    @property
    def state(self) -> str:
        """Of the first part of the contract: 'shown', 'broken' or 'open'."""
        ratio = self._seen(DEFAULT)
        if ratio.low is not None and ratio.low >= FLOOR:
            return "shown"
        return "broken" if ratio.high is not None and ratio.high < FLOOR else "open"

    @property
    def gain(self) -> str:
        """Of the second part: 'shown', 'not shown' or 'broken'; '-' if FIXED does not gain."""
        default, fixed = self._seen(DEFAULT), self._seen(FIXED)
        if fixed.low is None or fixed.low <= 1:
            return "-"
        if default.high is not None and default.high < 1:
            return "broken"
        return "shown" if default.low is not None and default.low > 1 else "not shown"

    def _seen(self, label: str) -> Interval:
        """The interval of the last look; before the first look nothing is known."""
        return self.ratios[label] if self.judged else Interval(1.0, None, None)


def results(
    cells: Sequence[Cell], records: Sequence[Mapping[str, Any]], rounds: int
) -> list[Result]:
    """A result for each cell, from the journal's records of rounds."""
    by_cell: dict[Cell, list[Mapping[str, Any]]] = {cell: [] for cell in cells}
    for record in records:
        by_cell.setdefault(Cell(record["batch"], record["kind"]), []).append(record)
    return [_result(cell, by_cell[cell], rounds) for cell in cells]


def _result(cell: Cell, records: Sequence[Mapping[str, Any]], wanted: int) -> Result:
    judged, level = _last_look(len(records), wanted)
    speeds = [record["tokens_per_second"] for record in records[: judged or None]]
    ratios = {
        label: t_ratio([speed[label] / speed[BASELINE.label] for speed in speeds], level)
        for label in (DEFAULT, FIXED)
        if speeds
    }
    base = median_high(speed[BASELINE.label] for speed in speeds) if speeds else 0.0
    differing = sum(record["differing"] for record in records)
    return Result(cell, len(records), judged, ratios, base, differing)


def _last_look(rounds: int, wanted: int) -> tuple[int, float]:
    """Its number of rounds (0 before the first look) and the level of its intervals."""
    number = (rounds // wanted).bit_length()
    judged = wanted * 2 ** (number - 1) if number else 0
    return judged, 1 - ERRORS / 2 ** max(1, number)


def next_cell(found: Sequence[Result], *, more: bool) -> Cell | None:
    """The open cell with the fewest rounds, the first of equals; None if no cell needs a round.

    With `more`, cells that are still open after their rounds get further ones.
    """
    wanted = [r for r in found if r.state == "open" and (more or not r.judged)]
    return min(wanted, key=lambda result: result.rounds).cell if wanted else None


def measure(
    cells: Sequence[Cell],
    journal: Journal,
    rounds: int,
    run: Callable[[Cell, int], Mapping[str, Any]],
    seconds: float | None = None,
) -> list[Result]:
    """Run rounds until every cell has a verdict or its number of rounds, or the time is up.

    With a time limit, open cells get further rounds. The journal has the rounds measured so far.
    """
    began = time.monotonic()
    while seconds is None or time.monotonic() - began < seconds:
        found = results(cells, journal.records, rounds)
        cell = next_cell(found, more=seconds is not None)
        if cell is None:
            break
        index = next(result.rounds for result in found if result.cell == cell)
        typer.echo(f"{cell}, round {index + 1}", err=True)
        journal.add({**asdict(cell), "round": index, **run(cell, index)})
    return results(cells, journal.records, rounds)


def broken_promises(found: Sequence[Result]) -> list[str]:
    """The broken cells of both parts, with their intervals."""
    said = []
    for result in found:
        if result.state == "broken":
            said.append(f"{result.cell}: {result.ratios[DEFAULT]} is below {FLOOR}.")
        if result.gain == "broken":
            default, fixed = result.ratios[DEFAULT], result.ratios[FIXED]
            said.append(f"{result.cell}: {default}, where a fixed length has {fixed}.")
    return said


# One round of a cell of the contract: the variants generate the same texts, step by step.
#
# In a round, each variant generates the tokens of at least `REQUESTS` requests, with the cell's
# batch size of them running at a time: when one ends, the next prompt joins. The variant that has
# generated fewest tokens takes the next step, so that all variants see the same state of the
# machine, which may be twice as fast in one second as in the next. Prefill takes equally long for
# all; the ratio is of tokens/s after it. Each round has new prompts while there are any, so that
# the intervals are about the kind of text and not about single prompts.


class Requests(Protocol):
    """The requests of all cells."""

    def prompts(self, cell: Cell, index: int) -> list[list[int]]:
        """The prompts of a round."""
        ...

    def params(self, cell: Cell, index: int) -> list[SamplingParams]:
        """Their sampling parameters."""
        ...

    def enough(self, cell: Cell) -> int:
        """Tokens that a round has at least, unless its requests end before."""
        ...


@dataclass(frozen=True)
class Texts:
    """The prompts and sampling parameters of all cells; `limit` is of a prompt's tokens."""

    llm: LLM
    sample: Sequence[Prompt]
    max_tokens: int
    limit: int
    seed: int

    def prompts(self, cell: Cell, index: int) -> list[list[int]]:
        """The prompts of a round; when the sample is used up, it begins again."""
        return [self.prompt(cell.kind, number) for number in _numbers(cell, index)]

    def prompt(self, kind: str, number: int) -> list[int]:
        if kind == RANDOM:
            return random_ids(self.llm, self.seed + number, min(self.limit, RANDOM_TOKENS))
        chosen = [p for p in self.sample if kind in (HOT, p.kind)]
        return encode(self.llm, chosen[number % len(chosen)].text, self.limit)

    def params(self, cell: Cell, index: int, max_tokens: int | None = None) -> list[SamplingParams]:
        """Sampling parameters of a round's requests, greedy except where drafters are defeated.

        The requests of the first batch have different lengths, so that from then on requests end
        and join one at a time.
        """
        longest = max_tokens or self.max_tokens
        return [
            SamplingParams(
                temperature=temperature_of(cell.kind),
                seed=self.seed + number,
                max_tokens=min(longest, ceil(longest * (place + 1) / cell.batch)),
                ignore_eos=True,
            )
            for place, number in enumerate(_numbers(cell, index))
        ]

    def enough(self, cell: Cell) -> int:
        return self.max_tokens * _requests(cell)


def kinds_of(sample: Sequence[Prompt]) -> list[str]:
    """The kinds of the sample, and those that defeat drafters."""
    return [*dict.fromkeys(prompt.kind for prompt in sample), HOT, RANDOM]


def temperature_of(kind: str) -> float:
    return 1.5 if kind in (HOT, RANDOM) else 0.0


def _numbers(cell: Cell, index: int) -> range:
    """The numbers of a round's requests among all of the cell's: as many as may be started."""
    most = _requests(cell) + 2 * cell.batch
    return range(index * most, (index + 1) * most)


def _requests(cell: Cell) -> int:
    return max(REQUESTS, cell.batch)


def warm_up(llms: Mapping[str, LLM], texts: Texts, most: int) -> None:
    """Generate `WARM_UP_TOKENS` with every variant, in the largest batch."""
    cell = Cell(most, HOT)
    for llm in llms.values():
        params = texts.params(cell, 0, max(16, WARM_UP_TOKENS // most))
        llm.generate(texts.prompts(cell, 0)[:most], params[:most])


class Run:
    """One variant in one round, with at most `batch` requests running at a time."""

    def __init__(
        self,
        llm: LLM,
        prompts: Sequence[list[int]],
        params: Sequence[SamplingParams],
        batch: int,
    ) -> None:
        self._engine, self._batch = llm.engine, batch
        specs = [JobSpec(*pair) for pair in zip(prompts, params, strict=True)]
        self._jobs = self._engine.jobs(specs)
        self._requests = [job.requests[0] for job in self._jobs]
        self._started = 0
        self._step_seconds = 0.0

    @property
    def outputs(self) -> list[list[int]]:
        return [request.output_ids for request in self._requests]

    @property
    def num_tokens(self) -> int:
        """The number of tokens of all outputs so far."""
        return sum(request.metrics.generated_tokens for request in self._requests)

    @property
    def seconds(self) -> float:
        """Of all steps, without their prefill."""
        prefill = sum(request.metrics.prefill_seconds for request in self._requests)
        return self._step_seconds - prefill

    @property
    def _running(self) -> int:
        return sum(not request.finished for request in self._requests[: self._started])

    @property
    def ends(self) -> bool:
        """Whether the batch cannot be filled up any more."""
        return self._started == len(self._jobs) and self._running < self._batch

    def step(self) -> None:
        """Fill the batch up with new requests, then take one step of the engine."""
        joining = self._jobs[self._started :][: self._batch - self._running]
        self._engine.start(joining)
        self._started += len(joining)
        began = clock.now()  # the clock of `prefill_seconds`
        self._engine.step()
        self._step_seconds += clock.now() - began

    def close(self) -> None:
        self._engine.end(self._jobs[: self._started])


def run_round(llms: Mapping[str, LLM], texts: Requests, cell: Cell, index: int) -> dict[str, Any]:
    """Tokens/s of every variant, and how many outputs differ from those of `none`."""
    prompts, params = texts.prompts(cell, index), texts.params(cell, index)
    runs = {
        label: Run(llms[label], prompts, params, cell.batch) for label in order(list(llms), index)
    }
    for llm in llms.values():  # other cells had the same prompts: drafters must not remember them
        llm.reset_drafter_memory()
    enough = texts.enough(cell)
    # A full garbage collection takes as long as ten passes, at the expense of one variant.
    gc.collect()
    gc.freeze()
    try:
        while unfinished := [
            run for run in runs.values() if run.num_tokens < enough and not run.ends
        ]:
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
    return any(a != b for a, b in zip(one, other, strict=False))


if __name__ == "__main__":
    typer.run(main)
