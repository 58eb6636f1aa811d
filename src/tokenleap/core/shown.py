"""How texts are shown: shortened, or with every token in the colour of its origin."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.text import Text

COLOURS = {"draft": 28, "correction": 32, "bonus": None, "plain": None}
"""By origin, of a terminal's 256: readable on black and on white. None is the text's own."""

_CSS = {"draft": "#008700", "correction": "#0087d7", "bonus": "", "plain": ""}
"""The same colours."""

_MOST = 80  # characters of a text that a `repr` shows


def shortened(text: str) -> str:
    """The `repr` of a text, or of its beginning and end if it is long."""
    if len(text) <= _MOST:
        return repr(text)
    half = _MOST // 2
    return f"{text[:half]!r}...{text[-half:]!r}"


def colours_as_text(parts: Iterable[tuple[str, str]]) -> Text:
    from rich.text import Text

    styles = {name: "" if code is None else f"color({code})" for name, code in COLOURS.items()}
    return Text.assemble(*((text, styles[origin]) for text, origin in parts))


def colours_as_html(parts: Iterable[tuple[str, str]]) -> str:
    spans = []
    for text, origin in parts:
        colour = f' style="color: {_CSS[origin]}"' if _CSS[origin] else ""
        spans.append(f'<span title="{origin}"{colour}>{escape(text)}</span>')
    return f'<div style="white-space: pre-wrap">{"".join(spans)}</div>'
