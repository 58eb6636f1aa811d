"""A comparison as Markdown tables and remarks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tokenleap.bench.contestants import BASELINE
from tokenleap.bench.ran import contestants_table, facts_line
from tokenleap.bench.ratios import Interval
from tokenleap.bench.rows import ALL, CONTROL, Row
from tokenleap.bench.summary import Results
from tokenleap.bench.tables import markdown_table
from tokenleap.runtime.choices import TORCH_RUNTIMES

__all__ = ["Table", "markdown", "notes", "tables"]

Table = tuple[str, Sequence[str], list[list[str]]]
"""Title, header, rows."""

ACCEPTANCE = "Mean acceptance length by kind, and the share of target passes that had a draft"

HEADER = (
    "contestant",
    "prompts",
    f"speed over {BASELINE.label}",
    "after prefill",
    "tokens/s",
    "mean acceptance length",
    "outputs differing",
    "first at token",
)


def markdown(results: Results, settings: Mapping[str, Any]) -> str:
    """All tables and remarks."""
    parts = ["# tokenleap bench", facts_line(settings, results)]
    for title, header, rows in tables(results):
        parts += [f"## {title}", markdown_table(header, rows)]
    remarks = "\n".join(f"- {note}" for note in notes(results))
    return "\n\n".join([*parts, "## Remarks", remarks]) + "\n"


def tables(results: Results) -> list[Table]:
    """All tables that have rows."""
    rows = results.rows
    overall = [row for row in rows if row.kind == ALL]
    found: list[Table] = [("Speed", HEADER, [_cells(row) for row in overall])]
    if len(results.kinds) > 1:
        found.append(("Speed by kind of prompt", *_by_kind(results, rows, _ratio)))
        found.append((ACCEPTANCE, *_by_kind(results, rows, _acceptance)))
    if results.steps():
        found.append(("Steps", *_steps(results)))
    found.append(("What ran", *contestants_table(results)))
    if results.agreements():
        found.append(("Agreement", *_agreements(results)))
    found.append(("Start", *_starts(results)))
    found.append(("Memory", *_memory(results)))
    found.append(("Roofline", *_roofline(results)))
    if results.energy():
        found.append(("Energy", *_energy(results)))
    if results.batches():
        found.append(("Batches", *_batches(results)))
    return found


def notes(results: Results) -> list[str]:
    """What a reader needs to know about the figures."""
    baseline = results.facts[BASELINE.label]
    found = [
        "A ratio is the geometric mean over prompts of medians over rounds, with a 95 % bootstrap "
        "interval over prompts. Compare ratios: tokens/s depend on what else the machine did.",
        *_about_rounds(results),
        "Loading is timed from the start of the contestant's process, so it has the imports of its "
        "libraries. The first token's time is the median over prompts.",
        "Memory: the peak is that of the contestant's process. Weights, KV and drafter are "
        "computed from shapes. The rest of the peak is Python with its libraries, buffers of the "
        "passes, and copies of the weights, such as those that were read to be packed.",
        f"Energy: {results.energy_source}.",
        *_about_runtimes(results),
    ]
    found += _about_energy(results) + _about_agreement(results)
    found += [
        f"{label}: version {facts['version']}, weights {facts['dtype']}"
        + ("." if facts["dtype"] == baseline["dtype"] else f", not {baseline['dtype']}.")
        for label, facts in results.facts.items()
        if "version" in facts
    ]
    found += [
        f"{label}: its drafter failed and was given up: {why}"
        for label, why in results.drafter_failures().items()
    ]
    found += _control(results) + _who_is_measured_in_batches(results)
    overall = [row for row in results.rows if row.kind == ALL]
    found += [
        f"{row.label}: outputs must be those of {BASELINE.label}, and differ on {row.differing} "
        f"prompts{'' if row.kind == ALL else ' of the control'}."
        for row in results.broken()
    ]
    found += [
        f"{row.label}: on {row.learning} prompts the rounds took different numbers of target "
        "passes. Either its draft lengths depend on measured times, or it learns from earlier "
        "requests; if it learns, only --rounds 1 is fair, since every round has the same prompts."
        for row in overall
        if row.learning
    ]
    return found


def _about_runtimes(results: Results) -> list[str]:
    """What the names of PyTorch's runtimes mean, where they are shown."""
    ran = {facts.get("runtime") for facts in results.facts.values()}
    shown = ((name, what) for name, what in TORCH_RUNTIMES.items() if name in ran)
    return [f"The runtime {name} is {what}." for name, what in shown]


def _about_rounds(results: Results) -> list[str]:
    if results.spread is None:
        return ["Every call was made once, so nothing tells how much the machine's speed varied."]
    return [
        f"Rounds of the same call differ by {results.spread:.1%} (longest less shortest "
        "over their median; the median of all calls)."
    ]


def _control(results: Results) -> list[str]:
    rows = [row for row in results.rows if row.kind == CONTROL]
    if not rows:
        return []
    return [
        f"{CONTROL}: {rows[0].prompts} prompts of random tokens, sampled at temperature 1.5. "
        "Drafts are hardly ever right there, so a ratio below 1 is what the method costs."
    ]


def _who_is_measured_in_batches(results: Results) -> list[str]:
    if not results.batches():
        return []
    measured = [label for label, facts in results.facts.items() if facts["batches"]]
    return [
        f"Several prompts at once were measured for {', '.join(measured)}.",
        *(
            f"{label}: measured with one prompt at a time: {facts['no_batches']}."
            for label, facts in results.facts.items()
            if not facts["batches"]
        ),
    ]


def _cells(row: Row) -> list[str]:
    return [
        row.label,
        str(row.prompts),
        _interval(row.ratio),
        _interval(row.decode_ratio),
        f"{row.speed:.1f}",
        _or_dash(row.mean_acceptance_length, ".2f"),
        str(row.differing),
        _or_dash(row.first_difference, "d"),
    ]


def _by_kind(
    results: Results, rows: Sequence[Row], cell: Callable[[Row], str]
) -> tuple[Sequence[str], list[list[str]]]:
    cells = {(row.label, row.kind): cell(row) for row in rows}
    found = [
        [label, *(cells.get((label, kind), "-") for kind in results.kinds)]
        for label in results.labels
    ]
    return ("contestant", *results.kinds), found


def _ratio(row: Row) -> str:
    return str(row.ratio)


def _acceptance(row: Row) -> str:
    if row.mean_acceptance_length is None or row.drafting_share is None:
        return "-"
    return f"{row.mean_acceptance_length:.2f} ({row.drafting_share:.0%})"


def _starts(results: Results) -> tuple[Sequence[str], list[list[str]]]:
    header = ("contestant", "seconds to load", "ms to the first token")
    found = [
        [one.label, _or_dash(one.load_seconds, ".1f"), _milliseconds(one.first_token_seconds)]
        for one in results.starts()
    ]
    return header, found


def _memory(results: Results) -> tuple[Sequence[str], list[list[str]]]:
    header = ("contestant", "peak MB", "weights MB", "KV of the longest request MB", "drafter MB")
    found = [
        [one.label, *(_megabytes(size) for size in (one.peak, one.weights, one.cache, one.drafter))]
        for one in results.memory()
    ]
    return header, found


def _steps(results: Results) -> tuple[Sequence[str], list[list[str]]]:
    header = ("contestant", "Tok.: tokens per pass", "t_d: ms of a draft", "t_v: ms of its pass")
    found = [
        [
            one.label,
            f"{one.tokens:.2f}",
            *(_milliseconds(seconds) for seconds in (one.draft_seconds, one.verify_seconds)),
        ]
        for one in results.steps()
    ]
    return header, found


def _agreements(results: Results) -> tuple[Sequence[str], list[list[str]]]:
    header = ("contestant", "lossless", "outputs equal", "tokens equal", "first difference")
    found = [
        [
            one.label,
            {True: "yes", False: "no", None: "-"}[results.facts[one.label].get("lossless")],
            f"{one.equal} of {one.outputs}",
            f"{one.equal_tokens:.1%}",
            _or_dash(one.first_difference, ".1f"),
            f"{one.bleu:.1f}",
            f"{one.logprob:.3f}",
        ]
        for one in results.agreements()
    ]
    return (*header, "relative BLEU", "log p of a token"), found


def _about_agreement(results: Results) -> list[str]:
    if not results.agreements():
        return []
    return [
        f"Agreement is with the output of {BASELINE.label} for the same prompt and seed. First "
        "difference: the mean position in outputs that differ, from 0. Relative BLEU: sacreBLEU's "
        f"with {BASELINE.label}'s outputs as references. log p: the mean over tokens, in nats, "
        f"under the model of {BASELINE.label} at temperature 1. Another lossless rule may draw "
        "other samples from the same distribution: its log p is about the same."
    ]


def _energy(results: Results) -> tuple[Sequence[str], list[list[str]]]:
    header = ("contestant", "joules per 1,000 tokens", "average W", "hours", "Wh", "g CO2")
    found = [
        [
            one.label,
            f"{one.joules:.1f}",
            f"{one.watts:.1f}",
            f"{one.hours:.4f}",
            f"{one.watt_hours:.3f}",
            f"{one.co2:.3f}",
        ]
        for one in results.energy()
    ]
    return header, found


def _about_energy(results: Results) -> list[str]:
    if not results.energy():
        return []
    footprint = results.footprint
    return [
        "Wh are average watts times hours times a power usage effectiveness (PUE) of "
        f"{footprint.pue:g}, with {footprint.co2:g} g of CO2 per Wh, for all calls on the prompts."
    ]


def _roofline(results: Results) -> tuple[Sequence[str], list[list[str]]]:
    header = ("contestant", "ms to stream the weights once", "ms of a step", "of the roofline")
    found = [
        [label, f"{1000 * stream:.2f}", f"{1000 * step:.2f}", f"{stream / step:.1%}"]
        for label, stream, step in results.roofline()
    ]
    return header, found


def _batches(results: Results) -> tuple[Sequence[str], list[list[str]]]:
    points = results.batches()
    base = {point.size: point.throughput for point in points if point.label == BASELINE.label}
    found = [
        [
            point.label,
            str(point.size),
            f"{point.throughput / base[point.size]:.3f}",
            f"{point.latency:.3g}",
            f"{point.throughput:.1f}",
        ]
        for point in points
        if point.size in base
    ]
    header = ("contestant", "prompts at once", f"speed over {BASELINE.label}", "seconds")
    return (*header, "tokens/s together"), found


def _interval(interval: Interval | None) -> str:
    return "-" if interval is None else str(interval)


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.3g}"


def _megabytes(size: int | None) -> str:
    return "-" if size is None else f"{size / 1e6:,.1f}"
