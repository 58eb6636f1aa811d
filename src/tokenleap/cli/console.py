"""Output to a terminal or a pipe: the two consoles, their colours, and safe text.

Every command prints through it. The colours are from the middle of the 256-colour cube, so they
can be read on black and on white. On a pipe there are none.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

from rich.console import Console
from rich.text import Text
from rich.theme import Theme

from tokenleap.core.shown import COLOURS

__all__ = ["counting", "display", "errors", "plain", "safe", "say", "working"]

THEME = Theme(
    {
        **{origin: f"color({code})" if code else "" for origin, code in COLOURS.items()},
        "rejected": "color(160)",
        "unreached": "dim",
        "note": "dim",
        "error": "bold color(160)",
        "head": "bold",
    }
)
"""Styles: the origins of tokens by name, then all others."""

_SPEED_OF_SECONDS = 600.0
"""The time that is left is estimated from what was done in the last seconds of this number."""

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class _Console(Console):
    """A console that raises BrokenPipeError for a closed pipe, where Rich would exit."""

    def on_broken_pipe(self) -> None:
        """Called by Rich while it handles the BrokenPipeError."""
        raise


def display() -> Console:
    """A console on standard output."""
    return _Console(theme=THEME, highlight=False)


def errors() -> Console:
    """A console on standard error."""
    return _Console(theme=THEME, highlight=False, stderr=True)


def plain(text: str, style: str = "") -> Text:
    """Text for a console: no markup, control characters made visible."""
    return Text(safe(text), style)


def safe(text: str) -> str:
    """Text with control characters made visible, so that it cannot move the cursor."""
    return _CONTROL.sub(lambda match: _symbol(ord(match[0])), text)


def _symbol(code: int) -> str:
    """Unicode's visible symbol of a control character."""
    return chr(0x2400 + code) if code < 0x20 else "\u2421" if code == 0x7F else "\ufffd"


@contextmanager
def working(doing: str, *, quiet: bool = False) -> Iterator[None]:
    """Show a spinner on stderr while something takes time, if stderr is a terminal."""
    console = errors()
    shown = console.is_terminal and not quiet
    with console.status(plain(f"{doing} ...", "note")) if shown else nullcontext():
        yield


@contextmanager
def counting(*, quiet: bool = False) -> Iterator[Callable[[str, int, int], object]]:
    """Show a bar with the time that is left on stderr, if that is a terminal.

    Yields:
        A function that takes what is being done, how much of it is done, and how much there is.
    """
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    console = errors()
    columns = (
        BarColumn(20),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}", markup=False),
    )
    with Progress(
        *columns,
        console=console,
        disable=quiet or not console.is_terminal,
        transient=True,
        speed_estimate_period=_SPEED_OF_SECONDS,
    ) as bar:
        task = bar.add_task("starting", total=1)
        yield lambda doing, done, total: bar.update(
            task, description=safe(doing), completed=done, total=total
        )


def say(line: str) -> None:
    """Print one line on stderr, the part before its first colon ("error") in red."""
    word, colon, rest = " ".join(line.split()).partition(":")
    errors().print(
        plain(word, "error" if colon else ""), plain(colon + rest), sep="", soft_wrap=True
    )
