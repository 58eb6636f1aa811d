"""How texts are shown: shortened, or with every token in the colour of its origin."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.text import Text

COLOURS = {"draft": 28, "correction": 32, "bonus": None, "plain": None}
"""By origin, of a terminal's 256: readable on black and on white. None is the text's own."""

_TINTS = {"draft": "rgba(0, 160, 60, 0.35)", "correction": "rgba(0, 130, 230, 0.35)"}
"""By origin, the colour behind a text in a notebook, whose own colour is that of the theme."""

_BOX = "white-space: pre-wrap; overflow-wrap: anywhere; max-height: 40em; overflow: auto"

_NO_FORMULAS = "tex2jax_ignore mathjax_ignore"
"""Classes of HTML in which MathJax leaves dollar signs alone."""

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


def colours_as_html(parts: Iterable[tuple[str, str]], summary: str) -> str:
    """The text, tokens of one origin after each other in one span, with a line below it."""
    runs = groupby(parts, key=itemgetter(1))
    text = "".join(_tinted("".join(map(itemgetter(0), run)), origin) for origin, run in runs)
    legend = ", ".join(_tinted(name, name) for name in _TINTS)
    return (
        f'<div class="{_NO_FORMULAS}"><div style="{_BOX}">{text}</div>'
        f"<small>{escape(summary)} ({legend})</small></div>"
    )


def _tinted(text: str, origin: str) -> str:
    if origin not in _TINTS or not text:
        return escape(text)
    return f'<span title="{origin}" style="background: {_TINTS[origin]}">{escape(text)}</span>'
