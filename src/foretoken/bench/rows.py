"""What a comparison has found, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

from foretoken.bench.ratios import Interval

__all__ = ["ALL", "BatchPoint", "Memory", "Row"]

ALL = "all"
"""The row of all kinds of prompts together."""


@dataclass(frozen=True)
class Row:
    """One contestant on one kind of prompts, against the baseline.

    Args:
        label: the contestant.
        kind: what the prompts are.
        prompts: how many.
        ratio: of tokens/s, prefill included.
        decode_ratio: of tokens/s after the prefill; None where it is not known.
        speed: tokens/s, the geometric mean over prompts.
        mean_acceptance_length: tokens per drafting pass; None of peers.
        differing: prompts on which a call's tokens were not the baseline's first.
        first_difference: the earliest position of a difference, from 0.
        promised: whether there must be none.
        learning: prompts on which rounds took different numbers of target passes.
        joules: energy per 1,000 tokens; None without a counter.
    """

    label: str
    kind: str
    prompts: int
    ratio: Interval
    decode_ratio: Interval | None
    speed: float
    mean_acceptance_length: float | None
    differing: int
    first_difference: int | None
    promised: bool
    learning: int
    joules: float | None


@dataclass(frozen=True)
class BatchPoint:
    """A batch size: seconds until all its prompts are done, and tokens/s of all together."""

    label: str
    size: int
    latency: float
    throughput: float


@dataclass(frozen=True)
class Memory:
    """Bytes: the most a process held, and the parts: weights, KV of the longest request, drafter.

    The parts follow from shapes; None is unknown. The rest is libraries, buffers and packed copies.
    """

    label: str
    peak: int
    weights: int
    cache: int | None
    drafter: int | None
