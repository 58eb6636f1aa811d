"""When the target and the drafter computed: figure 5 of Leviathan et al. (2023), from traces.

Traces that are shown together have one time scale, as the rows of the figure have: for example two
draft lengths and plain decoding. `trace_svg.py` draws the same spans.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from rich.text import Text

from tokenleap.cli.console import display, plain
from tokenleap.errors import TokenleapError

if TYPE_CHECKING:
    from tokenleap.trace import StepTrace, Trace

__all__ = ["KINDS", "Span", "Timeline", "show_timelines", "timeline_of"]

KINDS = {
    "encoder": "the encoder",
    "prompt": "the prompt",
    "draft": "a draft",
    "target": "a target pass",
    "accept": "accept, commit",
}
"""What is computed, in the order of a request's life."""

_MARKS = {"encoder": "E", "prompt": "P", "draft": "\u2592", "target": "\u2588", "accept": "\u00b7"}
_STYLES = {"draft": "draft", "target": "correction", "accept": "unreached"}
_FIRST = "\u2590"
"""The first cell of a target pass: half of it is empty, so that passes do not run together."""

_CELLS_PER_PASS = 4
_LINES = 20
"""Most lines of the longest trace; a longer one gets longer cells."""


@dataclass(frozen=True)
class Span:
    """One block of a timeline.

    Args:
        kind: one of `KINDS`.
        start: seconds from the beginning.
        end: likewise.
        levels: of a draft, the depth of its tree: the passes of a drafter that drafts token by
            token.
    """

    kind: str
    start: float
    end: float
    levels: int = 1


@dataclass(frozen=True)
class Timeline:
    """All spans of a trace in order, without gaps.

    Args:
        name: of the trace.
        spans: at least one that took time.
        tokens: generated.
    """

    name: str
    spans: tuple[Span, ...]
    tokens: int

    @property
    def seconds(self) -> float:
        """From the beginning of the prompt to the last token."""
        return self.spans[-1].end

    def total(self, kind: str) -> float:
        """Seconds of all spans of a kind."""
        return sum(span.end - span.start for span in self.spans if span.kind == kind)

    def count(self, kind: str) -> int:
        """The number of spans of a kind."""
        return sum(span.kind == kind for span in self.spans)


def timeline_of(name: str, trace: Trace) -> Timeline:
    """The timeline of a trace.

    Args:
        name: what to call it.
        trace: its times are those of the whole batch, if there was one.

    Raises:
        TokenleapError: the trace has no times.
    """
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
    width = min(console.width, 120) - _margin(timelines)
    cell = _cell_seconds(timelines, width)
    console.print(_legend(timelines))
    console.print(plain(f"one cell: {1000 * cell:.3g} ms; at the left, seconds", "note"))
    for timeline in timelines:
        console.print()
        console.print(plain(_summary(timeline)), soft_wrap=True)
        cells = _cells(timeline, cell)
        for begin in range(0, len(cells), width):
            at = plain(f"{begin * cell:{_margin(timelines) - 1}.2f} ", "note")
            console.print(at + cells[begin : begin + width], no_wrap=True, overflow="ignore")


def _margin(timelines: Sequence[Timeline]) -> int:
    """Width of the time at the left, with a space behind it."""
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
