"""`tokenleap trace`: draw a recorded run like figures 1 and 5 of Leviathan et al. (2023)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from tokenleap.cli.console import display, plain, say
from tokenleap.cli.files import check_writable, write_whole
from tokenleap.cli.report import as_json
from tokenleap.cli.root import UsageError, examples
from tokenleap.cli.trace_picture import legend, picture
from tokenleap.cli.trace_summary import TraceSummary

if TYPE_CHECKING:
    from tokenleap.trace import Trace

__all__ = ["EXAMPLES", "trace"]

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
        from tokenleap.cli.trace_page import html

        check_writable(page)
        write_whole(page, html(recorded, files[0].stem))
        if not json_output:
            say(f"Written to {page}.")
            return
    summary = TraceSummary(recorded)
    if json_output:
        print(as_json(summary.as_dict()))
        return
    console = display()
    console.print(legend())
    console.print()
    console.print(_steps(recorded))
    console.print()
    console.print(plain(_figures(summary)))
    if summary.positions:
        console.print()
        console.print(_positions(summary))


def _timelines(files: Sequence[Path], svg: Path | None, *, shown: bool) -> None:
    """Show the timelines of traces, write them as SVG, or both."""
    from tokenleap.cli.trace_svg import check_drawing, write_svg
    from tokenleap.cli.trace_timeline import show_timelines, timeline_of
    from tokenleap.trace import Trace

    if svg is not None:
        check_drawing(svg)
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
    table = Table(box=None, pad_edge=False, header_style="note", padding=(0, 2, 0, 0))
    table.add_column("position", justify="right")
    table.add_column("kept", justify="right")
    table.add_column("")
    for position, (drafted, accepted) in enumerate(summary.positions, start=1):
        bar = "\u2501" * round(_BAR_CELLS * accepted / drafted)
        table.add_row(str(position), f"{accepted}/{drafted}", plain(bar, "draft"))
    return table
