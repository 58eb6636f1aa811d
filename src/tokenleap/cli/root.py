"""How every command ends: its exit code, and one line on stderr if something went wrong.

    0    success, also if the reader of a pipe closed it
    1    failure: something cannot be read, written or fetched
    2    wrong use: an option, a prompt or a combination has to change
    130  Ctrl-C

A traceback means a bug in this program. `tokenleap.cli` builds its app on `RootGroup`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, TextIO

import typer
from typer.core import TyperGroup

from tokenleap.cli.advice import in_flags
from tokenleap.cli.console import say
from tokenleap.cli.habits import instead_of_command, instead_of_option
from tokenleap.core.peers import own_rank
from tokenleap.errors import ModelError, TokenleapError

__all__ = ["DefaultGroup", "RootGroup", "UsageError", "examples"]

INTERRUPTED = 130


class UsageError(typer.TyperException):
    """Wrong use that Typer cannot detect by itself."""

    exit_code = 2


class _Group(TyperGroup):
    """A group of commands that says what to run in place of one that it does not have."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that the first argument names; see Typer's."""
        name = args[0]
        known = self.list_commands(ctx)
        if not name.startswith("-") and name.replace("_", "-") not in known:
            raise UsageError(f"no such command '{name}': {instead_of_command(name, known)}")
        return super().resolve_command(ctx, args)


class RootGroup(_Group):
    """The top command: turns every known exception into an exit code and one line."""

    def main(self, args: Sequence[str] | None = None, *_: Any, **extra: Any) -> Any:
        """Run the command line and exit. The other parameters are Typer's."""
        extra |= {"prog_name": "tokenleap", "standalone_mode": False}
        try:
            code = super().main(args, **extra)
        except (typer.TyperException, TokenleapError, OSError) as error:
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


class DefaultGroup(_Group):
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
    failure = isinstance(error, OSError | ModelError) or type(error) is TokenleapError
    return 1 if failure else 2


def _line(error: Exception, rank: int = 0) -> str:
    """The one line; which process of several it comes from, if it is not the first one."""
    line = _line_of(error)
    return f"error in process {rank}{line.removeprefix('error')}" if rank else line


def _line_of(error: Exception) -> str:
    if isinstance(error, typer.TyperException):
        context = getattr(error, "ctx", None)
        message = _what(error, context).rstrip(".")
        end = "" if message.endswith("?") else "."
        hint = f"{end} Try '{context.command_path} --help'." if context is not None else ""
        return f"error: {message[:1].lower()}{message[1:]}{hint}"
    if isinstance(error, OSError) and error.filename is not None:
        return f"error: {error.filename}: {error.strerror}"
    return f"error: {in_flags(str(error))}"


def _what(error: typer.TyperException, context: Any) -> str:
    """What is wrong with a command line, and what to write instead where that is known."""
    if context is None:
        return error.format_message()
    options = {name for each in context.command.params for name in each.opts if name[0] == "-"}
    unknown = getattr(error, "option_name", None)
    if unknown is not None and unknown not in options:
        arguments = {each.name for each in context.command.params if each.name == each.opts[0]}
        advice = instead_of_option(unknown, sorted(options | arguments))
        return f"no such option: {unknown}" + (f": {advice}" if advice else "")
    message = error.format_message()
    if message.startswith("Got unexpected extra argument"):
        if any(each.name == "prompt" for each in context.command.params):
            return f"{message}: put a prompt of several words in quotes"
        if "--model" in options:
            return f"{message}: name a model with --model"
    return message


def _flush_or_discard(stream: TextIO) -> None:
    """Flush; discard what cannot be written, or Python would fail again on it at exit."""
    try:
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
