"""The results of all calls as plain data: ratios with intervals, agreement, lengths, costs."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from statistics import fmean, geometric_mean, median
from typing import Any

import numpy as np

from tokenleap.bench.contestants import BASELINE, OWN, Contestant
from tokenleap.core.extras import how_to_install
from tokenleap.errors import TokenleapError

Record = Mapping[str, Any]

ALL = "all"
"""All kinds of prompts together, without the control."""

CONTROL = "control"
"""The kind of prompts of random tokens, which are sampled so hot that drafters find nothing."""


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


class Results:
    """The figures of a journal's records.

    Args:
        contestants: the baseline first; those without a call are left out.
    """

    def __init__(
        self,
        records: Sequence[Record],
        contestants: Sequence[Contestant],
        seed: int = 0,
        footprint: Footprint | None = None,
    ) -> None:
        self.footprint = footprint or Footprint()
        self._records = records
        self._seed = seed
        self._contestants = {one.label: one for one in contestants}
        self.facts = facts_of(records)
        self._calls: dict[tuple[str, str], list[Record]] = {}
        for record in records:
            if record["type"] == "request":
                key = record["contestant"], record["unit"]
                self._calls.setdefault(key, []).append(record)

    @property
    def labels(self) -> list[str]:
        """Contestants that were called on at least one prompt."""
        return [label for label in self._contestants if self.units(label)]

    @property
    def kinds(self) -> list[str]:
        """Kinds of prompts in the order of the sample, then the control if there is one."""
        found = [c[0] for (owner, _), c in self._calls.items() if owner == BASELINE.label]
        return list(dict.fromkeys(call["kind"] for call in found if call["batch"] == 1))

    def units(self, label: str, kind: str | None = None) -> list[str]:
        """Prompts on which both this contestant and the baseline were called."""
        return [
            unit
            for (owner, unit), calls in self._calls.items()
            if owner == label
            and calls[0]["batch"] == 1
            and (calls[0]["kind"] == kind if kind else calls[0]["kind"] != CONTROL)
            and (BASELINE.label, unit) in self._calls
        ]

    def ratios(self, label: str, kind: str | None = None) -> list[float]:
        return [
            self._speed(label, unit) / self._speed(BASELINE.label, unit)
            for unit in self.units(label, kind)
        ]

    @cached_property
    def rows(self) -> list[Row]:
        kinds: list[str | None] = [None, *(self.kinds if len(self.kinds) > 1 else ())]
        return [
            self._row(label, kind)
            for kind in kinds
            for label in self.labels
            if self.units(label, kind)
        ]

    def broken(self) -> list[Row]:
        """Rows of contestants whose output differs although it must not."""
        return [
            row
            for row in self.rows
            if row.kind in (ALL, CONTROL) and row.promised and row.differing
        ]

    def accepted_lengths(self, label: str) -> dict[int, int]:
        """Number of drafts by how many of their tokens were accepted."""
        return added(output.get("accepted_lengths", {}) for output in self._outputs(label))

    def verify_seconds(self, label: str) -> dict[int, float]:
        """Median seconds of a pass, by its number of nodes (root included)."""
        seconds: dict[int, list[float]] = {}
        for output in self._outputs(label):
            for nodes, values in output.get("verify_seconds", {}).items():
                seconds.setdefault(int(nodes), []).extend(values)
        return {nodes: median(values) for nodes, values in sorted(seconds.items())}

    def batches(self) -> list[BatchPoint]:
        """Latency and throughput by batch size, 1 being the prompts alone."""
        points = []
        for label in self._contestants:
            sizes: dict[int, list[Record]] = {}
            for (owner, _), calls in self._calls.items():
                if owner == label:
                    sizes.setdefault(calls[0]["batch"], []).extend(calls)
            if len(sizes) > 1:
                points += [_batch_point(label, *item) for item in sorted(sizes.items())]
        return points

    def starts(self) -> list[Start]:
        return [
            Start(label, self.facts[label].get("load_seconds"), self._first_token_seconds(label))
            for label in self.labels
        ]

    def memory(self) -> list[Memory]:
        records = [r for r in self._records if r["type"] == "memory"]
        peaks = {
            label: max((r["peak_bytes"] for r in records if r["label"] == label), default=0)
            for label in self.labels
        }
        return [self._memory(label, peak) for label, peak in peaks.items()]

    def roofline(self) -> list[tuple[str, float, float]]:
        """Label, seconds to stream the weights once, and median seconds of a step.

        A step is a target pass without a draft. Peers do not report passes: for those that do not
        speculate it is the time of a token after the first, the others are left out.
        """
        streams = {r["bytes"]: r["seconds"] for r in self._records if r["type"] == "roofline"}
        steps = {label: self._step_seconds(label) for label in self.labels}
        return [
            (label, streams[self.facts[label]["weight_bytes"]], step)
            for label, step in steps.items()
            if step is not None
        ]

    def steps(self) -> list[Steps]:
        found = [steps(label, self._all_calls(label)) for label in self.labels]
        return [one for one in found if one is not None]

    def energy(self) -> list[EnergyUse]:
        found = [energy_use(label, self._all_calls(label), self.footprint) for label in self.labels]
        return [one for one in found if one is not None]

    def agreements(self) -> list[Agreement]:
        """How near the outputs are to the baseline's; empty if all are equal to them."""
        return agreements(self._records)

    def drafter_failures(self) -> dict[str, str]:
        """The contestants whose drafter failed and was given up, with the reason."""
        found = {
            label: [output.get("drafter_failure") for output in self._outputs(label)]
            for label in self.labels
        }
        return {label: next(filter(None, why)) for label, why in found.items() if any(why)}

    @property
    def energy_source(self) -> str:
        """Where energy was read, or why it was not."""
        found = [r["source"] for r in self._records if r["type"] == "energy"]
        return str(found[-1]) if found else "unavailable: nothing was measured"

    @property
    def spread(self) -> float | None:
        """How much rounds of a call differ: (longest - shortest) / median, the median of all.

        None if no call was made in several rounds.
        """
        seconds = [[call["seconds"] for call in calls] for calls in self._calls.values()]
        several = [(max(s) - min(s)) / median(s) for s in seconds if len(s) > 1]
        return float(median(several)) if several else None

    def as_dict(self) -> dict[str, Any]:
        return {
            "baseline": BASELINE.label,
            "contestants": {label: self.facts[label] for label in self.labels},
            "rows": [asdict(row) for row in self.rows],
            "accepted_lengths": {label: self.accepted_lengths(label) for label in self.labels},
            "verify_seconds": {label: self.verify_seconds(label) for label in self.labels},
            "batches": [asdict(point) for point in self.batches()],
            "starts": [asdict(start) for start in self.starts()],
            "memory": [asdict(memory) for memory in self.memory()],
            "roofline": [
                {"label": label, "stream_seconds": stream, "step_seconds": step}
                for label, stream, step in self.roofline()
            ],
            "steps": [asdict(one) for one in self.steps()],
            "agreement": [asdict(one) for one in self.agreements()],
            "energy": self.energy_source,
            "energy_use": [asdict(one) for one in self.energy()],
            "footprint": asdict(self.footprint),
            "spread": self.spread,
        }

    # Inside

    def _outputs(self, label: str) -> list[Record]:
        return [output for call in self._all_calls(label) for output in call["outputs"]]

    def _all_calls(self, label: str) -> list[Record]:
        """The calls on single prompts, without the control."""
        return [call for unit in self.units(label) for call in self._calls[label, unit]]

    def _speed(self, label: str, unit: str) -> float:
        return float(median(tokens(call) / call["seconds"] for call in self._calls[label, unit]))

    def _first_token_seconds(self, label: str) -> float | None:
        found = [output.get("first_token_seconds") for output in self._outputs(label)]
        known = [seconds for seconds in found if seconds is not None]
        return float(median(known)) if known else None

    def _decode_speed(self, label: str, unit: str) -> float | None:
        speeds = []
        for call in self._calls[label, unit]:
            (output,) = call["outputs"]
            prefill = output.get("prefill_seconds")
            if not prefill or prefill >= call["seconds"]:
                return None
            count = output.get("decode_tokens", len(output["token_ids"]))
            speeds.append(count / (call["seconds"] - prefill))
        return float(median(speeds))

    def _row(self, label: str, kind: str | None) -> Row:
        units = self.units(label, kind)
        calls = [call for unit in units for call in self._calls[label, unit]]
        found = [self._differences(label, unit) for unit in units]
        return Row(
            label=label,
            kind=kind or ALL,
            prompts=len(units),
            ratio=bootstrap_ratio(self.ratios(label, kind), self._seed),
            decode_ratio=self._decode_ratio(label, units),
            speed=geometric_mean([self._speed(label, unit) for unit in units]),
            mean_acceptance_length=mean_acceptance_length(calls),
            drafting_share=drafting_share(calls),
            differing=sum(bool(positions) for positions in found),
            first_difference=min((p for positions in found for p in positions), default=None),
            promised=self._promised(label, calls),
            learning=sum(self._learns(label, unit) for unit in units),
            joules=joules(calls),
        )

    def _decode_ratio(self, label: str, units: Sequence[str]) -> Interval | None:
        ratios = []
        for unit in units:
            own, base = (self._decode_speed(name, unit) for name in (label, BASELINE.label))
            if own is None or base is None:
                return None
            ratios.append(own / base)
        return bootstrap_ratio(ratios, self._seed)

    def _differences(self, label: str, unit: str) -> list[int]:
        """Where each differing call on this prompt first differs from the baseline's first call."""
        expected = self._calls[BASELINE.label, unit][0]["outputs"][0]["token_ids"]
        found = [
            first_difference(expected, call["outputs"][0]["token_ids"])
            for call in self._calls[label, unit]
        ]
        return [position for position in found if position is not None]

    def _promised(self, label: str, calls: Sequence[Record]) -> bool:
        """Whether the tokens must be the baseline's.

        They must under a lossless rule with the same weights, for chains and in float32 for trees.
        Sampled tokens must only under rules that keep them for a seed (`coupled`).
        """
        one, facts = self._contestants[label], self.facts[label]
        same = one.quantization == self._contestants[BASELINE.label].quantization
        sampled = any(call["temperature"] for call in calls)
        if one.kind != OWN or not same:
            return False
        if not facts["same_samples" if sampled else "lossless"]:
            return False
        branched = any(output["branched"] for call in calls for output in call["outputs"])
        return facts["dtype"] == "float32" or not branched

    def _learns(self, label: str, unit: str) -> bool:
        calls = self._calls[label, unit]
        return len({call["outputs"][0].get("passes") for call in calls}) > 1

    def _memory(self, label: str, peak: int) -> Memory:
        facts = self.facts[label]
        calls = self._all_calls(label)
        longest = max(call["prompt_tokens"][0] + tokens(call) for call in calls)
        each = facts.get("kv_bytes")
        return Memory(
            label=label,
            peak=max(peak, facts["peak_bytes"]),
            weights=facts["weight_bytes"],
            cache=None if each is None else each * longest,
            drafter=facts.get("draft_bytes"),
        )

    def _step_seconds(self, label: str) -> float | None:
        one = self._contestants[label]
        if one.kind == OWN:
            return self.verify_seconds(label).get(1)
        if not one.kind.endswith("-plain"):
            return None
        speeds = [self._decode_speed(label, unit) for unit in self.units(label)]
        known = [speed for speed in speeds if speed is not None]
        return 1 / median(known) if known else None


def _batch_point(label: str, size: int, calls: Sequence[Record]) -> BatchPoint:
    return BatchPoint(
        label=label,
        size=size,
        latency=median(call["seconds"] for call in calls),
        throughput=median(tokens(call) / call["seconds"] for call in calls),
    )


def facts_of(records: Sequence[Record]) -> dict[str, dict[str, Any]]:
    """Facts that the contestants reported when loaded, by label; the last report counts."""
    found = [record for record in records if record["type"] == "contestant"]
    return {record["label"]: record["facts"] for record in found}


# Figures of single calls, computed from their records in the journal.


def tokens(call: Record) -> int:
    return sum(len(output["token_ids"]) for output in call["outputs"])


def added(counts: Iterable[Mapping[str, int]]) -> dict[int, int]:
    """The sum of histograms whose keys JSON has turned into text; keys ascend."""
    total = Counter[int]()
    for each in counts:
        total.update({int(name): count for name, count in each.items()})
    return dict(sorted(total.items()))


def first_difference(expected: Sequence[int], got: Sequence[int]) -> int | None:
    """The first position at which two lists of tokens differ; None if they are equal."""
    if list(expected) == list(got):
        return None
    pairs = zip(expected, got, strict=False)
    shorter = min(len(expected), len(got))
    return next((at for at, (one, other) in enumerate(pairs) if one != other), shorter)


def mean_acceptance_length(calls: Sequence[Record]) -> float | None:
    """Tokens per target pass with a draft; None for peers, which do not count."""
    outputs = _counted(calls)
    drafts = sum(output["drafts"] for output in outputs)
    if not outputs:
        return None
    kept = sum(output["accepted"] - output.get("cut", 0) for output in outputs)
    return 1 + kept / drafts if drafts else 1.0


def drafting_share(calls: Sequence[Record]) -> float | None:
    """Share of the target passes that had a draft; None for peers, which do not count."""
    outputs = _counted(calls)
    passes = sum(output["passes"] for output in outputs)
    return sum(output["drafts"] for output in outputs) / passes if passes else None


def _counted(calls: Sequence[Record]) -> list[Record]:
    return [output for call in calls for output in call["outputs"] if "drafts" in output]


def joules(calls: Sequence[Record]) -> float | None:
    """Energy per 1,000 tokens; None without an energy counter."""
    if any(call["joules"] is None for call in calls):
        return None
    return float(1000 * sum(call["joules"] for call in calls) / sum(map(tokens, calls)))


def energy_use(label: str, calls: Sequence[Record], footprint: Footprint) -> EnergyUse | None:
    """Energy and emissions of these calls together; None without an energy counter."""
    per_thousand = joules(calls)
    if per_thousand is None:
        return None
    seconds = sum(call["seconds"] for call in calls)
    watts, hours = sum(call["joules"] for call in calls) / seconds, seconds / 3600
    watt_hours = watts * hours * footprint.pue
    return EnergyUse(label, per_thousand, watts, hours, watt_hours, watt_hours * footprint.co2)


def steps(label: str, calls: Sequence[Record]) -> Steps | None:
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


def scipy_stats() -> Any:
    """The module `scipy.stats`, imported at its first use because that takes a second."""
    try:
        return importlib.import_module("scipy.stats")
    except ImportError as error:
        raise TokenleapError(
            f"confidence intervals need SciPy: {how_to_install('bench')}"
        ) from error


def percentiles(
    values: Sequence[Any],
    statistic: Callable[..., Any],
    *,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> tuple[float, float] | None:
    """The ends of a percentile bootstrap interval of (paired) values; None for a single one."""
    if len(values[0]) < 2:
        return None
    found = scipy_stats().bootstrap(
        values,
        statistic,
        paired=len(values) > 1,
        n_resamples=resamples,
        confidence_level=LEVEL,
        method="percentile",
        rng=np.random.default_rng(seed),
    )
    low, high = found.confidence_interval
    return float(low), float(high)


def bootstrap_ratio(ratios: Sequence[float], seed: int = 0) -> Interval:
    """Geometric mean of ratios with a 95 % percentile bootstrap interval.

    With one ratio per prompt, prompts are resampled: the interval says how far the mean of another
    sample of prompts may lie.
    """
    mean = geometric_mean(ratios)
    ends = percentiles((np.log(ratios),), np.mean, seed=seed)
    if ends is None:
        return Interval(mean, None, None)
    low, high = np.exp(ends)
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


# How near outputs are to the baseline's own, and what they cost in p: for lossy rules.
#
# Xia et al., "Speculative Decoding" (SpecDec, 2023), table 6, has relative BLEU: BLEU with the
# outputs of plain decoding as references. sacreBLEU computes it. The baseline's model judges every
# output after all that is timed (`Worker.judge`).


def bleu_metric(name: str = "BLEU") -> Any:
    """The metric of this name of sacreBLEU, such as "CHRF"."""
    try:
        return getattr(importlib.import_module("sacrebleu.metrics"), name)()
    except ImportError as error:
        raise TokenleapError(f"BLEU and chrF need sacreBLEU: {how_to_install('bench')}") from error


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
