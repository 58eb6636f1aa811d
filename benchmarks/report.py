"""Helpers of all benchmarks: the machine, Markdown tables, progress, errors in one line."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Mapping
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
from tokenleap import TokenleapError
from tokenleap.bench.machine import host
from tokenleap.bench.report import markdown_table

__all__ = [
    "command_line",
    "in_one_line",
    "machine",
    "markdown_table",
    "one_line_errors",
    "progress_bar",
]


def machine(device: torch.device, dtype: torch.dtype | None = None) -> dict[str, Any]:
    """The machine of a measurement: processor, GPU, threads, versions, dtype."""
    return {
        **host(),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "torch_threads": torch.get_num_threads(),
        **({} if dtype is None else {"dtype": str(dtype).removeprefix("torch.")}),
    }


def in_one_line(facts: Mapping[str, Any]) -> str:
    """Facts as text; unknown ones (None) are left out."""
    return ", ".join(f"{name} {value}" for name, value in facts.items() if value is not None)


def command_line(module: str) -> str:
    """The command that started this benchmark, as Markdown code."""
    return f"`python -m {module} {shlex.join(sys.argv[1:])}`"


def progress_bar() -> Progress:
    """A progress bar on stderr; stdout is for results."""
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
    """Turn errors of wrong use into one line on stderr and exit code 2."""
    try:
        yield
    except (TokenleapError, BenchmarkError) as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(2) from None
