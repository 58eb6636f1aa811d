"""Figures of single calls, computed from their records in the journal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from tokenleap.bench.rows import EnergyUse, Footprint, Steps

__all__ = [
    "added",
    "drafting_share",
    "energy_use",
    "first_difference",
    "joules",
    "mean_acceptance_length",
    "steps",
    "tokens",
]


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
