"""What the benchmarks share: the machine in words, Markdown tables, one-line errors."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from benchmarks import BenchmarkError
from foretoken import ForetokenError
from foretoken.bench.machine import host
from foretoken.bench.tables import markdown_table

__all__ = [
    "command_line",
    "machine",
    "markdown_table",
    "one_line_errors",
    "progress_bar",
]


def machine(device: torch.device) -> dict[str, Any]:
    """What a measurement depends on: processor, threads, versions."""
    return {
        **host(),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "torch_threads": torch.get_num_threads(),
    }


def command_line(module: str) -> str:
    """How the running benchmark was called."""
    return f"python -m {module} {shlex.join(sys.argv[1:])}"


def progress_bar() -> Progress:
    """A progress bar on stderr, so that stdout has results only."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn what the user has to change into one line on stderr and exit code 2."""
    try:
        yield
    except (ForetokenError, BenchmarkError) as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(2) from None
