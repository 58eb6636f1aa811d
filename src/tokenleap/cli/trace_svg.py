"""The timelines of traces as an SVG file, like figure 5 of Leviathan et al. (2023).

It needs Matplotlib, the extra `plots`. A draft is divided evenly into its levels, since a trace has
the time of the whole draft only.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from tokenleap.cli.files import check_writable, write_whole
from tokenleap.cli.root import UsageError
from tokenleap.cli.trace_timeline import KINDS, Span, Timeline

__all__ = ["check_drawing", "write_svg"]

COLOURS = {
    "encoder": "#e0b000",
    "prompt": "#bbbbbb",
    "draft": "#3a8f3a",
    "target": "#6a3d9a",
    "accept": "#dddddd",
}


def check_drawing(path: Path) -> None:
    """Check that the file can be drawn and written.

    Raises:
        UsageError: Matplotlib is not installed, or the path cannot be written to.
    """
    if find_spec("matplotlib") is None:
        raise UsageError("--svg needs Matplotlib: pip install 'tokenleap[plots]'")
    check_writable(path)


def write_svg(path: Path, timelines: Sequence[Timeline]) -> None:
    """Draw a row per timeline, the first on top, and write the file.

    Raises:
        OSError: the file cannot be written.
    """
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    text = io.StringIO()
    # Without a date and with a fixed salt, equal traces give equal files.
    with rc_context({"svg.hashsalt": "tokenleap", "svg.fonttype": "none"}):
        figure = Figure(figsize=(12, 1.2 + 0.6 * len(timelines)), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        for row, timeline in enumerate(timelines):
            for kind, colour in COLOURS.items():
                ranges = [
                    part for span in timeline.spans if span.kind == kind for part in _bars(span)
                ]
                axes.broken_barh(ranges, (row - 0.35, 0.7), color=colour, ec="white", lw=0.3)
        axes.set_yticks(range(len(timelines)), [timeline.name for timeline in timelines])
        axes.invert_yaxis()
        axes.set_xlim(0, max(timeline.seconds for timeline in timelines))
        axes.set_xlabel("seconds")
        shown = [k for k in KINDS if any(timeline.count(k) for timeline in timelines)]
        patches = [Patch(color=COLOURS[kind], label=KINDS[kind]) for kind in shown]
        figure.legend(handles=patches, loc="outside upper center", ncols=len(patches))
        figure.savefig(text, format="svg", metadata={"Date": None})
    write_whole(path, text.getvalue())


def _bars(span: Span) -> list[tuple[float, float]]:
    """Begin and length of every level of a span."""
    length = (span.end - span.start) / span.levels
    return [(span.start + level * length, length) for level in range(span.levels)]
