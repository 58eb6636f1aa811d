"""`foretoken trace`: draw a recorded run like figure 1 of Leviathan et al. (2023)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from foretoken.cli.console import display, plain, say
from foretoken.cli.files import check_writable, write_whole
from foretoken.cli.report import as_json
from foretoken.cli.root import examples
from foretoken.cli.trace_picture import legend, picture
from foretoken.cli.trace_summary import TraceSummary, kept
from foretoken.cli.trace_view import TraceView

if TYPE_CHECKING:
    from foretoken.trace import Trace

__all__ = ["EXAMPLES", "trace"]

EXAMPLES = examples(
    'foretoken generate "Count to ten." --trace steps.json',
    "foretoken trace steps.json",
    "foretoken trace steps.json --html steps.html",
    "foretoken trace steps.json --json | jq .mean_acceptance_length",
)

_BAR_CELLS = 30


def trace(
    file: Annotated[
        Path,
        typer.Argument(
            help="Written by `foretoken generate --trace FILE`.", metavar="FILE", show_default=False
        ),
    ],
    page: Annotated[
        Path | None,
        typer.Option(
            "--html",
            help="Write one self-contained page: draft and verification of each step.",
            metavar="OUT",
        ),
    ] = None,
    json_output: Annotated[
        bool, typer.Option("--json", help="Print the summary only, as one JSON object.")
    ] = False,
) -> None:
    """Show what every step drafted, accepted and corrected, a line per step."""
    from foretoken.trace import Trace

    recorded = Trace.load(file)
    if page is not None:
        from foretoken.cli.trace_page import html

        check_writable(page)
        write_whole(page, html(TraceView.of(recorded), file.stem))
        if not json_output:
            say(f"Written to {page}.")
            return
    summary = TraceSummary.of(recorded)
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


def _steps(recorded: Trace) -> Table:
    table = Table(box=None, pad_edge=False, header_style="note", padding=(0, 2, 0, 0))
    table.add_column("step", justify="right", style="note")
    table.add_column("kept", justify="right", style="note", no_wrap=True)
    table.add_column("tokens", overflow="fold")
    for number, step in enumerate(recorded, start=1):
        share = f"{kept(step)}/{len(step.drafted)}" if step.drafted else ""
        table.add_row(str(number), share, picture(step, recorded.pieces))
    return table


def _figures(summary: TraceSummary) -> str:
    seconds = summary.draft_seconds + summary.verify_seconds + summary.accept_seconds
    return (
        f"{summary.tokens} tokens in {summary.steps} steps, {summary.drafts} with a draft\n"
        f"mean acceptance length {summary.mean_acceptance_length:.2f}, "
        f"acceptance rate {summary.acceptance_rate:.2f}\n"
        f"{seconds:.2f} s: draft {summary.draft_seconds:.2f}, verify {summary.verify_seconds:.2f}, "
        f"accept {summary.accept_seconds:.2f}"
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
