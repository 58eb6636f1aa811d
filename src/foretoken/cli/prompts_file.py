"""`foretoken generate --prompts-file`: a JSON object per line (see `foretoken.engine.lines`)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretoken.cli.prompt import STDIN, decoded, read_stdin
from foretoken.cli.root import UsageError
from foretoken.core.files import parsed_json
from foretoken.engine.lines import Line, line_of
from foretoken.errors import ConfigError, PromptError

if TYPE_CHECKING:
    from foretoken.core.params import SamplingParams

__all__ = ["read_prompts_file"]


def read_prompts_file(file: Path, params: SamplingParams) -> list[Line]:
    """The lines of a file; empty ones are skipped.

    Args:
        file: JSON lines, or "-" for standard input.
        params: for what a line does not say itself.

    Raises:
        UsageError: a line is malformed, or there is none.
        ForetokenError: the file is not UTF-8 text.
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
