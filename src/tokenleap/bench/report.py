"""A comparison as Markdown tables and remarks."""

from __future__ import annotations

import base64
import importlib.util
import io
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from jinja2 import Environment

from tokenleap.bench.contestants import BASELINE
from tokenleap.bench.summary import (
    ALL,
    CONTROL,
    Agreement,
    BatchPoint,
    EnergyUse,
    Memory,
    Results,
    Row,
    Start,
    Steps,
)
from tokenleap.core.extras import how_to_install
from tokenleap.runtime.choices import TORCH_RUNTIMES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.ticker import Locator


T = TypeVar("T")

Table = tuple[str, Sequence[str], list[list[str]]]
"""Title, header, rows."""

ACCEPTANCE = "Mean acceptance length by kind, and the share of target passes that had a draft"


def markdown(results: Results, settings: Mapping[str, Any]) -> str:
    parts = ["# tokenleap bench", facts_line(settings, results)]
    for title, header, rows in tables(results):
        parts += [f"## {title}", markdown_table(header, rows)]
    remarks = "\n".join(f"- {note}" for note in notes(results))
    return "\n\n".join([*parts, "## Remarks", remarks]) + "\n"


def tables(results: Results) -> list[Table]:
    kinds = len(results.kinds) > 1
    found = [
        _table("Speed", [row for row in results.rows if row.kind == ALL], _SPEED),
        *([_by_kind("Speed by kind of prompt", results, _ratio)] if kinds else []),
        *([_by_kind(ACCEPTANCE, results, _acceptance)] if kinds else []),
        _table("Steps", results.steps(), _STEPS),
        contestants_table(results),
        _agreements(results),
        _table("Start", results.starts(), _START),
        _table("Memory", results.memory(), _MEMORY),
        _table("Roofline", results.roofline(), _ROOFLINE),
        _table("Energy", results.energy(), _ENERGY),
        _batches(results),
    ]
    return [each for each in found if each[2] or each[0] == "Roofline"]


def notes(results: Results) -> list[str]:
    """Remarks that a reader of the figures needs."""
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
    """The meaning of the names of PyTorch's runtimes, where they are shown."""
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


def _by_kind(title: str, results: Results, cell: Callable[[Row], str]) -> Table:
    cells = {(row.label, row.kind): cell(row) for row in results.rows}
    found = [
        [label, *(cells.get((label, kind), "-") for kind in results.kinds)]
        for label in results.labels
    ]
    return title, ("contestant", *results.kinds), found


def _ratio(row: Row) -> str:
    return str(row.ratio)


def _acceptance(row: Row) -> str:
    if row.mean_acceptance_length is None or row.drafting_share is None:
        return "-"
    return f"{row.mean_acceptance_length:.2f} ({row.drafting_share:.0%})"


def _agreements(results: Results) -> Table:
    lossless = {True: "yes", False: "no", None: "-"}
    columns: dict[str, Callable[[Agreement], object]] = {
        "contestant": lambda one: one.label,
        "lossless": lambda one: lossless[results.facts[one.label].get("lossless")],
        "outputs equal": lambda one: f"{one.equal} of {one.outputs}",
        "tokens equal": lambda one: f"{one.equal_tokens:.1%}",
        "first difference": lambda one: _or_dash(one.first_difference, ".1f"),
        "relative BLEU": lambda one: f"{one.bleu:.1f}",
        "log p of a token": lambda one: f"{one.logprob:.3f}",
    }
    return _table("Agreement", results.agreements(), columns)


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


def _about_energy(results: Results) -> list[str]:
    if not results.energy():
        return []
    footprint = results.footprint
    return [
        "Wh are average watts times hours times a power usage effectiveness (PUE) of "
        f"{footprint.pue:g}, with {footprint.co2:g} g of CO2 per Wh, for all calls on the prompts."
    ]


def _batches(results: Results) -> Table:
    points = results.batches()
    base = {point.size: point.throughput for point in points if point.label == BASELINE.label}
    columns: dict[str, Callable[[BatchPoint], object]] = {
        "contestant": lambda point: point.label,
        "prompts at once": lambda point: point.size,
        f"speed over {BASELINE.label}": lambda p: f"{p.throughput / base[p.size]:.3f}",
        "seconds": lambda point: f"{point.latency:.3g}",
        "tokens/s together": lambda point: f"{point.throughput:.1f}",
    }
    return _table("Batches", [point for point in points if point.size in base], columns)


def _table(title: str, items: Sequence[T], columns: Mapping[str, Callable[[T], object]]) -> Table:
    return title, tuple(columns), rows_of(items, columns)


def rows_of(items: Sequence[T], columns: Mapping[str, Callable[[T], object]]) -> list[list[str]]:
    """A row for each item; columns say how to make a cell of it."""
    return [[str(cell(item)) for cell in columns.values()] for item in items]


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.3g}"


def _megabytes(size: int | None) -> str:
    return "-" if size is None else f"{size / 1e6:,.1f}"


_SPEED: dict[str, Callable[[Row], object]] = {
    "contestant": lambda row: row.label,
    "prompts": lambda row: row.prompts,
    f"speed over {BASELINE.label}": lambda row: row.ratio,
    "after prefill": lambda row: "-" if row.decode_ratio is None else row.decode_ratio,
    "tokens/s": lambda row: f"{row.speed:.1f}",
    "mean acceptance length": lambda row: _or_dash(row.mean_acceptance_length, ".2f"),
    "outputs differing": lambda row: row.differing,
    "first at token": lambda row: _or_dash(row.first_difference, "d"),
}
_STEPS: dict[str, Callable[[Steps], object]] = {
    "contestant": lambda one: one.label,
    "Tok.: tokens per pass": lambda one: f"{one.tokens:.2f}",
    "t_d: ms of a draft": lambda one: _milliseconds(one.draft_seconds),
    "t_v: ms of its pass": lambda one: _milliseconds(one.verify_seconds),
}
_START: dict[str, Callable[[Start], object]] = {
    "contestant": lambda one: one.label,
    "seconds to load": lambda one: _or_dash(one.load_seconds, ".1f"),
    "ms to the first token": lambda one: _milliseconds(one.first_token_seconds),
}
_MEMORY: dict[str, Callable[[Memory], object]] = {
    "contestant": lambda one: one.label,
    "peak MB": lambda one: _megabytes(one.peak),
    "weights MB": lambda one: _megabytes(one.weights),
    "KV of the longest request MB": lambda one: _megabytes(one.cache),
    "drafter MB": lambda one: _megabytes(one.drafter),
}
_ROOFLINE: dict[str, Callable[[tuple[str, float, float]], object]] = {
    "contestant": lambda one: one[0],
    "ms to stream the weights once": lambda one: f"{1000 * one[1]:.2f}",
    "ms of a step": lambda one: f"{1000 * one[2]:.2f}",
    "of the roofline": lambda one: f"{one[1] / one[2]:.1%}",
}
_ENERGY: dict[str, Callable[[EnergyUse], object]] = {
    "contestant": lambda one: one.label,
    "joules per 1,000 tokens": lambda one: f"{one.joules:.1f}",
    "average W": lambda one: f"{one.watts:.1f}",
    "hours": lambda one: f"{one.hours:.4f}",
    "Wh": lambda one: f"{one.watt_hours:.3f}",
    "g CO2": lambda one: f"{one.co2:.3f}",
}


# Markdown tables.


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with aligned columns, the first to the left and the others to the right."""
    columns = list(zip(header, *rows, strict=True))
    widths = [max(3, *map(len, column)) for column in columns]

    def line(cells: Sequence[str]) -> str:
        first, *others = (
            cell.rjust(width) if index else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return f"| {' | '.join([first, *others])} |"

    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join([line(header), line(rule), *map(line, rows)])


# A comparison as a self-contained HTML file: tables, remarks and plots.


PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>tokenleap bench</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; display: block; overflow-x: auto; }
th, td { padding: .2rem .8rem; border-bottom: 1px solid #ccc; text-align: right; }
th:first-child, td:first-child { text-align: left; }
figure { margin: 2rem 0; }
img { width: 100%; height: auto; }
</style>
</head>
<body>
<h1>tokenleap bench</h1>
<p>{{ facts }}</p>
{% for title, header, rows in tables %}
<h2>{{ title }}</h2>
<table>
<thead><tr>{% for cell in header %}<th>{{ cell }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in rows %}
<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}
</tbody>
</table>
{% endfor %}
{% for title, picture in plots.items() %}
<figure>
<figcaption>{{ title }}</figcaption>
<img alt="{{ title }}" src="data:image/svg+xml;base64,{{ picture }}">
</figure>
{% else %}
<p>Plots need Matplotlib: <code>{{ how_to_install }}</code>, then run again with --resume.</p>
{% endfor %}
<h2>Remarks</h2>
<ul>
{% for note in notes %}
<li>{{ note }}</li>
{% endfor %}
</ul>
</body>
</html>
"""


def html(results: Results, settings: Mapping[str, Any]) -> str:
    """The page; without Matplotlib it has a line that says so in place of the plots."""
    template = Environment(autoescape=True, trim_blocks=True).from_string(PAGE)
    return template.render(
        facts=facts_line(settings, results),
        tables=tables(results),
        notes=notes(results),
        plots=_pictures(results) if can_draw() else {},
        how_to_install=how_to_install("plots"),
    )


def _pictures(results: Results) -> dict[str, str]:
    """As separate images: the ids of several inline SVGs would collide."""
    plots = draw_all(results)
    return {title: base64.b64encode(svg.encode()).decode() for title, svg in plots.items()}


# The plots of a comparison as SVG; needs the extra `plots` (Matplotlib).
#
# Figures 5 (latency against throughput) and 6 (distribution of single-prompt speed-ups), and the
# memory of tables 8 and 9, follow Xia et al., "Speculative Decoding" (SpecDec, 2023).


BINS = 12

THE_REST = "the rest"
"""The part of the peak that shapes do not explain; a remark of the report describes it."""


def can_draw() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def draw_all(results: Results) -> dict[str, str]:
    """SVG texts by title, of all plots that have data."""
    drawing = [label for label in results.labels if results.accepted_lengths(label)]
    passes = [label for label in results.labels if len(results.verify_seconds(label)) > 1]
    plots: dict[str, Callable[[Axes], None] | None] = {
        "Speed-up by kind of prompt": lambda axes: _speed_ups(axes, results),
        "Single-prompt speed-ups": lambda axes: _distribution(axes, results),
        "Accepted tokens per draft": (lambda axes: _accepted(axes, results, drawing))
        if drawing
        else None,
        "Cost of verification by nodes": (lambda axes: _verify(axes, results, passes))
        if passes
        else None,
        "Latency against throughput by batch size": (lambda axes: _plot_batches(axes, results))
        if results.batches()
        else None,
        "Peak memory": lambda axes: _plot_memory(axes, results),
    }
    return {title: _svg(contents) for title, contents in plots.items() if contents is not None}


def _svg(contents: Callable[[Axes], None]) -> str:
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    text = io.StringIO()
    # Without a date and with a fixed salt, equal figures give equal files.
    with rc_context({"svg.hashsalt": "tokenleap", "svg.fonttype": "none"}):
        figure = Figure(figsize=(9, 4.5), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        contents(axes)
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[1]:
            figure.legend(loc="outside upper center", ncols=3, fontsize="small")
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()


def _whole_numbers() -> Locator:
    """Ticks at whole numbers only, for what is counted."""
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(integer=True)


def _others(results: Results) -> list[str]:
    return [label for label in results.labels if label != BASELINE.label] or results.labels


def _speed_ups(axes: Axes, results: Results) -> None:
    labels = _others(results)
    kinds = [*(results.kinds if len(results.kinds) > 1 else ()), ALL]
    rows = {(row.label, row.kind): row for row in results.rows}
    width = 0.8 / len(labels)
    for number, label in enumerate(labels):
        shown = [(at, rows[label, kind]) for at, kind in enumerate(kinds) if (label, kind) in rows]
        means = [row.ratio.mean for _, row in shown]
        lows = [mean - (row.ratio.low or mean) for mean, (_, row) in zip(means, shown, strict=True)]
        highs = [
            (row.ratio.high or mean) - mean for mean, (_, row) in zip(means, shown, strict=True)
        ]
        places = [at + number * width for at, _ in shown]
        axes.bar(places, means, width, yerr=[lows, highs], capsize=3, label=label)
    axes.axhline(1, color="grey", linestyle="--", linewidth=1)
    middle = width * (len(labels) - 1) / 2
    axes.set_xticks([at + middle for at in range(len(kinds))], kinds)
    axes.set_ylabel(f"tokens/s over {BASELINE.label}")


def _distribution(axes: Axes, results: Results) -> None:
    labels = _others(results)
    axes.yaxis.set_major_locator(_whole_numbers())
    axes.hist([results.ratios(label) for label in labels], bins=BINS, label=labels)
    axes.axvline(1, color="grey", linestyle="--", linewidth=1)
    axes.set_xlabel(f"tokens/s over {BASELINE.label} on one prompt")
    axes.set_ylabel("prompts")


def _accepted(axes: Axes, results: Results, labels: list[str]) -> None:
    width = 0.8 / len(labels)
    for number, label in enumerate(labels):
        counts = results.accepted_lengths(label)
        total = sum(counts.values())
        first = (1 - len(labels)) * width / 2  # the bars of a length stand around its tick
        places = [length + first + number * width for length in counts]
        axes.bar(places, [count / total for count in counts.values()], width, label=label)
    axes.xaxis.set_major_locator(_whole_numbers())
    axes.set_xlabel("accepted tokens")
    axes.set_ylabel("share of drafts")


def _verify(axes: Axes, results: Results, labels: list[str]) -> None:
    for label in labels:
        seconds = results.verify_seconds(label)
        axes.plot(list(seconds), [1000 * s for s in seconds.values()], marker="o", label=label)
    axes.xaxis.set_major_locator(_whole_numbers())
    axes.set_xlabel("nodes of a target pass, root included")
    axes.set_ylabel("ms, median")
    axes.set_ylim(bottom=0)


def _plot_batches(axes: Axes, results: Results) -> None:
    points = results.batches()
    for label in dict.fromkeys(point.label for point in points):
        own = [point for point in points if point.label == label]
        x, y = [point.throughput for point in own], [point.latency for point in own]
        axes.plot(x, y, marker="o", label=label)
        for point in own:
            axes.annotate(str(point.size), (point.throughput, point.latency))
    axes.set_xlabel("tokens/s of all prompts together")
    axes.set_ylabel("seconds until all are done")


def _plot_memory(axes: Axes, results: Results) -> None:
    found = results.memory()
    labels = [one.label for one in found]
    left = [0.0] * len(found)
    parts: dict[str, list[float]] = {
        "weights": [one.weights / 1e6 for one in found],
        "KV of the longest request": [(one.cache or 0) / 1e6 for one in found],
        "drafter": [(one.drafter or 0) / 1e6 for one in found],
    }
    known = [sum(values) for values in zip(*parts.values(), strict=True)]
    parts[THE_REST] = [
        max(0.0, one.peak / 1e6 - sure) for one, sure in zip(found, known, strict=True)
    ]
    for name, values in parts.items():
        axes.barh(labels, values, left=left, label=name)
        left = [start + value for start, value in zip(left, values, strict=True)]
    axes.set_xlabel("MB")


# What ran: the settings with what `auto` stood for, and how each contestant computed.


_HIDDEN = (
    *("contestants", "max_num_seqs", "max_num_batched_tokens", "batch_sizes"),
    *("max_prompt_tokens", "control"),
)


def settings_that_ran(settings: Mapping[str, Any], results: Results) -> dict[str, Any]:
    """The settings, with the dtype, device, runtime and threads of the baseline for `auto`."""
    facts = results.facts[BASELINE.label]
    names = ("dtype", "device", "runtime", "threads")
    return {**settings, **{name: facts[name] for name in names if name in facts}}


def facts_line(settings: Mapping[str, Any], results: Results) -> str:
    """The settings and the machine that the figures depend on, in one line."""
    ran = settings_that_ran(settings, results)
    shown = {name: value for name, value in ran.items() if name not in _HIDDEN}
    return ", ".join(f"{name} {value}" for name, value in shown.items() if value is not None)


def contestants_table(results: Results) -> Table:
    """How each contestant computed."""
    facts, exact = results.facts, {True: "yes", False: "no", None: "-"}

    def told(name: str) -> Callable[[str], object]:
        return lambda label: "-" if facts[label].get(name) is None else facts[label][name]

    columns: dict[str, Callable[[str], object]] = {
        "contestant": str,
        "runtime": lambda label: facts[label].get("runtime", "its own"),
        "weights": lambda label: facts[label].get("quantization") or facts[label]["dtype"],
        "device": told("device"),
        "threads": told("threads"),
        "controller": told("controller"),
        "bit-exact": lambda label: exact[facts[label].get("bit_exact")],
    }
    return _table("What ran", results.labels, columns)
