"""How much faster is a method than plain decoding? One interleaved run, a few minutes.

In every round each prompt is run with every method, `none` among them, in alternating order: in
one process, on one loaded model, for the same tokens. What slows the machine down for a while
slows all of them down. A prompt's ratio is that of the medians over rounds; the table has the
geometric mean over prompts with a bootstrap 95 % interval over prompts.

The control is text in which there is nothing to find: random tokens, continued at temperature 1.5.
There a method must keep at least 0.97 of plain decoding's tokens/s.

    python -m benchmarks.quick --prompts FILE

Exits with 1 if any output differs from that of `none`, or if the control's ratio is below 0.97
beyond doubt (the whole interval is).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from benchmarks import BenchmarkError
from benchmarks.loading import BASELINE, Method, llm_for, load, parse_methods
from benchmarks.prompts import Prompt, encode, prompt_limit, read_prompts, stratified
from benchmarks.report import machine, one_line_errors, progress_bar
from benchmarks.speed_report import CONTROL, Report, rows_of
from benchmarks.timing import Timed, Work, measure, time_prompt
from foretoken import LLM, SamplingParams

__all__ = ["main"]

CONTROL_TEMPERATURE = 1.5
CONTROL_TOKENS = 128
WARM_UP_TOKENS = 16


@dataclass(frozen=True)
class Options:
    """What the command line said about models and runs."""

    model: str
    draft_model: str | None
    num_speculative_tokens: int | None
    dtype: str
    device: str
    max_tokens: int
    max_prompt_tokens: int
    rounds: int
    ignore_eos: bool
    control_prompts: int
    seed: int


def main(
    prompts: Annotated[
        Path, typer.Option(help="Spec-Bench's JSON lines (first turns only) or others.")
    ],
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write everything measured to this file.")
    ] = None,
    model: Annotated[str, typer.Option(help="Folder, GGUF file or alias.")] = "smollm2-135m",
    draft_model: Annotated[
        str | None, typer.Option(help="For methods that take one; default: the model itself.")
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            help="A method, or a JSON speculative_config (repeatable); default: ngram, ngram_table."
        ),
    ] = None,
    num_speculative_tokens: Annotated[
        int | None, typer.Option(min=1, help="Draft length; default: the method's own.")
    ] = None,
    kind: Annotated[
        list[str] | None, typer.Option(help="A kind of prompt (repeatable); default: all.")
    ] = None,
    per_kind: Annotated[int, typer.Option(min=1, help="Prompts of each kind.")] = 5,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each prompt and method.")] = 4,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens generated per run.")] = 128,
    max_prompt_tokens: Annotated[
        int, typer.Option(min=2, help="The middle of longer prompts is cut out.")
    ] = 2048,
    ignore_eos: Annotated[
        bool, typer.Option(help="Generate on past the end: the same length for every prompt.")
    ] = True,
    control_prompts: Annotated[
        int, typer.Option(min=0, help="Prompts of random tokens; 0 leaves the control out.")
    ] = 8,
    seed: Annotated[int, typer.Option(min=0, help="Of the sample and the control.")] = 0,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="Where the model runs.")] = "auto",
) -> None:
    """Measure tokens/s of methods against plain decoding (none), interleaved in one process.

    Prints a Markdown table. Exits with 1 if an output differs from plain decoding's, or if a method
    is certainly slower than 0.97 of it where there is nothing to find.
    """
    with one_line_errors():
        options = Options(
            model=model,
            draft_model=draft_model,
            num_speculative_tokens=num_speculative_tokens,
            dtype=dtype,
            device=device,
            max_tokens=max_tokens,
            max_prompt_tokens=max_prompt_tokens,
            rounds=rounds,
            ignore_eos=ignore_eos,
            control_prompts=control_prompts,
            seed=seed,
        )
        methods = parse_methods(method or ["ngram", "ngram_table"])
        sample = stratified(read_prompts(prompts), per_kind, seed, kind or ())
        _check_writable(json_file)
        report = _measured(methods, sample, options)
    print(report.markdown())
    if json_file is not None:
        json_file.write_text(json.dumps(report.as_dict(), indent=1) + "\n", encoding="utf-8")
    raise typer.Exit(0 if report.good else 1)


def _measured(methods: Sequence[Method], sample: Sequence[Prompt], options: Options) -> Report:
    llms = _llms(methods, options)
    baseline = llms[BASELINE.label]
    facts = {
        **machine(baseline.device),
        "dtype": str(baseline.dtype).removeprefix("torch."),
        "load_average_before": round(os.getloadavg()[0], 2),
    }
    timed = _time_all(llms, sample, options)
    rows = rows_of(timed, [method.label for method in methods], options.seed)
    return Report(timed, rows, facts, asdict(options), _ended(timed, baseline.eos_token_ids))


def _llms(methods: Sequence[Method], options: Options) -> dict[str, LLM]:
    """The baseline and the methods, all on one loaded model."""
    loaded = load(options.model, options.dtype, options.device)
    draft = None
    if options.draft_model:
        draft = load(options.draft_model, options.dtype, options.device).module
    gamma = options.num_speculative_tokens
    return {BASELINE.label: llm_for(loaded, BASELINE)} | {
        method.label: llm_for(loaded, method, draft, gamma) for method in methods
    }


def _check_writable(file: Path | None) -> None:
    """Find out before minutes of measuring, not after."""
    try:
        if file is not None:
            file.touch()
    except OSError as error:
        raise BenchmarkError(f"cannot write {file}: {error}") from error


def _time_all(llms: Mapping[str, LLM], sample: Sequence[Prompt], options: Options) -> list[Timed]:
    work = [
        *_prompts(llms[BASELINE.label], sample, options),
        *_control(llms[BASELINE.label], options),
    ]
    longest = max((item.ids for item in work), key=len)
    for llm in llms.values():  # also makes the KV slab as long as it will be
        measure(llm, longest, SamplingParams(temperature=0, max_tokens=WARM_UP_TOKENS))
    with progress_bar() as bar:
        return [
            time_prompt(llms, item, options.rounds)
            for item in bar.track(work, description="prompts")
        ]


def _prompts(llm: LLM, sample: Sequence[Prompt], options: Options) -> Iterator[Work]:
    """The sample, generated greedily."""
    limit = prompt_limit(llm, options.max_prompt_tokens, options.max_tokens)
    params = SamplingParams(
        temperature=0, max_tokens=options.max_tokens, ignore_eos=options.ignore_eos
    )
    for prompt in sample:
        yield Work(prompt.id, prompt.kind, encode(llm, prompt, limit), params)


def _control(llm: LLM, options: Options) -> Iterator[Work]:
    """Random tokens, continued at a temperature at which hardly anything recurs."""
    limit = prompt_limit(llm, CONTROL_TOKENS, options.max_tokens)
    for seed in range(options.seed, options.seed + options.control_prompts):
        params = SamplingParams(
            temperature=CONTROL_TEMPERATURE,
            seed=seed,
            max_tokens=options.max_tokens,
            ignore_eos=True,
        )
        yield Work(f"random {seed}", CONTROL, random_ids(llm, seed, limit), params)


def _ended(timed: Sequence[Timed], eos_token_ids: Sequence[int]) -> int:
    """Prompts, the control's apart, whose output went on past an end-of-sequence token."""
    return sum(
        not set(eos_token_ids).isdisjoint(item.runs[BASELINE.label][0].token_ids[:-1])
        for item in timed
        if item.kind != CONTROL
    )


def random_ids(llm: LLM, seed: int, length: int) -> list[int]:
    """A prompt of different random tokens, none of them special."""
    assert llm.tokenizer is not None
    ordinary = np.setdiff1d(np.arange(len(llm.tokenizer)), llm.tokenizer.all_special_ids)
    chosen: list[int] = np.random.default_rng(seed).choice(ordinary, length, replace=False).tolist()
    return chosen


if __name__ == "__main__":
    typer.run(main)
