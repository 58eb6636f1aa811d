"""How every command ends: its exit code, and one line on stderr if something went wrong.

    0    success, also if the reader of a pipe closed it
    1    failure: something cannot be read, written or fetched
    2    wrong use: an option, a prompt or a combination has to change
    130  Ctrl-C

A traceback means a bug in this program. `foretoken.cli` builds its app on `RootGroup`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, TextIO

import typer
from typer.core import TyperGroup

from foretoken.cli.advice import in_flags
from foretoken.cli.console import say
from foretoken.core.peers import own_rank
from foretoken.errors import ForetokenError, ModelError

__all__ = ["DefaultGroup", "RootGroup", "UsageError", "examples"]

INTERRUPTED = 130


class UsageError(typer.TyperException):
    """Wrong use that Typer cannot detect by itself."""

    exit_code = 2


class RootGroup(TyperGroup):
    """The top command: turns every known exception into an exit code and one line."""

    def main(self, args: Sequence[str] | None = None, *_: Any, **extra: Any) -> Any:
        """Run the command line and exit. The other parameters are Typer's."""
        extra |= {"prog_name": "foretoken", "standalone_mode": False}
        try:
            code = super().main(args, **extra)
        except (typer.TyperException, ForetokenError, OSError) as error:
            code = _exit_code(error)
            say(_line(error, own_rank()))
        if code == INTERRUPTED:
            say("interrupted")
        for stream in (sys.stdout, sys.stderr):
            _flush_or_discard(stream)
        sys.exit(code or 0)

    def invoke(self, ctx: Any) -> None:
        """Run the chosen command; a closed pipe ends it without an error."""
        with suppress(BrokenPipeError):
            super().invoke(ctx)
            sys.stdout.flush()


class DefaultGroup(TyperGroup):
    """A group that runs its first command when none is named."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Insert the first command's name, unless a name or a help option comes first."""
        if not args or (args[0].startswith("-") and args[0] not in ctx.help_option_names):
            args = [self.list_commands(ctx)[0], *args]
        return super().parse_args(ctx, args)


def examples(*lines: str) -> str:
    """Example command lines for Typer's epilog, at the end of a command's help.

    Args:
        lines: "command  # remark", in Rich markup.
    """
    shown = []
    for line in lines:
        command, _, remark = line.partition("  # ")
        shown.append(f"[dim]$[/] {command}" + (f"  [dim]# {remark}[/]" if remark else ""))
    return "\n".join(["[bold]Examples[/]", *shown])


def _exit_code(error: Exception) -> int:
    if isinstance(error, typer.TyperException):
        return error.exit_code
    # The library raises the base class for files and `ModelError` for models, else for wrong use.
    failure = isinstance(error, OSError | ModelError) or type(error) is ForetokenError
    return 1 if failure else 2


def _line(error: Exception, rank: int = 0) -> str:
    """The one line; which process of several it comes from, if it is not the first one."""
    line = _line_of(error)
    return f"error in process {rank}{line.removeprefix('error')}" if rank else line


def _line_of(error: Exception) -> str:
    if isinstance(error, typer.TyperException):
        message = error.format_message()
        context = getattr(error, "ctx", None)
        hint = f" Try '{context.command_path} --help'." if context is not None else ""
        return f"error: {message[:1].lower()}{message[1:]}{hint}"
    if isinstance(error, OSError) and error.filename is not None:
        return f"error: {error.filename}: {error.strerror}"
    return f"error: {in_flags(str(error))}"


def _flush_or_discard(stream: TextIO) -> None:
    """Flush; discard what cannot be written, or Python would fail again on it at exit."""
    try:
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
