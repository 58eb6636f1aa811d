"""What the benchmarks share: the machine in words, Markdown tables, one-line errors."""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
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

import foretoken
from benchmarks import BenchmarkError
from foretoken import ForetokenError

__all__ = [
    "command_line",
    "machine",
    "markdown_table",
    "one_line_errors",
    "progress_bar",
    "source_digest",
]


def machine(device: torch.device) -> dict[str, Any]:
    """What a measurement depends on: processor, threads, versions."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "torch_threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "foretoken": foretoken.__version__,
        "source": source_digest(),
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def source_digest() -> str:
    """Twelve hexadecimal digits that change with any line of the package."""
    root = Path(foretoken.__file__).parent
    digest = hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        digest.update(str(file.relative_to(root)).encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def command_line(module: str) -> str:
    """How the running benchmark was called."""
    return f"python -m {module} {shlex.join(sys.argv[1:])}"


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
