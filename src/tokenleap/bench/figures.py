"""The plots of a comparison as SVG; needs the extra `plots` (Matplotlib).

Figures 5 (latency against throughput) and 6 (distribution of single-prompt speed-ups), and the
memory of tables 8 and 9, follow Xia et al., "Speculative Decoding" (SpecDec, 2023).
"""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Callable
from typing import TYPE_CHECKING

from tokenleap.bench.contestants import BASELINE
from tokenleap.bench.rows import ALL
from tokenleap.bench.summary import Results

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.ticker import Locator

__all__ = ["can_draw", "draw_all"]

BINS = 12

THE_REST = "the rest"
"""What of the peak is not computed from shapes; a remark of the report says what it is."""


def can_draw() -> bool:
    """Whether Matplotlib is installed."""
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
        "Latency against throughput by batch size": (lambda axes: _batches(axes, results))
        if results.batches()
        else None,
        "Peak memory": lambda axes: _memory(axes, results),
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


def _batches(axes: Axes, results: Results) -> None:
    points = results.batches()
    for label in dict.fromkeys(point.label for point in points):
        own = [point for point in points if point.label == label]
        x, y = [point.throughput for point in own], [point.latency for point in own]
        axes.plot(x, y, marker="o", label=label)
        for point in own:
            axes.annotate(str(point.size), (point.throughput, point.latency))
    axes.set_xlabel("tokens/s of all prompts together")
    axes.set_ylabel("seconds until all are done")


def _memory(axes: Axes, results: Results) -> None:
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
