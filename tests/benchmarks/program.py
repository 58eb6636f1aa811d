"""Runs a benchmark as its command line does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from typer import Typer
from typer.testing import CliRunner, Result


def run(main: Callable[..., Any], arguments: Sequence[str]) -> Result:
    app = Typer()
    app.command()(main)
    return CliRunner().invoke(app, arguments)
