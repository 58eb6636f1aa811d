"""The results of a comparison, as plain data."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, geometric_mean, median
from typing import Any

import numpy as np

from tokenleap.bench.contestants import BASELINE
from tokenleap.errors import TokenleapError

__all__ = [
    "ALL",
    "CONTROL",
    "Agreement",
    "BatchPoint",
    "EnergyUse",
    "Footprint",
    "Interval",
    "Memory",
    "Row",
    "Steps",
    "added",
    "agreements",
    "bleu_metric",
    "bootstrap_ratio",
    "drafting_share",
    "energy_use",
    "first_difference",
    "geometric_mean",
    "joules",
    "mean_acceptance_length",
    "scipy_stats",
    "steps",
    "t_ratio",
    "tokens",
    "unjudged",
]


# Figures of single calls, computed from their records in the journal.


def tokens(call: Mapping[str, Any]) -> int:
    """Generated tokens of all prompts of a call."""
    return sum(len(output["token_ids"]) for output in call["outputs"])


def added(counts: Iterable[Mapping[str, int]]) -> dict[int, int]:
    """The sum of histograms whose keys JSON has turned into text; keys ascend."""
    total: dict[int, int] = {}
    for each in counts:
        for name, count in each.items():
            total[int(name)] = total.get(int(name), 0) + count
    return dict(sorted(total.items()))


def first_difference(expected: Sequence[int], got: Sequence[int]) -> int | None:
    """The first position at which two lists of tokens differ; None if they are equal."""
    if list(expected) == list(got):
        return None
    pairs = zip(expected, got, strict=False)
    shorter = min(len(expected), len(got))
    return next((at for at, (one, other) in enumerate(pairs) if one != other), shorter)


def mean_acceptance_length(calls: Sequence[Mapping[str, Any]]) -> float | None:
    """Tokens per target pass with a draft; None for peers, which do not count."""
    outputs = _counted(calls)
    drafts = sum(output["drafts"] for output in outputs)
    if not outputs:
        return None
    kept = sum(output["accepted"] - output.get("cut", 0) for output in outputs)
    return 1 + kept / drafts if drafts else 1.0


def drafting_share(calls: Sequence[Mapping[str, Any]]) -> float | None:
    """Share of the target passes that had a draft; None for peers, which do not count."""
    outputs = _counted(calls)
    passes = sum(output["passes"] for output in outputs)
    return sum(output["drafts"] for output in outputs) / passes if passes else None


def _counted(calls: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [output for call in calls for output in call["outputs"] if "drafts" in output]


def joules(calls: Sequence[Mapping[str, Any]]) -> float | None:
    """Energy per 1,000 tokens; None without an energy counter."""
    if any(call["joules"] is None for call in calls):
        return None
    return float(1000 * sum(call["joules"] for call in calls) / sum(map(tokens, calls)))


def energy_use(
    label: str, calls: Sequence[Mapping[str, Any]], footprint: Footprint
) -> EnergyUse | None:
    """Energy and emissions of these calls together; None without an energy counter."""
    per_thousand = joules(calls)
    if per_thousand is None:
        return None
    seconds = sum(call["seconds"] for call in calls)
    watts, hours = sum(call["joules"] for call in calls) / seconds, seconds / 3600
    watt_hours = watts * hours * footprint.pue
    return EnergyUse(label, per_thousand, watts, hours, watt_hours, watt_hours * footprint.co2)


def steps(label: str, calls: Sequence[Mapping[str, Any]]) -> Steps | None:
    """Tokens and times of the steps of these calls; None for peers, which do not count."""
    outputs = _counted(calls)
    passes = sum(output["passes"] for output in outputs)
    if not passes:
        return None
    generated = sum(len(output["token_ids"]) for output in outputs)
    drafts = [seconds for output in outputs for seconds in output["draft_seconds"]]
    verified = [
        seconds
        for output in outputs
        for nodes, each in output["verify_seconds"].items()
        if nodes != "1"
        for seconds in each
    ]
    return Steps(
        label,
        generated / passes,
        median(drafts) if drafts else None,
        median(verified) if verified else None,
    )


# Ratios of speeds: geometric means with confidence intervals, computed by SciPy.


RESAMPLES = 10_000
LEVEL = 0.95


@dataclass(frozen=True)
class Interval:
    """A geometric mean and its confidence interval; a single value has none."""

    mean: float
    low: float | None
    high: float | None

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.mean:.3f}"
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


def scipy_stats() -> Any:
    """The module `scipy.stats`, imported at its first use because that takes a second."""
    try:
        return importlib.import_module("scipy.stats")
    except ImportError as error:
        raise TokenleapError(
            "confidence intervals need SciPy: pip install 'tokenleap[bench]'."
        ) from error


def bootstrap_ratio(ratios: Sequence[float], seed: int = 0) -> Interval:
    """Geometric mean of ratios with a 95 % percentile bootstrap interval.

    With one ratio per prompt, prompts are resampled: the interval says how far the mean of another
    sample of prompts may lie.
    """
    mean = geometric_mean(ratios)
    if len(ratios) < 2:
        return Interval(mean, None, None)
    found = scipy_stats().bootstrap(
        (np.log(ratios),),
        np.mean,
        n_resamples=RESAMPLES,
        confidence_level=LEVEL,
        method="percentile",
        rng=np.random.default_rng(seed),
    )
    low, high = np.exp(found.confidence_interval)
    return Interval(mean, float(low), float(high))


def t_ratio(ratios: Sequence[float], level: float) -> Interval:
    """Geometric mean of ratios with Student's t interval of their logarithms.

    For a few rounds of the same measurement. A percentile bootstrap of five values is too narrow:
    its 95 % intervals contain the true mean in 83 % of cases.
    """
    mean = geometric_mean(ratios)
    if len(ratios) < 2:
        return Interval(mean, None, None)
    stats, logs = scipy_stats(), np.log(ratios)
    half = stats.t.ppf((1 + level) / 2, len(logs) - 1) * stats.sem(logs)
    return Interval(mean, float(mean * np.exp(-half)), float(mean * np.exp(half)))


ALL = "all"
"""All kinds of prompts together, without the control."""

CONTROL = "control"
"""The kind of prompts of random tokens, which are sampled so hot that drafters find nothing."""


@dataclass(frozen=True)
class Row:
    """One contestant on one kind of prompts, compared with the baseline.

    Args:
        decode_ratio: of tokens/s after the prefill; None where the prefill's time is unknown.
        mean_acceptance_length: tokens per target pass with a draft; None for peers.
        drafting_share: share of the target passes that had a draft; None for peers.
        differing: prompts on which some call's tokens are not those of the baseline's first call.
        learning: prompts on which rounds took different numbers of target passes.
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
    """Tokens and costs of steps: Xia et al., "Speculative Decoding" (2023), tables 2 and 3.

    Args:
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
    """

    pue: float = 1.1
    co2: float = 0.385


@dataclass(frozen=True)
class EnergyUse:
    """Energy of all calls of one contestant, as Xia et al. (2023) compute it."""

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
    """The wait before the first token.

    Args:
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


# How near outputs are to the baseline's own, and what they cost in p: for lossy rules.
#
# Xia et al., "Speculative Decoding" (SpecDec, 2023), table 6, has relative BLEU: BLEU with the
# outputs of plain decoding as references. sacreBLEU computes it. The baseline's model judges every
# output after all that is timed (`Worker.judge`).


Record = Mapping[str, Any]


@dataclass(frozen=True)
class Agreement:
    """The outputs of one contestant beside those of the baseline, on the same prompts and seeds.

    Args:
        first_difference: mean position, from 0, of the first difference of those that differ; None
            if all are equal.
        logprob: mean log-probability of a token under the baseline's model, in nats.
    """

    label: str
    outputs: int
    equal: int
    equal_tokens: float
    first_difference: float | None
    bleu: float
    logprob: float


def bleu_metric() -> Any:
    """BLEU of sacreBLEU with its defaults."""
    try:
        return importlib.import_module("sacrebleu.metrics").BLEU()
    except ImportError as error:
        raise TokenleapError(
            "relative BLEU needs sacreBLEU: pip install 'tokenleap[bench]'."
        ) from error


def unjudged(records: Sequence[Record]) -> list[Record]:
    """The calls that the baseline has not judged: those of single prompts, without the control."""
    judged = {_key(record) for record in records if record["type"] == "judgement"}
    return [call for call in _calls(records) if _key(call) not in judged]


def agreements(records: Sequence[Record]) -> list[Agreement]:
    """Every contestant beside the baseline; empty if nothing was judged or all agree."""
    judged = {_key(record): record for record in records if record["type"] == "judgement"}
    calls = [call for call in _calls(records) if _key(call) in judged]
    base = {(c["unit"], c["round"]): c for c in calls if c["contestant"] == BASELINE.label}
    pairs: dict[str, list[tuple[Record, Record]]] = {}
    for call in calls:
        other = base.get((call["unit"], call["round"]))
        if other is not None:
            pairs.setdefault(call["contestant"], []).append((other, call))
    found = [_agreement(label, each, judged) for label, each in pairs.items()]
    return found if any(one.equal < one.outputs for one in found) else []


def _agreement(
    label: str,
    pairs: Sequence[tuple[Record, Record]],
    judged: Mapping[tuple[str, str, int], Record],
) -> Agreement:
    tokens = [(_tokens(expected), _tokens(got)) for expected, got in pairs]
    differences = [first_difference(*each) for each in tokens]
    known = [position for position in differences if position is not None]
    texts = [[judged[_key(call)]["text"] for call in calls] for calls in zip(*pairs, strict=True)]
    same = sum(a == b for each in tokens for a, b in zip(*each, strict=False))
    return Agreement(
        label=label,
        outputs=len(pairs),
        equal=len(pairs) - len(known),
        equal_tokens=same / sum(max(map(len, each)) for each in tokens),
        first_difference=fmean(known) if known else None,
        bleu=float(bleu_metric().corpus_score(texts[1], [texts[0]]).score),
        logprob=fmean(judged[_key(call)]["logprob"] for _, call in pairs),
    )


def _calls(records: Sequence[Record]) -> list[Record]:
    return [
        record
        for record in records
        if record["type"] == "request" and record["batch"] == 1 and record["kind"] != CONTROL
    ]


def _key(record: Record) -> tuple[str, str, int]:
    return record["contestant"], record["unit"], record["round"]


def _tokens(call: Record) -> list[int]:
    return list(call["outputs"][0]["token_ids"])
