"""The results of all calls: ratios with intervals, agreement, acceptance lengths, costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from statistics import median
from typing import Any

from tokenleap.bench.contestants import BASELINE, OWN, Contestant
from tokenleap.bench.rows import (
    ALL,
    CONTROL,
    Agreement,
    BatchPoint,
    EnergyUse,
    Footprint,
    Interval,
    Memory,
    Row,
    Start,
    Steps,
    added,
    agreements,
    bootstrap_ratio,
    drafting_share,
    energy_use,
    first_difference,
    geometric_mean,
    joules,
    mean_acceptance_length,
    steps,
    tokens,
)
from tokenleap.bench.run import facts_of

__all__ = ["Results"]


class Results:
    """The figures of a journal's records.

    Args:
        contestants: the baseline first; those without a call are left out.
    """

    def __init__(
        self,
        records: Sequence[Mapping[str, Any]],
        contestants: Sequence[Contestant],
        seed: int = 0,
        footprint: Footprint | None = None,
    ) -> None:
        self.footprint = footprint or Footprint()
        self._records = records
        self._seed = seed
        self._contestants = {one.label: one for one in contestants}
        self.facts = facts_of(records)
        self._calls: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
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
        """Tokens/s over the baseline's, of every prompt."""
        return [
            self._speed(label, unit) / self._speed(BASELINE.label, unit)
            for unit in self.units(label, kind)
        ]

    @cached_property
    def rows(self) -> list[Row]:
        """All kinds together, then each, of every contestant."""
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
            sizes: dict[int, list[Mapping[str, Any]]] = {}
            for (owner, _), calls in self._calls.items():
                if owner == label:
                    sizes.setdefault(calls[0]["batch"], []).extend(calls)
            if len(sizes) > 1:
                points += [_batch_point(label, *item) for item in sorted(sizes.items())]
        return points

    def starts(self) -> list[Start]:
        """How long every contestant took to load, and to the first token of a prompt."""
        return [
            Start(label, self.facts[label].get("load_seconds"), self._first_token_seconds(label))
            for label in self.labels
        ]

    def memory(self) -> list[Memory]:
        """Peak memory of every contestant, and its parts."""
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
        """Tokens and times of the steps of every contestant that counts them."""
        found = [steps(label, self._all_calls(label)) for label in self.labels]
        return [one for one in found if one is not None]

    def energy(self) -> list[EnergyUse]:
        """Energy and emissions of every contestant; empty without an energy counter."""
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
        """For JSON."""
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

    def _outputs(self, label: str) -> list[Mapping[str, Any]]:
        return [output for call in self._all_calls(label) for output in call["outputs"]]

    def _all_calls(self, label: str) -> list[Mapping[str, Any]]:
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

    def _promised(self, label: str, calls: Sequence[Mapping[str, Any]]) -> bool:
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


def _batch_point(label: str, size: int, calls: Sequence[Mapping[str, Any]]) -> BatchPoint:
    return BatchPoint(
        label=label,
        size=size,
        latency=median(call["seconds"] for call in calls),
        throughput=median(tokens(call) / call["seconds"] for call in calls),
    )
