"""Timed runs of several methods on the same prompts, interleaved, and what follows from them."""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.loading import BASELINE
from foretoken import LLM, SamplingParams
from foretoken.bench.ratios import Interval, bootstrap_ratio, geometric_mean
from foretoken.bench.rounds import order

__all__ = ["Row", "Run", "Timed", "Work", "measure", "row", "spread", "time_prompt"]


@dataclass(frozen=True)
class Work:
    """A prompt to be timed: its id, its kind, its tokens and how to generate."""

    prompt: str
    kind: str
    ids: Sequence[int]
    params: SamplingParams


@dataclass(frozen=True)
class Run:
    """One generation. Seconds are wall-clock, around `LLM.generate` for token ids."""

    token_ids: tuple[int, ...]
    seconds: float
    prefill_seconds: float
    draft_seconds: float
    target_passes: int
    num_drafts: int
    num_accepted_tokens: int

    @property
    def speed(self) -> float:
        """Tokens per second, prefill included."""
        return len(self.token_ids) / self.seconds

    @property
    def decode_speed(self) -> float:
        """Tokens per second after the prefill."""
        return len(self.token_ids) / (self.seconds - self.prefill_seconds)

    def as_dict(self) -> dict[str, Any]:
        """For JSON: counts and times."""
        fields = {name: value for name, value in vars(self).items() if name != "token_ids"}
        return {"generated_tokens": len(self.token_ids), **fields}


@dataclass(frozen=True)
class Timed:
    """All runs on one prompt: per method one for every round."""

    prompt: str
    kind: str
    prompt_tokens: int
    runs: Mapping[str, Sequence[Run]]

    def speed(self, method: str) -> float:
        """Tokens/s, the median over rounds."""
        return median(run.speed for run in self.runs[method])

    def ratio(self, method: str) -> float:
        """Tokens/s of the method over those of the baseline."""
        return self.speed(method) / self.speed(BASELINE.label)

    def decode_ratio(self, method: str) -> float:
        """The same after the prefill."""
        own, base = (
            median(run.decode_speed for run in self.runs[name]) for name in (method, BASELINE.label)
        )
        return own / base

    def agrees(self, method: str) -> bool:
        """Whether every run of the method gave the tokens of the baseline's first run."""
        expected = self.runs[BASELINE.label][0].token_ids
        return all(run.token_ids == expected for run in self.runs[method])

    def learns(self, method: str) -> bool:
        """Whether the number of target passes changed between rounds of the same prompt."""
        return len({run.target_passes for run in self.runs[method]}) > 1


@dataclass(frozen=True)
class Row:
    """One method on one kind of prompts, against the baseline.

    Args:
        label: what the prompts are.
        method: the method.
        prompts: how many.
        ratio: of tokens/s, prefill included.
        decode_ratio: of tokens/s after the prefill.
        baseline_speed, speed: tokens/s of both, geometric means over prompts.
        mean_acceptance_length: tokens per drafting target pass.
        passes_ratio: target passes of the method over the baseline's.
        drafting_share: part of the target passes that had a draft.
        draft_time_share: part of all seconds spent in the drafter.
        differing: prompts on which a run's tokens were not the baseline's.
        learning: prompts on which rounds took different numbers of target passes.
    """

    label: str
    method: str
    prompts: int
    ratio: Interval
    decode_ratio: Interval
    baseline_speed: float
    speed: float
    mean_acceptance_length: float
    passes_ratio: float
    drafting_share: float
    draft_time_share: float
    differing: int
    learning: int


def row(label: str, method: str, timed: Sequence[Timed], seed: int = 0) -> Row:
    """Summarise at least one prompt.

    Args:
        label: what the prompts are.
        method: any method of the runs, the baseline too.
        timed: the runs.
        seed: of the bootstrap.
    """
    runs = [run for item in timed for run in item.runs[method]]
    base = [run for item in timed for run in item.runs[BASELINE.label]]
    drafts = sum(run.num_drafts for run in runs)
    accepted = sum(run.num_accepted_tokens for run in runs)
    passes = sum(run.target_passes for run in runs)
    return Row(
        label=label,
        method=method,
        prompts=len(timed),
        ratio=bootstrap_ratio([item.ratio(method) for item in timed], seed),
        decode_ratio=bootstrap_ratio([item.decode_ratio(method) for item in timed], seed),
        baseline_speed=geometric_mean([item.speed(BASELINE.label) for item in timed]),
        speed=geometric_mean([item.speed(method) for item in timed]),
        mean_acceptance_length=1 + accepted / drafts if drafts else 1.0,
        passes_ratio=passes / sum(run.target_passes for run in base),
        drafting_share=drafts / passes,
        draft_time_share=sum(run.draft_seconds for run in runs) / sum(run.seconds for run in runs),
        differing=sum(not item.agrees(method) for item in timed),
        learning=sum(item.learns(method) for item in timed),
    )


def spread(timed: Sequence[Timed]) -> float:
    """How far equal runs lie apart: (longest - shortest) / median seconds, median over all."""
    return median(
        (max(seconds) - min(seconds)) / median(seconds)
        for item in timed
        for runs in item.runs.values()
        for seconds in [[run.seconds for run in runs]]
    )


def measure(llm: LLM, prompt_ids: Sequence[int], params: SamplingParams) -> Run:
    """Generate once, with a clock."""
    began = time.perf_counter()
    (output,) = llm.generate([prompt_ids], params)
    seconds = time.perf_counter() - began
    metrics = output.metrics
    return Run(
        token_ids=output.token_ids,
        seconds=seconds,
        prefill_seconds=metrics.prefill_seconds,
        draft_seconds=metrics.draft_seconds,
        target_passes=metrics.target_passes,
        num_drafts=metrics.num_drafts,
        num_accepted_tokens=metrics.num_accepted_tokens,
    )


def time_prompt(llms: Mapping[str, LLM], work: Work, rounds: int) -> Timed:
    """Run every method once a round on one prompt.

    Args:
        llms: one per method, the baseline included.
        work: the prompt.
        rounds: at least 1; drafters that remember earlier outputs do so in the first alone.
    """
    runs: dict[str, list[Run]] = {method: [] for method in llms}
    gc.collect()
    for index in range(rounds):
        for method in order(list(llms), index):
            if index:  # nobody is to find the output remembered
                llms[method].reset_drafter_memory()
            runs[method].append(measure(llms[method], work.ids, work.params))
    return Timed(work.prompt, work.kind, len(work.ids), runs)
