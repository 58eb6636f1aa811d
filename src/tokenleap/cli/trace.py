"""`tokenleap trace`: draw a recorded run like figures 1 and 5 of Leviathan et al. (2023)."""

from __future__ import annotations

import io
import json
import math
import re
from base64 import b64encode
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from importlib import resources
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from tokenleap.cli.console import display, plain, safe, say, show, show_json, table_of, tell
from tokenleap.cli.options import need_matplotlib
from tokenleap.cli.root import UsageError, check_writable, examples, write_whole
from tokenleap.errors import TokenleapError

if TYPE_CHECKING:
    from tokenleap.trace import StepTrace, Trace

EXAMPLES = examples(
    'tokenleap generate "Count to ten." --trace steps.json',
    "tokenleap trace steps.json",
    "tokenleap trace steps.json plain.json --timeline --svg timeline.svg",
    "tokenleap trace steps.json --html steps.html",
    "tokenleap trace steps.json --json | jq .mean_acceptance_length",
)

_BAR_CELLS = 30


def trace(
    files: Annotated[
        list[Path],
        typer.Argument(
            help="Written by `tokenleap generate --trace FILE`; several for one timeline.",
            metavar="FILE",
            show_default=False,
        ),
    ],
    timeline: Annotated[
        bool, typer.Option("--timeline", help="Show when the target and the drafter computed.")
    ] = False,
    svg: Annotated[
        Path | None, typer.Option(help="Write the timeline as SVG.", metavar="FILE")
    ] = None,
    page: Annotated[
        Path | None,
        typer.Option(
            "--html",
            help="Write one self-contained page to look through the steps in a browser.",
            metavar="OUT",
        ),
    ] = None,
    json_output: Annotated[
        bool, typer.Option("--json", help="Print the summary only, as one JSON object.")
    ] = False,
) -> None:
    """Show what every step drafted, accepted and corrected, a line per step."""
    from tokenleap.trace import Trace

    if timeline or svg is not None:
        if json_output or page is not None:
            raise UsageError("--timeline and --svg show times only: leave out --json and --html")
        _timelines(files, svg, shown=timeline)
        return
    if len(files) > 1:
        raise UsageError("only --timeline and --svg take several traces: give one file")
    recorded = Trace.load(files[0])
    if page is not None:
        check_writable(page, *files)
        write_whole(page, html(recorded, files[0].stem))
        if not json_output:
            say(f"Written to {page}.")
            return
    summary = TraceSummary(recorded)
    if json_output:
        show_json(summary.as_dict())
        return
    positions = [_positions(summary)] if summary.positions else []
    show(legend(), _steps(recorded), _figures(summary), *positions)


def _timelines(files: Sequence[Path], svg: Path | None, *, shown: bool) -> None:
    """Show the timelines of traces, write them as SVG, or both."""
    from tokenleap.trace import Trace

    if svg is not None:
        need_matplotlib("--svg")
        check_writable(svg, *files)
    found = [timeline_of(file.stem, Trace.load(file)) for file in files]
    if shown:
        show_timelines(found)
    if svg is not None:
        write_svg(svg, found)


def _steps(recorded: Trace) -> Table:
    table = Table(box=None, pad_edge=False, header_style="note", padding=(0, 2, 0, 0))
    table.add_column("step", justify="right", style="note")
    table.add_column("kept", justify="right", style="note", no_wrap=True)
    table.add_column("tokens", overflow="fold")
    for number, step in enumerate(recorded, start=1):
        share = f"{len(step.kept)}/{len(step.drafted)}" if step.drafted else ""
        table.add_row(str(number), share, picture(step, recorded.pieces))
    return table


def _figures(summary: TraceSummary) -> str:
    metrics = summary.metrics
    return (
        f"{metrics.generated_tokens} tokens in {metrics.target_passes} steps, "
        f"{metrics.num_drafts} with a draft\n"
        f"mean acceptance length {metrics.mean_acceptance_length:.2f}, "
        f"acceptance rate {metrics.acceptance_rate:.2f}\n"
        f"{metrics.step_seconds:.2f} s: draft {metrics.draft_seconds:.2f}, "
        f"verify {metrics.verify_seconds:.2f}, accept {metrics.accept_seconds:.2f}"
    )


def _positions(summary: TraceSummary) -> Table:
    """How often the token at each position of a draft was kept."""
    table = table_of(("position", "kept"), (), style="note")
    table.add_column("")
    for position, (drafted, accepted) in enumerate(summary.positions, start=1):
        bar = "\u2501" * round(_BAR_CELLS * accepted / drafted)
        table.add_row(str(position), f"{accepted}/{drafted}", plain(bar, "draft"))
    return table


# A trace as one self-contained HTML file: the trace viewer of the server's page with one trace.
#
# The viewer is a few ES modules in `serve/static`, which browsers load as they are from the server.
# A file on a disk cannot load modules, so they are joined into one script here. The page's policy
# allows this script and this style by their hashes, and nothing else: no network, no other script.


_STATIC = resources.files("tokenleap") / "serve" / "static"
_ENTRY = "trace_page.js"
_IMPORT = re.compile(r'^import [^;]*? from "\./(?P<file>[a-z_]+\.js)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=function|class|const)", re.MULTILINE)


def html(trace: Trace, title: str) -> str:
    """The page."""
    from jinja2 import Environment
    from markupsafe import Markup

    style, script = _read("page.css"), "".join(_modules(_ENTRY, set()))
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; "
        "base-uri 'none'; form-action 'none'"
    )
    # A text is data in a script element, where only "<" could end the element.
    data = json.dumps(trace.as_dict()).replace("<", "\\u003c")
    template = Environment(autoescape=True, keep_trailing_newline=True).from_string(
        _read("trace.html")
    )
    return template.render(
        title=title,
        policy=Markup(policy),
        style=Markup(style),
        script=Markup(script),
        trace=Markup(data),
    )


def _read(name: str) -> str:
    return (_STATIC / name).read_text(encoding="utf-8")


def _modules(name: str, seen: set[str]) -> Iterator[str]:
    """The modules that this one imports, then itself, without imports and exports; each once."""
    if name in seen:
        return
    seen.add(name)
    source = _read(name)
    for found in _IMPORT.finditer(source):
        yield from _modules(found["file"], seen)
    yield _EXPORT.sub("", _IMPORT.sub("", source))


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


# One step of a trace as one line, like figure 1 of Leviathan et al. (2023).
#
#     accepted accepted x rejected unreached > correction
#     accepted accepted accepted + bonus
#
# The marks repeat what the colours say, for output without colours. A token tree has a line per
# branch. `tokenleap trace` prints these lines.


REJECTED, CORRECTION, BONUS = "\u2717", "\u2192", "+"
_VISIBLE = str.maketrans({" ": "\u00b7", "\n": "\u21b5", "\t": "\u21e5", "\r": "\u240d"})


def legend() -> Text:
    """The meaning of marks and colours."""
    return Text("   ").join(
        [
            Text("accepted", "draft"),
            Text(f"{REJECTED}rejected", "rejected"),
            Text("not reached", "unreached"),
            Text(f"{CORRECTION}correction", "correction"),
            Text(f"{BONUS}bonus", "bold"),
        ]
    )


def visible(piece: str) -> str:
    """A token's text with its white space shown."""
    return safe(piece.translate(_VISIBLE)) or "''"


def picture(step: StepTrace, pieces: Mapping[int, str]) -> Text:
    """The step's tokens, in one line if its draft is a chain."""
    return _Picture(step, pieces).text()


class _Picture:
    def __init__(self, step: StepTrace, pieces: Mapping[int, str]) -> None:
        self._step = step
        self._pieces = pieces
        self._kept, self._refused = set(step.kept), set(step.refused)
        # The node that the correction or the bonus token follows; -1 is the root.
        self._end = step.accepted[-1] if step.accepted else -1

    def text(self) -> Text:
        if all(parent == index - 1 for index, parent in enumerate(self._step.parents)):
            tokens = [self._token(index) for index in range(len(self._step.drafted))]
            return Text(" ").join([*tokens, *self._added()])
        return Text("\n").join(self._branches(-1))

    def _token(self, index: int) -> Text:
        text = self._piece(self._step.drafted[index])
        if index in self._kept:
            return Text(text, "draft")
        if index in self._refused:
            return Text(REJECTED + text, "rejected")
        return Text(text, "unreached")

    def _added(self) -> list[Text]:
        """The token after the accepted path, unless a stop cut it off."""
        if self._step.committed <= len(self._step.accepted):
            return []
        text = self._piece(self._step.token)
        if self._step.origin.value == "correction":
            return [Text(CORRECTION + text, "correction")]
        return [Text((BONUS if self._step.drafted else "") + text, "bold")]

    def _piece(self, token: int) -> str:
        return visible(self._pieces.get(token, f"#{token}"))

    def _branches(self, node: int) -> list[Text]:
        """Lines for everything below a node, -1 being the root; the first goes on its own line."""
        children = [self._subtree(i) for i, p in enumerate(self._step.parents) if p == node]
        if node == self._end:
            children += [[added] for added in self._added()]
        if len(children) < 2:
            return children[0] if children else []
        lines = [Text()] if node >= 0 else []
        for child in children:
            last = child is children[-1]
            first, *others = child
            lines.append(Text("\u2514\u2500 " if last else "\u251c\u2500 ", "note") + first)
            lines += [Text("   " if last else "\u2502  ", "note") + line for line in others]
        return lines

    def _subtree(self, index: int) -> list[Text]:
        first, *others = self._branches(index) or [Text()]
        return [Text(" ").join([self._token(index), *([first] if first else [])]), *others]


# Counts over all steps of a trace: the summary that `tokenleap trace` shows.


_COUNTS = (
    *("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_rejected_tokens"),
    *("mean_acceptance_length", "acceptance_rate"),
)
_TIMES = ("draft_seconds", "verify_seconds", "accept_seconds")


class TraceSummary:
    """Counts and times over all steps of a trace."""

    def __init__(self, trace: Trace) -> None:
        from tokenleap.outputs import Metrics

        self.metrics = Metrics()
        self.drafted_per_position: Counter[int] = Counter()
        for step in trace:
            self._add(step)

    def _add(self, step: StepTrace) -> None:
        metrics = self.metrics
        metrics.count(step)
        for name in _TIMES:
            setattr(metrics, name, getattr(metrics, name) + getattr(step, name))
        self.drafted_per_position.update(range(1, max(step.depths, default=0) + 1))

    @property
    def positions(self) -> list[tuple[int, int]]:
        """Per depth from 1 on: drafts that reach it, and how many of them were kept there."""
        kept = enumerate(self.metrics.accepted_per_position, start=1)
        return [(self.drafted_per_position[depth], count) for depth, count in kept]

    def as_dict(self) -> dict[str, Any]:
        return {
            "steps": self.metrics.target_passes,
            "tokens": self.metrics.generated_tokens,
            **{name: getattr(self.metrics, name) for name in _COUNTS},
            "drafted_per_position": [drafted for drafted, _ in self.positions],
            **{name: getattr(self.metrics, name) for name in ("accepted_per_position", *_TIMES)},
        }


# The timelines of traces as an SVG file, like figure 5 of Leviathan et al. (2023).
#
# It needs Matplotlib, the extra `plots`. A draft is divided evenly into its levels, since a trace
# has the time of the whole draft only.


COLOURS = {
    "encoder": "#e0b000",
    "prompt": "#bbbbbb",
    "draft": "#3a8f3a",
    "target": "#6a3d9a",
    "accept": "#dddddd",
}


def write_svg(path: Path, timelines: Sequence[Timeline]) -> None:
    """Draw a row per timeline, the first on top, and write the file."""
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


# When the target and the drafter computed: figure 5 of Leviathan et al. (2023), from traces.
#
# Traces that are shown together have one time scale, as the rows of the figure have: for example
# two draft lengths and plain decoding. `trace.py` draws the same spans.


KINDS = {
    "encoder": "the encoder",
    "prompt": "the prompt",
    "draft": "a draft",
    "target": "a target pass",
    "accept": "accept, commit",
}
"""Kinds of computation, in the order of a request's life."""

_MARKS = {"encoder": "E", "prompt": "P", "draft": "\u2592", "target": "\u2588", "accept": "\u00b7"}
_STYLES = {"draft": "draft", "target": "correction", "accept": "unreached"}
_FIRST = "\u2590"
"""The first cell of a target pass: half of it is empty, so that passes do not run together."""

_CELLS_PER_PASS = 4
_LINES = 20
"""Most lines of the longest trace; a longer one gets longer cells."""


@dataclass(frozen=True)
class Span:
    """One block of a timeline; `levels` is the depth of a draft's tree."""

    kind: str
    start: float
    end: float
    levels: int = 1


@dataclass(frozen=True)
class Timeline:
    """All spans of a trace in order, without gaps."""

    name: str
    spans: tuple[Span, ...]
    tokens: int

    @property
    def seconds(self) -> float:
        """From the beginning of the prompt to the last token."""
        return self.spans[-1].end

    def total(self, kind: str) -> float:
        return sum(span.end - span.start for span in self.spans if span.kind == kind)

    def count(self, kind: str) -> int:
        return sum(span.kind == kind for span in self.spans)


def timeline_of(name: str, trace: Trace) -> Timeline:
    spans: list[Span] = []
    now = 0.0
    for kind, seconds, levels in _parts(trace):
        if seconds > 0:
            spans.append(Span(kind, now, now + seconds, levels))
            now += seconds
    if not spans:
        raise TokenleapError(f"{name}: the trace has no steps with times: nothing to show.")
    return Timeline(name, tuple(spans), sum(step.committed for step in trace))


def _parts(trace: Trace) -> Iterator[tuple[str, float, int]]:
    """Kind, seconds and levels of everything that was computed, in order."""
    yield "encoder", trace.encode_seconds, 1
    yield "prompt", trace.prefill_seconds - trace.encode_seconds, 1
    for step in trace:
        yield from _step_parts(step)


def _step_parts(step: StepTrace) -> Iterator[tuple[str, float, int]]:
    if step.drafted:
        yield "draft", step.draft_seconds, max(step.depths)
    yield "target", step.verify_seconds, 1
    rest = 0.0 if step.drafted else step.draft_seconds  # looking for a draft and finding none
    yield "accept", step.accept_seconds + rest, 1


def show_timelines(timelines: Sequence[Timeline]) -> None:
    """Print the timelines with one scale, in lines of the terminal's width."""
    console = display()
    width = max(1, min(console.width, 120) - _margin(timelines))
    cell = _cell_seconds(timelines, width)
    console.print(_legend(timelines))
    console.print(plain(f"one cell: {1000 * cell:.3g} ms; at the left, seconds", "note"))
    for timeline in timelines:
        console.print()
        tell(_summary(timeline))
        cells = _cells(timeline, cell)
        for begin in range(0, len(cells), width):
            at = plain(f"{begin * cell:{_margin(timelines) - 1}.2f} ", "note")
            console.print(at + cells[begin : begin + width], no_wrap=True, overflow="ignore")


def _margin(timelines: Sequence[Timeline]) -> int:
    """Width of the time at the left, with a space after it."""
    return len(f"{max(one.seconds for one in timelines):.2f}") + 1


def _cell_seconds(timelines: Sequence[Timeline], width: int) -> float:
    """So short that a pass has several cells, unless that would take too many lines."""
    passes = [s.end - s.start for one in timelines for s in one.spans if s.kind == "target"]
    fine = median(passes) / _CELLS_PER_PASS if passes else 0.0
    return max(fine, max(one.seconds for one in timelines) / (_LINES * width))


def _cells(timeline: Timeline, cell: float) -> Text:
    """A mark per cell: that of the kind which took most of its time."""
    shares: list[Counter[str]] = [
        Counter() for _ in range(max(1, math.ceil(timeline.seconds / cell - 1e-9)))
    ]
    begins: set[int] = set()
    for span in timeline.spans:
        first, last = int(span.start / cell), min(int(span.end / cell), len(shares) - 1)
        for index in range(first, last + 1):
            inside = min(span.end, (index + 1) * cell) - max(span.start, index * cell)
            shares[index][span.kind] += inside  # type: ignore[assignment]
        if span.kind == "target":
            begins.add(round(span.start / cell))
    kinds = [share.most_common(1)[0][0] for share in shares]
    text = Text()
    for index, kind in enumerate(kinds):
        mark = _FIRST if kind == "target" and index in begins else _MARKS[kind]
        text.append(mark, _STYLES.get(kind, ""))
    return text


def _legend(timelines: Sequence[Timeline]) -> Text:
    """The marks of all kinds that occur."""
    shown = [kind for kind in KINDS if any(one.count(kind) for one in timelines)]
    return Text("   ").join(
        [Text(_MARKS[kind], _STYLES.get(kind, "")) + Text(f" {KINDS[kind]}") for kind in shown]
    )


def _summary(timeline: Timeline) -> str:
    parts = [f"{timeline.count('target')} target passes {timeline.total('target'):.2f} s"]
    if timeline.count("draft"):
        parts.append(f"{timeline.count('draft')} drafts {timeline.total('draft'):.2f} s")
    return (
        f"{timeline.name}: {timeline.tokens} tokens in {timeline.seconds:.2f} s: {', '.join(parts)}"
    )
