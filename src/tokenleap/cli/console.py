"""Output to a terminal or a pipe: the two consoles, their colours, and safe text.

Every command prints through it. The colours are from the middle of the 256-colour cube, so they
can be read on black and on white. On a pipe there are none.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text
from rich.theme import Theme

from tokenleap.core.shown import COLOURS
from tokenleap.runtime.choices import TORCH_RUNTIMES

if TYPE_CHECKING:
    from tokenleap.llm import LLM
    from tokenleap.outputs import CompletionOutput, Metrics, StreamedToken

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
    return _Console(theme=THEME, highlight=False)


def errors() -> Console:
    return _Console(theme=THEME, highlight=False, stderr=True)


def plain(text: str, style: str = "") -> Text:
    """Text for a console: no markup, control characters made visible."""
    return Text(safe(text), style)


def safe(text: str) -> str:
    """Text with control characters made visible, so that it cannot move the cursor."""
    return _CONTROL.sub(lambda match: _symbol(ord(match[0])), text)


def _symbol(code: int) -> str:
    return chr(0x2400 + code) if code < 0x20 else "\u2421" if code == 0x7F else "\ufffd"


def table_of(
    headings: Sequence[str],
    rows: Iterable[Iterable[str | Text]],
    *,
    left: int = 0,
    style: str = "head",
) -> Table:
    """A table without lines. Its first columns are on the left, and all others hold numbers."""
    made = Table(box=None, pad_edge=False, header_style=style, padding=(0, 2, 0, 0))
    for index, heading in enumerate(headings):
        number = index >= left
        made.add_column(
            heading, justify="right" if number else "left", no_wrap=number, overflow="fold"
        )
    for row in rows:
        made.add_row(*(plain(cell) if isinstance(cell, str) else cell for cell in row))
    return made


def show(*blocks: str | RenderableType) -> None:
    """Print blocks on standard output, with an empty line between them; text has no markup."""
    console = display()
    for number, block in enumerate(blocks):
        if number:
            console.print()
        console.print(plain(block) if isinstance(block, str) else block)


def tell(text: str, style: str = "") -> None:
    """Print text on standard output; the terminal wraps it."""
    display().print(plain(text, style), soft_wrap=True)


def remark(text: str, style: str = "note") -> None:
    """Print text on stderr; the terminal wraps it."""
    errors().print(plain(text, style), soft_wrap=True)


@contextmanager
def working(doing: str, *, quiet: bool = False) -> Iterator[None]:
    """Show a spinner on stderr while something takes time, if stderr is a terminal."""
    console = errors()
    shown = console.is_terminal and not quiet
    with (
        console.status(plain(f"{doing} ...", "note")) if shown else nullcontext(),
        nullcontext() if quiet else _compiling_shown(console),
    ):
        yield


class _Remarks(logging.Handler):
    """Prints log lines on a console, above its spinner."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        self._console.print(plain(record.getMessage(), "note"), soft_wrap=True)


@contextmanager
def _compiling_shown(console: Console) -> Iterator[None]:
    """Say on stderr that the native runtime is compiled, unless `TOKENLEAP_LOG` has it said."""
    ours, log = logging.getLogger("tokenleap"), logging.getLogger("tokenleap.runtime.native.build")
    if ours.handlers or log.handlers:
        yield
        return
    handler, level = _Remarks(console), log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.setLevel(level)
        log.removeHandler(handler)


@contextmanager
def counting(*, quiet: bool = False) -> Iterator[Callable[[str, int, int], object]]:
    """Show a bar with the time that is left on stderr, if that is a terminal."""
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


# Generated tokens on standard output: coloured and wrapped on a terminal, unchanged on a pipe.
#
# `generate`, `chat` and `demo` write their answers with it as the tokens arrive.


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


def stream(llm: LLM, *prompt: Any, **more: Any) -> tuple[CompletionOutput, TokenWriter]:
    """Write an answer while it is generated; arguments as for `LLM.stream`."""
    writer, output = TokenWriter(), None
    with closing(writer):
        for chunk in llm.stream(*prompt, **more):
            writer.write(chunk.tokens)
            output = chunk.output
    assert output is not None, "the last chunk has the output"
    return output, writer


# Results as text: a line of statistics for people, a JSON object for programs.
#
# Commands that generate use the former, every command with --json the latter.


def legend(origins: Counter[str]) -> Text:
    """The colours of the origins, and how many tokens have each."""
    line = Text()
    labels = {
        "draft": "drafted and accepted",
        "correction": "correction",
        "bonus": "bonus",
        "plain": "without draft",
    }
    for name, label in labels.items():
        line.append(f"\u25a0 {label} {origins[name]}", name).append("   ")
    line.rstrip()
    return line


def summary(metrics: Metrics, finish_reason: str | None) -> str:
    """Speed and acceptance of one output."""
    cut = " (cut short)" if finish_reason == "length" else ""
    parts = [
        f"{metrics.generated_tokens} tokens{cut}, {metrics.tokens_per_second:.1f}/s",
        f"{metrics.target_passes} passes",
    ]
    if metrics.num_drafts:
        parts.append(f"{metrics.mean_acceptance_length:.2f} tokens per drafting pass")
    return " \u00b7 ".join(parts)


def show_summary(output: CompletionOutput, writer: TokenWriter) -> None:
    """Print the legend and the statistics on stderr, if that is a terminal."""
    console = errors()
    if not console.is_terminal:
        return
    console.print()
    if display().is_terminal:
        console.print(legend(writer.origins))
    console.print(plain(summary(output.metrics, output.finish_reason), "note"))


def what_ran(llm: LLM) -> dict[str, Any]:
    """Everything that a result depends on besides its prompt, for JSON; nothing is "auto"."""
    config = llm.speculative_config.as_dict()
    if config["controller"]["rule"] != llm.controller:
        config["controller"] = {"rule": llm.controller}
    return {
        "dtype": _dtype(llm),
        "device": str(llm.device),
        "runtime": llm.runtime,
        "bit_exact": llm.bit_exact,
        "speculative_config": config,
    }


def show_what_ran(llm: LLM) -> None:
    """Print method, controller and runtime on stderr, if that is a terminal."""
    console = errors()
    if console.is_terminal:
        meaning = TORCH_RUNTIMES.get(llm.runtime)
        parts = [
            f"method {llm.speculative_config.method_name}",
            f"controller {llm.controller}",
            f"runtime {llm.runtime}{f' ({meaning})' if meaning else ''}",
            _dtype(llm),
            "bit-exact" if llm.bit_exact else "not bit-exact",
        ]
        console.print(plain(" \u00b7 ".join(parts), "note"))


def _dtype(llm: LLM) -> str:
    return str(llm.dtype).removeprefix("torch.")


def show_json(value: dict[str, Any]) -> None:
    """Print one JSON object on standard output."""
    display().out(as_json(value))


def as_json(value: dict[str, Any]) -> str:
    """One JSON object with a line per field, for programs and people."""
    lines = [f"  {json.dumps(name)}: {as_json_line(field)}" for name, field in value.items()]
    return "{\n" + ",\n".join(lines) + "\n}"


def as_json_line(value: Any) -> str:
    """JSON on one line."""
    # Where the encoding lacks a character, JSON has an escape for it.
    return json.dumps(value, ensure_ascii="utf" not in (sys.stdout.encoding or "").lower())
