"""On a GPU in one command: its tests, then PyTorch's networks, with drafts and without.

    make gpu                        installs, runs this, and writes build/gpu/gpu.json and gpu.md
    python -m benchmarks.gpu        the same with what is installed
    python -m benchmarks.gpu --device cpu --quick      a rehearsal without a GPU

A part is one model on one kind of passes: `eager`, `one shape` (`LLM(batch_invariant=True)`) or
`compiled`. Each part is a process with a time limit, and writes what it has found at once: one that
fails or hangs costs the others nothing. Without its files, the model has random weights.

In every round, each method runs the batch once, in alternating order; decoding is greedy. `given`
is the drafter `random` under synthetic acceptance: the speed that any drafter of that acceptance
could reach if it cost nothing.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from operator import ne
from pathlib import Path
from statistics import geometric_mean, median
from time import monotonic, perf_counter
from typing import Annotated, Any

import torch
import typer

from benchmarks import BenchmarkError, harness
from benchmarks.harness import RANDOM, in_turn, llm_for, load, one_line_errors
from tokenleap import LLM, RequestOutput, SamplingParams, SpeculativeConfig, TokenleapError
from tokenleap.bench.report import markdown_table
from tokenleap.bench.summary import bootstrap_ratio
from tokenleap.core.tree import chain
from tokenleap.drafters.heads.shipped import shipped_head
from tokenleap.errors import in_one_line
from tokenleap.runtime.passes import INTERNAL_KEY
from tokenleap.runtime.target import Target

BASELINE = "none"
LENGTH = 4
"""Tokens that every method drafts."""
GIVEN = 0.8
"""The acceptance rate of `given`."""
NODES = (1, 2, 4, 5, 8, 16, 32, 64)
"""Sizes of the passes over one sequence whose costs are shown."""
TESTS = "tests"
PROMPTS = Path(__file__).parent / "code_prompts.jsonl"
MOST_PROMPT_TOKENS = 256


@dataclass(frozen=True)
class Part:
    """What one process does, and how long it may take."""

    name: str
    model: str
    runtime: str
    batch_invariant: bool
    batch_sizes: tuple[int, ...]
    seconds: float = 150.0


@dataclass(frozen=True)
class Amount:
    """How much to measure."""

    max_tokens: int
    batches: int
    rounds: int


FULL, QUICK = Amount(48, 2, 2), Amount(12, 1, 1)


def parts_of(model: str, *, quick: bool) -> list[Part]:
    """The parts, those first that matter most: the total limit cuts off the last ones."""
    small, large = (1, 2) if quick else (1, 8, 32), (1, 8)
    models = {model: small} | ({} if quick else {"random-7b": large})
    made = [
        Part(f"{name}, {way}", name, runtime, invariant, sizes)
        for way, runtime, invariant in (
            ("eager", "module", False),
            ("one shape", "module", True),
            ("compiled", "compiled", False),
        )
        for name, sizes in models.items()
    ]
    first = len(models)
    return [*made[:first], Part(TESTS, "", "", False, ()), *made[first:]]


# One part, in a process of its own

Write = Callable[[Mapping[str, Any]], object]
Batch = Sequence[list[int]]
"""Prompts that are generated for together, as token ids."""


def run_part(part: Part, device: str, amount: Amount, write: Write) -> None:
    """Load, then write findings one by one."""
    began = perf_counter()
    model, loaded = part.model, None
    try:
        loaded = load(part.model, "auto", device)
    except TokenleapError as error:
        if part.model in RANDOM:
            raise
        write({"remark": f"{in_one_line(error)} It is measured with random weights."})
        model, loaded = "random-135m", load("random-135m", "auto", device)
    llm = llm_for(
        loaded,
        {"method": "none"},
        runtime=part.runtime,
        batch_invariant=part.batch_invariant,
        max_num_seqs=max(part.batch_sizes),
        max_model_len=min(1024, loaded.module.config.get_text_config().max_position_embeddings),
    )
    target = llm.engine.target
    write({"machine": harness.machine(llm.device, llm.dtype)})
    facts = {"model": model, "runtime": llm.runtime, "layers": target.network.num_layers}
    write({"facts": {**facts, "seconds to load": round(perf_counter() - began, 1)}})
    write({"bits": {"bit_exact": llm.bit_exact, **bits(target)}})
    write({"pass_ms": pass_ms(target)})
    ids = prompts_for(llm, max(part.batch_sizes) * amount.batches, amount.max_tokens)
    for size in part.batch_sizes:
        groups = [ids[start : start + size] for start in range(0, size * amount.batches, size)]
        for cell in measure(llm, methods(model), groups, amount):
            write({"cell": asdict(cell)})
    if llm.device.type == "cuda":
        write({"peak_bytes": torch.cuda.max_memory_allocated(llm.device)})


def bits(target: Target, count: int = 9) -> dict[str, Any]:
    """Logits of a chain in one pass against those of a pass per token."""
    most = target.vocab_size
    tokens = [1 + 7 * index % (most - 1) for index in range(8 + count)]
    target.add(INTERNAL_KEY)
    try:
        target.prefill(INTERNAL_KEY, tokens[:8])
        together = target.verify([INTERNAL_KEY], [chain(tokens[8:])])[0].scores.clone()
        alone = []
        for token in tokens[8:]:
            (output,) = target.verify([INTERNAL_KEY], [chain([token])])
            alone.append(output.scores.clone())
            target.commit(INTERNAL_KEY, [0])
    finally:
        target.remove(INTERNAL_KEY)
    single = torch.cat(alone)
    return {
        "positions": count,
        "equal": int((together == single).all(1).sum()),
        "same_argmax": int((together.argmax(1) == single.argmax(1)).sum()),
        "largest_difference": float((together.float() - single.float()).abs().max()),
    }


def pass_ms(target: Target, context: int = 128, times: int = 5) -> dict[int, float]:
    """Median milliseconds of a pass over one sequence, by its nodes, after one that warms up."""
    target.add(INTERNAL_KEY)
    try:
        target.prefill(INTERNAL_KEY, [1] * context)
        found = {}
        for nodes in NODES:
            verify = partial(target.verify, [INTERNAL_KEY], [chain([1] * nodes)])
            runs = [harness.timed(verify)[0] for _ in range(1 + times)]
            found[nodes] = 1e3 * median(runs[1:])
        return found
    finally:
        target.remove(INTERNAL_KEY)


def methods(model: str) -> dict[str, dict[str, Any]]:
    """Configurations by name; the head only where the package has one for the model."""
    fixed = {"controller": "fixed", "num_speculative_tokens": LENGTH}
    given = {"rule": "synthetic", "acceptance_rate": GIVEN}
    head = shipped_head(model)
    return {
        BASELINE: {"method": "none"},
        "ngram": {"method": "ngram", **fixed},
        **({} if head is None else {"eagle": {"method": "eagle", "model": str(head), **fixed}}),
        f"given {GIVEN}": {"method": "random", "acceptance": given, **fixed},
    }


def prompts_for(llm: LLM, count: int, max_tokens: int) -> list[list[int]]:
    """So many prompts: questions about code, or random tokens for a model without a tokenizer."""
    if llm.tokenizer is not None:
        found = harness.encoded(
            llm, harness.sample_of(PROMPTS, seed=0), MOST_PROMPT_TOKENS, max_tokens
        )
        return [found[index % len(found)] for index in range(count)]
    dice = torch.Generator().manual_seed(0)
    most = llm.engine.target.vocab_size
    return torch.randint(1, most, (count, 64), generator=dice).tolist()


@dataclass(frozen=True)
class Cell:
    """A method at one batch size; `differing` counts batches whose tokens are not those of `none`.

    It is None where they need not be.
    """

    method: str
    batch_size: int
    tokens_per_second: float
    over_none: float
    interval: tuple[float | None, float | None]
    acceptance_length: float
    differing: int | None


def measure(
    llm: LLM,
    configs: Mapping[str, Mapping[str, Any]],
    batches: Sequence[Batch],
    amount: Amount,
    clock: Callable[[], float] = perf_counter,
) -> Iterator[Cell]:
    """Time batches of one size. A run of each before the first round warms up."""
    params = SamplingParams(temperature=0, max_tokens=amount.max_tokens, ignore_eos=True, seed=0)

    def generate(method: str, batch: Batch) -> tuple[float, list[RequestOutput]]:
        began = clock()
        outputs = llm.generate(list(batch), params, speculative_config=dict(configs[method]))
        return clock() - began, outputs

    size = len(batches[0])
    found = in_turn(
        list(configs), batches, amount.rounds, generate, warm_up=1, doing=f"batches of {size}"
    )

    def seconds(method: str) -> list[float]:
        return [median(taken for taken, _ in runs) for runs in found[method]]

    def written(method: str) -> list[list[RequestOutput]]:
        return [runs[-1][1] for runs in found[method]]

    base, expected = seconds(BASELINE), written(BASELINE)
    for method in configs:
        own, outputs = seconds(method), written(method)
        ratio = bootstrap_ratio([b / o for b, o in zip(base, own, strict=True)])
        lengths = [output.metrics.mean_acceptance_length for each in outputs for output in each]
        lossless = SpeculativeConfig.parse(configs[method]).rule.lossless
        yield Cell(
            method,
            size,
            geometric_mean([size * amount.max_tokens / each for each in own]),
            ratio.mean,
            (ratio.low, ratio.high),
            sum(lengths) / len(lengths),
            sum(map(ne, map(tokens_of, outputs), map(tokens_of, expected))) if lossless else None,
        )


def tokens_of(outputs: Sequence[RequestOutput]) -> list[tuple[int, ...]]:
    return [output.token_ids for output in outputs]


# All parts


@dataclass
class Result:
    """How a part ended, and what it wrote until then."""

    part: str
    ended: str  # "ok", or why not
    seconds: float
    records: list[dict[str, Any]]
    output: str = ""  # the end of its output, if it is not ok, or has tests

    def all(self, kind: str) -> list[Any]:
        return [record[kind] for record in self.records if kind in record]


def run(command: Sequence[str], records: Path, name: str, limit: float) -> Result:
    """Run a process for at most so many seconds; it and all that it started then end."""
    began = perf_counter()
    log = records.with_suffix(".log")
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(limit)
            ended = "ok" if code == 0 else f"exit code {code}"
        except subprocess.TimeoutExpired:
            ended = f"out of time after {limit:.0f} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    lines = records.read_text(encoding="utf-8").splitlines() if records.exists() else []
    tail = log.read_text(encoding="utf-8", errors="replace")[-3000:]
    shown = tail if ended != "ok" or name == TESTS else ""
    found = [json.loads(line) for line in lines if line.endswith("}")]
    return Result(name, ended, perf_counter() - began, found, shown)


@one_line_errors()
def main(
    output: Annotated[Path, typer.Option(help="Folder of gpu.json, gpu.md and logs.")] = Path(
        "build/gpu"
    ),
    model: harness.TinyModel = "smollm2-135m",
    device: Annotated[str, typer.Option(help="cuda, or cpu for a rehearsal.")] = "cuda",
    quick: Annotated[bool, typer.Option("--quick", help="Few tokens, no large model.")] = False,
    minutes: Annotated[float, typer.Option(min=0.1, help="Limit of all parts together.")] = 10.0,
    only: Annotated[
        list[str] | None, typer.Option(help="Parts whose names contain this (repeatable).")
    ] = None,
    into: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Run the GPU tests and measure networks and drafters; write one JSON file and one page."""
    if device != "cpu" and not torch.cuda.is_available():
        raise BenchmarkError("this needs a CUDA device, and there is none: try --device cpu.")
    parts = [
        part
        for part in parts_of(model, quick=quick)
        if not only or any(text in part.name for text in only)
    ]
    amount = QUICK if quick else FULL
    if into is not None:
        (part,) = (part for part in parts if [part.name] == only)
        with into.open("w", encoding="utf-8") as file:
            run_part(part, device, amount, lambda r: print(json.dumps(r), file=file, flush=True))
        return
    output.mkdir(parents=True, exist_ok=True)
    ends, found = monotonic() + 60 * minutes, list[Result]()
    for number, part in enumerate(parts):
        left = ends - monotonic()
        if left < 1:
            found.append(Result(part.name, "left out: no time", 0.0, []))
            continue
        typer.echo(f"{part.name} ...", err=True)
        limit = left if device == "cpu" else min(part.seconds, left)  # a CPU is slow
        records = output / f"part-{number}.jsonl"
        records.unlink(missing_ok=True)
        own = [sys.executable, "-m", "benchmarks.gpu", "--into", str(records), "--only", part.name]
        own += ["--model", model, "--device", device, *(["--quick"] if quick else [])]
        tests = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/runtime"]
        command = tests if part.name == TESTS else own
        found.append(run(command, records, part.name, limit))
        typer.echo(f"{part.name}: {found[-1].ended}, {found[-1].seconds:.0f} s", err=True)
        save(output, found)
    typer.echo(report(found))


def save(output: Path, found: Sequence[Result]) -> None:
    """Write both files: after each part, so that an interrupted run has them, too."""
    text = json.dumps({"parts": [asdict(result) for result in found]}, indent=1)
    (output / "gpu.json").write_text(text + "\n", encoding="utf-8")
    (output / "gpu.md").write_text(report(found) + "\n", encoding="utf-8")


def report(found: Sequence[Result]) -> str:
    """The page: how parts ended, bits, costs of passes, and a table of speeds per part."""
    facts: dict[str, Any] = next((facts for result in found for facts in result.all("machine")), {})
    ended = [[result.part, f"{result.seconds:.0f}", result.ended] for result in found]
    sections = ["## Parts", markdown_table(["part", "seconds", "ended"], ended)]
    bit_rows = [
        [
            result.part,
            "yes" if each["bit_exact"] else "no",
            f"{each['equal']} of {each['positions']}",
            f"{each['same_argmax']} of {each['positions']}",
            f"{each['largest_difference']:.3g}",
        ]
        for result in found
        for each in result.all("bits")
    ]
    heading = ["part", "`bit_exact`", "positions equal", "same best token", "largest difference"]
    sections += ["## Bits of a chain against one token a pass", markdown_table(heading, bit_rows)]
    passes = [
        [result.part, *(f"{milliseconds:.2f}" for milliseconds in each.values())]
        for result in found
        for each in result.all("pass_ms")
    ]
    sections += ["## Milliseconds of a pass over one sequence, by its nodes"]
    sections += [markdown_table(["part", *map(str, NODES)], passes)]
    for result in found:
        if cells := result.all("cell"):
            own = [harness.in_one_line(each) for each in result.all("facts")]
            sections += [f"## {result.part}", *result.all("remark"), *own, _speeds(cells)]
        if result.output:
            sections += [f"## Output of {result.part}", f"```\n{result.output}\n```"]
    return harness.report("gpu", facts, *sections)


def _speeds(cells: Sequence[Mapping[str, Any]]) -> str:
    def interval(cell: Mapping[str, Any]) -> str:
        low, high = cell["interval"]
        return f"{cell['over_none']:.2f}" + ("" if low is None else f" [{low:.2f}, {high:.2f}]")

    rows = [
        [
            cell["method"],
            str(cell["batch_size"]),
            f"{cell['tokens_per_second']:.0f}",
            interval(cell),
            f"{cell['acceptance_length']:.2f}",
            "-" if cell["differing"] is None else str(cell["differing"]),
        ]
        for cell in cells
    ]
    heading = ["method", "batch", "tokens/s", "over none", "acceptance length", "differing batches"]
    return markdown_table(heading, rows)


if __name__ == "__main__":
    typer.run(main)
