"""`foretoken trace`: draw a recorded run like figure 1 of Leviathan et al. (2023)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from foretoken.cli.console import display, plain
from foretoken.cli.report import as_json
from foretoken.cli.root import examples
from foretoken.cli.trace_picture import legend, picture
from foretoken.cli.trace_summary import TraceSummary

if TYPE_CHECKING:
    from foretoken.trace import Trace

__all__ = ["EXAMPLES", "trace"]

EXAMPLES = examples(
    'foretoken generate "Count to ten." --trace steps.json',
    "foretoken trace steps.json",
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
    json_output: Annotated[
        bool, typer.Option("--json", help="Print the summary only, as one JSON object.")
    ] = False,
) -> None:
    """Show what every step drafted, accepted and corrected, a line per step."""
    from foretoken.trace import Trace

    recorded = Trace.load(file)
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
    seconds = metrics.draft_seconds + metrics.verify_seconds + metrics.accept_seconds
    return (
        f"{metrics.generated_tokens} tokens in {metrics.target_passes} steps, "
        f"{metrics.num_drafts} with a draft\n"
        f"mean acceptance length {metrics.mean_acceptance_length:.2f}, "
        f"acceptance rate {metrics.acceptance_rate:.2f}\n"
        f"{seconds:.2f} s: draft {metrics.draft_seconds:.2f}, verify {metrics.verify_seconds:.2f}, "
        f"accept {metrics.accept_seconds:.2f}"
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
