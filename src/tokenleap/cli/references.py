"""Texts for drafts of `tokenleap generate`: what answers may quote, or are expected to be."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tokenleap.cli.flat import in_panel
from tokenleap.cli.prompt import decoded
from tokenleap.cli.root import UsageError
from tokenleap.core.files import parsed_json
from tokenleap.errors import TokenleapError

__all__ = ["ReferenceOptions"]


@dataclass(frozen=True)
class ReferenceOptions:
    """What drafts may quote besides the prompt."""

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
        """The text that every answer is expected to repeat; None without any.

        Raises:
            TokenleapError: the file is not UTF-8 text.
            OSError: it cannot be read.
        """
        path = self.prediction_file
        return None if path is None else decoded(path.read_bytes(), str(path))

    def read(self, count: int, *, lines: bool) -> list[list[str]] | None:
        """The references of each of several prompts; None without any.

        Args:
            count: the number of prompts.
            lines: whether these are the lines of --jsonl.

        Raises:
            UsageError: the lines of --line-references do not match the prompts.
            TokenleapError: a file is not UTF-8 text, or a line no list of texts.
            OSError: a file cannot be read.
        """
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
