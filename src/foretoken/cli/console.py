"""Where things are shown: the two consoles, the colours, and what keeps a terminal safe.

The colours are from the middle of the 256-colour cube: they can be read on black and on white.
On a pipe there are none.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from rich.console import Console
from rich.text import Text
from rich.theme import Theme

__all__ = ["display", "errors", "plain", "safe", "say", "working"]

THEME = Theme(
    {
        "draft": "color(28)",
        "correction": "color(32)",
        "bonus": "",
        "rejected": "color(160)",
        "unreached": "dim",
        "note": "dim",
        "error": "bold color(160)",
        "head": "bold",
    }
)
"""Origins of tokens under their names, then what else there is."""

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class _Console(Console):
    """Tells of a closed pipe by the ordinary exception."""

    def on_broken_pipe(self) -> None:
        """Called by Rich."""
        raise  # Rich calls this while it handles the BrokenPipeError


def display() -> Console:
    """Standard output."""
    return _Console(theme=THEME, highlight=False)


def errors() -> Console:
    """Standard error."""
    return _Console(theme=THEME, highlight=False, stderr=True)


def plain(text: str, style: str = "") -> Text:
    """Text without markup, safe to show."""
    return Text(safe(text), style)


def safe(text: str) -> str:
    """Text that cannot move the cursor or change colours: control characters become visible."""
    return _CONTROL.sub(lambda match: _picture(ord(match[0])), text)


def _picture(code: int) -> str:
    """Unicode's picture of a control character."""
    return chr(0x2400 + code) if code < 0x20 else "\u2421" if code == 0x7F else "\ufffd"


@contextmanager
def working(doing: str, *, quiet: bool = False) -> Iterator[None]:
    """A spinner while something takes time; only for who watches a terminal."""
    console = errors()
    shown = console.is_terminal and not quiet
    with console.status(plain(f"{doing} ...", "note")) if shown else nullcontext():
        yield


def say(line: str) -> None:
    """One line on stderr; "error" at its beginning in red."""
    word, colon, rest = " ".join(line.split()).partition(":")
    errors().print(
        plain(word, "error" if colon else ""), plain(colon + rest), sep="", soft_wrap=True
    )
