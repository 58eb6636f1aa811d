"""The results of a comparison, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

from tokenleap.bench.ratios import Interval

__all__ = ["ALL", "CONTROL", "BatchPoint", "EnergyUse", "Footprint", "Memory", "Row", "Steps"]

ALL = "all"
"""All kinds of prompts together, without the control."""

CONTROL = "control"
"""The kind of prompts of random tokens, which are sampled so hot that drafters find nothing."""


@dataclass(frozen=True)
class Row:
    """One contestant on one kind of prompts, compared with the baseline.

    Args:
        label: the contestant.
        kind: of the prompts.
        prompts: how many.
        ratio: of tokens/s, prefill included.
        decode_ratio: of tokens/s after the prefill; None where the prefill's time is unknown.
        speed: tokens/s, the geometric mean over prompts.
        mean_acceptance_length: tokens per target pass with a draft; None for peers.
        drafting_share: share of the target passes that had a draft; None for peers.
        differing: prompts on which some call's tokens are not those of the baseline's first call.
        first_difference: the earliest position of a difference, from 0.
        promised: whether there must be no difference.
        learning: prompts on which rounds took different numbers of target passes.
        joules: energy per 1,000 tokens; None without an energy counter.
    """

    label: str
    kind: str
    prompts: int
    ratio: Interval
    decode_ratio: Interval | None
    speed: float
    mean_acceptance_length: float | None
    drafting_share: float | None
    differing: int
    first_difference: int | None
    promised: bool
    learning: int
    joules: float | None


@dataclass(frozen=True)
class Steps:
    """What steps bring and cost: Xia et al., "Speculative Decoding" (2023), tables 2 and 3.

    Args:
        label: the contestant.
        tokens: Tok., tokens per target pass, passes without a draft included.
        draft_seconds: t_d, median time of a draft; None if nothing was drafted.
        verify_seconds: t_v, median time of a pass with a draft; None likewise.
    """

    label: str
    tokens: float
    draft_seconds: float | None
    verify_seconds: float | None


@dataclass(frozen=True)
class Footprint:
    """How energy is turned into emissions; the defaults are those of Xia et al. (2023).

    Args:
        pue: power usage effectiveness: what the data centre takes for each joule of the machine.
        co2: grams of CO2 per Wh.
    """

    pue: float = 1.1
    co2: float = 0.385


@dataclass(frozen=True)
class EnergyUse:
    """Energy of all calls of one contestant, as Xia et al. (2023) compute it.

    Args:
        label: the contestant.
        joules: per 1,000 tokens, by the counter.
        watts: average power.
        hours: how long the calls took.
        watt_hours: watts * hours * PUE.
        co2: grams.
    """

    label: str
    joules: float
    watts: float
    hours: float
    watt_hours: float
    co2: float


@dataclass(frozen=True)
class BatchPoint:
    """A batch size: seconds until all its prompts are done, and tokens/s of all together."""

    label: str
    size: int
    latency: float
    throughput: float


@dataclass(frozen=True)
class Start:
    """What a user waits for before the first token.

    Args:
        label: the contestant.
        load_seconds: from the start of its process until it could generate; None in journals of
            older versions.
        first_token_seconds: from the prompt to its first token, the median over calls on single
            prompts; None if it does not tell.
    """

    label: str
    load_seconds: float | None
    first_token_seconds: float | None


@dataclass(frozen=True)
class Memory:
    """Peak bytes of a process, and what its parts take.

    The parts are computed from shapes: weights, KV of the longest request, draft model. None is
    unknown. The rest of the peak is libraries, buffers and copies of the weights.
    """

    label: str
    peak: int
    weights: int
    cache: int | None
    drafter: int | None
