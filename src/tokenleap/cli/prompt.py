"""The prompt of `tokenleap generate`: an argument, a file, or standard input.

With `--jsonl` every line of the file or of standard input is a prompt.
"""

from __future__ import annotations

import sys
from pathlib import Path

import typer

from tokenleap.cli.root import UsageError
from tokenleap.errors import TokenleapError

__all__ = ["STDIN", "decoded", "read_lines", "read_prompt", "read_stdin"]

STDIN = "-"


def read_prompt(argument: str | None, file: Path | None) -> str:
    """The prompt, without the last line end of a file or of piped text.

    Args:
        argument: PROMPT, or "-" for standard input, or None.
        file: --file, or None.

    Raises:
        UsageError: there are two prompts, or none, or an empty one.
        TokenleapError: what was read is not UTF-8 text.
        OSError: the file cannot be read.
    """
    if argument is not None and file is not None:
        raise UsageError("give PROMPT or --file, not both")
    if file is not None:
        text = decoded(file.read_bytes(), str(file))
    elif argument is not None and argument != STDIN:
        text = _checked(argument)
    elif argument is None and sys.stdin.isatty():
        raise UsageError("no prompt: give PROMPT, --file FILE, or pipe text in")
    else:
        text = read_stdin()
    if not text:
        raise UsageError("the prompt is empty")
    return text


def read_lines(argument: str | None, file: Path | None) -> list[str]:
    """The lines of a file or of standard input, a prompt each; arguments as in `read_prompt`.

    Raises:
        UsageError: there are no lines, or PROMPT is given as an argument.
        TokenleapError: what was read is not UTF-8 text.
        OSError: the file cannot be read.
    """
    if argument not in (None, STDIN):
        raise UsageError("--jsonl reads a prompt per line: give --file FILE, or pipe text in")
    return [line.removesuffix("\r") for line in read_prompt(argument, file).split("\n")]


def read_stdin() -> str:
    """The text of standard input, without its last line end.

    Raises:
        TokenleapError: it is not UTF-8 text.
    """
    return decoded(typer.get_binary_stream("stdin").read(), "standard input")


def decoded(content: bytes, source: str) -> str:
    """The text of a file or of standard input, without its last line end.

    Args:
        content: UTF-8.
        source: what to call it if it is not.

    Raises:
        TokenleapError: it is not UTF-8 text.
    """
    try:
        return content.decode("utf-8").removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise TokenleapError(
            f"{source} is not UTF-8 text: byte {error.start} is {content[error.start]:#04x}"
        ) from None


def _checked(argument: str) -> str:
    """Refuse an argument in another encoding, which Python gives us with surrogates."""
    try:
        argument.encode("utf-8")
    except UnicodeEncodeError:
        raise UsageError("PROMPT is not UTF-8 text") from None
    return argument
