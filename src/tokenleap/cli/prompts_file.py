"""`tokenleap generate --prompts-file`: a JSON object per line (see `tokenleap.engine.lines`)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenleap.cli.prompt import STDIN, decoded, read_stdin
from tokenleap.cli.root import UsageError
from tokenleap.core.files import parsed_json
from tokenleap.engine.lines import Line, line_of
from tokenleap.errors import ConfigError, PromptError

if TYPE_CHECKING:
    from tokenleap.core.params import SamplingParams

__all__ = ["read_prompts_file"]


def read_prompts_file(file: Path, params: SamplingParams) -> list[Line]:
    """The lines of a file; empty ones are skipped.

    Args:
        file: JSON lines, or "-" for standard input.
        params: for what a line does not say itself.

    Raises:
        UsageError: a line is malformed, or there is none.
        TokenleapError: the file is not UTF-8 text.
        OSError: it cannot be read.
    """
    name = "standard input" if str(file) == STDIN else str(file)
    text = read_stdin() if str(file) == STDIN else decoded(file.read_bytes(), str(file))
    lines = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                lines.append(line_of(number, _fields(line), params))
            except (ConfigError, PromptError) as error:
                # Not an error of the library: its fields would be shown as flags.
                raise UsageError(f"line {number} of {name}: {error}") from None
    if not lines:
        raise UsageError(f"--prompts-file: {name} has no prompts")
    return lines


def _fields(line: str) -> dict[str, Any]:
    try:
        fields = parsed_json(line)
    except ValueError as error:
        raise PromptError(f"not JSON ({error}): it takes an object per line") from None
    if not isinstance(fields, dict):
        raise PromptError('it takes an object, such as {"prompt": "Hello"}')
    return fields
