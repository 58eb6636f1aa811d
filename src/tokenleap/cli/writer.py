"""Generated tokens on standard output: coloured and wrapped on a terminal, unchanged on a pipe.

`generate`, `chat` and `demo` write their answers with it as the tokens arrive.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.console import Console

from tokenleap.cli.console import display, safe

if TYPE_CHECKING:
    from tokenleap.outputs import StreamedToken

__all__ = ["TokenWriter"]

_LONGEST_HELD = 24
"""Cells of an unfinished word that are held back to wrap it whole; longer words are split."""


class TokenWriter:
    """Writes one text.

    On a terminal every token has the colour of its origin, and lines break between words. An
    unfinished word is therefore held back until it ends. On a pipe the text is unchanged.
    """

    def __init__(self) -> None:
        self.origins: Counter[str] = Counter()
        self._console: Console = display()
        self._word: list[tuple[str, str]] = []  # pieces of the unfinished word and their styles
        self._space = ""  # the space before it
        self._column = 0
        self._ends_line = True

    def write(self, tokens: Iterable[StreamedToken]) -> None:
        """Write the text of these tokens and flush it."""
        for token in tokens:
            self.origins[token.origin.value] += 1
            if token.text:
                self._ends_line = token.text.endswith("\n")
                self._write(token.text, token.origin.value)
        sys.stdout.flush()

    def close(self) -> None:
        """Write the held-back word and end the line."""
        self._put_word()
        if not self._ends_line:
            sys.stdout.write("\n")
            self._ends_line = True
        sys.stdout.flush()

    def _write(self, text: str, style: str) -> None:
        if not self._console.is_terminal:
            sys.stdout.write(text)
            return
        for run in re.findall(r"\s+|\S+", safe(text).expandtabs(4)):
            if not run.isspace():
                self._word.append((run, style))
                if self._width() > _LONGEST_HELD:
                    self._put_word()
            else:
                self._put_word()
                self._put_space(run)

    def _width(self) -> int:
        return sum(cell_len(piece) for piece, _ in self._word)

    def _put_space(self, run: str) -> None:
        lines, newline, space = run.rpartition("\n")
        if newline:
            sys.stdout.write(lines + newline)
            self._space, self._column = "", 0
        self._space += space

    def _put_word(self) -> None:
        if not self._word:
            return
        width = self._width()
        if self._column > 0 and self._column + len(self._space) + width > self._console.width:
            self._space, self._column = "\n", 0
        sys.stdout.write(self._space)
        self._column += len(self._space.lstrip("\n")) + width
        for piece, style in self._word:
            self._console.out(piece, style=style, end="", highlight=False)
        self._word, self._space = [], ""
