"""The prompt of `tokenleap generate`: an argument, a file, or standard input.

With `--jsonl` every line of the file or of standard input is a prompt.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from tokenleap.cli.options import in_panel
from tokenleap.cli.root import UsageError
from tokenleap.core.files import parsed_json
from tokenleap.errors import TokenleapError

__all__ = ["STDIN", "ReferenceOptions", "decoded", "read_lines", "read_prompt", "read_stdin"]


STDIN = "-"


def read_prompt(argument: str | None, file: Path | None) -> str:
    """The prompt, without the last line end of a file or of piped text."""
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
    """The lines of a file or of standard input, a prompt each; arguments as in `read_prompt`."""
    if argument not in (None, STDIN):
        raise UsageError("--jsonl reads a prompt per line: give --file FILE, or pipe text in")
    return [line.removesuffix("\r") for line in read_prompt(argument, file).split("\n")]


def read_stdin() -> str:
    """The text of standard input, without its last line end."""
    return decoded(typer.get_binary_stream("stdin").read(), "standard input")


def decoded(content: bytes, source: str) -> str:
    """The text of a file or of standard input, without its last line end."""
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


# Texts for drafts of `tokenleap generate`: what answers may quote, or are expected to be.


@dataclass(frozen=True)
class ReferenceOptions:
    """Options for texts that drafts may quote besides the prompt."""

    reference: Annotated[
        list[Path] | None,
        in_panel(
            "Speculation",
            "A text that answers may quote, for drafting only; may be repeated.",
            metavar="FILE",
        ),
    ] = None
    line_references: Annotated[
        Path | None,
        in_panel(
            "Speculation",
            "With --jsonl or --prompts-file: a JSON list of such texts per line, for its prompt.",
            metavar="FILE",
        ),
    ] = None

    prediction_file: Annotated[
        Path | None,
        in_panel(
            "Speculation",
            "A text that the answer will mostly repeat, such as a file before an edit.",
            metavar="FILE",
        ),
    ] = None

    def prediction(self) -> str | None:
        """The text that every answer is expected to repeat; None without any."""
        path = self.prediction_file
        return None if path is None else decoded(path.read_bytes(), str(path))

    def read(self, count: int, *, lines: bool) -> list[list[str]] | None:
        """The references of each of several prompts; None without any."""
        if self.line_references is not None and not lines:
            raise UsageError("--line-references is for several prompts: give --reference")
        if not self.reference and self.line_references is None:
            return None
        shared = [decoded(path.read_bytes(), str(path)) for path in self.reference or ()]
        if self.line_references is None:
            return [shared] * count
        own = _lists(self.line_references)
        if len(own) != count:
            raise UsageError(
                f"--line-references: {len(own)} lines for {count} prompts: give one per prompt"
            )
        return [[*texts, *shared] for texts in own]


def _lists(path: Path) -> list[list[str]]:
    """A list of texts per line of a file."""
    listed = []
    for number, line in enumerate(decoded(path.read_bytes(), str(path)).split("\n"), 1):
        try:
            texts = parsed_json(line)
        except ValueError:
            texts = None
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise TokenleapError(f"{path}: line {number} is not a JSON list of texts")
        listed.append(texts)
    return listed
