"""How every command ends: its exit code, and one line on stderr if something is wrong.

    0    done, also when the reader of a pipe has gone
    1    a failure: something cannot be read, written or fetched
    2    wrong use: an option, a prompt or a combination that has to change
    130  Ctrl-C

A traceback is a mistake of this program's, never of its user's.
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
from foretoken.errors import ForetokenError, ModelError

__all__ = ["DefaultGroup", "RootGroup", "UsageError", "examples"]

INTERRUPTED = 130


class UsageError(typer.TyperException):
    """Wrong use that Typer cannot see by itself."""

    exit_code = 2


class RootGroup(TyperGroup):
    """The top command: turns every known exception into an exit code and one line."""

    def main(self, args: Sequence[str] | None = None, *_: Any, **extra: Any) -> Any:
        """Run and exit. Other parameters are Typer's."""
        extra |= {"prog_name": "foretoken", "standalone_mode": False}
        try:
            code = super().main(args, **extra)
        except (typer.TyperException, ForetokenError, OSError) as error:
            code = _exit_code(error)
            say(_line(error))
        if code == INTERRUPTED:
            say("interrupted")
        for stream in (sys.stdout, sys.stderr):
            _finish_draft(stream)
        sys.exit(code or 0)

    def invoke(self, ctx: Any) -> None:
        """Run the chosen command; a reader who has gone has seen enough."""
        with suppress(BrokenPipeError):
            super().invoke(ctx)
            sys.stdout.flush()


class DefaultGroup(TyperGroup):
    """A group that runs its first command when none is named."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the first command's name where no name and no call for help stands."""
        if not args or (args[0].startswith("-") and args[0] not in ctx.help_option_names):
            args = [self.list_commands(ctx)[0], *args]
        return super().parse_args(ctx, args)


def examples(*lines: str) -> str:
    """Command lines for the end of a command's help, as Typer's epilog wants them.

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
    # Of the library's errors, the base class is for files and `ModelError` for models.
    failure = isinstance(error, OSError | ModelError) or type(error) is ForetokenError
    return 1 if failure else 2


def _line(error: Exception) -> str:
    if isinstance(error, typer.TyperException):
        message = error.format_message()
        context = getattr(error, "ctx", None)
        hint = f" Try '{context.command_path} --help'." if context is not None else ""
        return f"error: {message[:1].lower()}{message[1:]}{hint}"
    if isinstance(error, OSError) and error.filename is not None:
        return f"error: {error.filename}: {error.strerror}"
    return f"error: {in_flags(str(error))}"


def _finish_draft(stream: TextIO) -> None:
    """Drop what cannot be written, or Python would try and complain once more when it exits."""
    try:
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
