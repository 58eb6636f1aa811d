"""Methods against plain decoding on a sample of prompts, interleaved: the run behind the tables."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from benchmarks import BenchmarkError
from benchmarks.loading import BASELINE, Method, llm_for, load
from benchmarks.prompts import Prompt, encode, prompt_limit
from benchmarks.report import machine, progress_bar
from benchmarks.speed_report import CONTROL, Report, rows_of
from benchmarks.timing import Timed, Work, measure, time_prompt
from foretoken import LLM, SamplingParams

__all__ = ["Options", "check_writable", "measured", "random_ids"]

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


def measured(methods: Sequence[Method], sample: Sequence[Prompt], options: Options) -> Report:
    """Run every method on every prompt in every round.

    Args:
        methods: what to compare with the baseline.
        sample: the prompts.
        options: how to run them.
    """
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


def check_writable(file: Path | None) -> None:
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
        llm.reset_drafter_memory()
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
