"""`tokenleap generate --output`: results as JSON lines, from which an interrupted run continues."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenleap.cli.files import check_writable, write_whole
from tokenleap.cli.root import UsageError
from tokenleap.core.files import parsed_json
from tokenleap.engine.lines import Line, error_of
from tokenleap.errors import TokenleapError

__all__ = ["LineResults"]


class LineResults:
    """A file with a result per line, in the order of the prompts.

    Every result has a digest of its prompt and of all options that it depends on. So a run never
    continues a file of other prompts or other options. Results with an error are made again; they
    are replaced together: as soon as all of them are there, or by `replace` if the run ends before.

    Args:
        path: the file.
        asked: options that all results depend on, such as the model's name; those that the `LLM`
            has resolved are added by `begin`.
        resume: whether the file has the results of an earlier run.

    Attributes:
        count: results that the file has, those with an error included.

    Raises:
        UsageError: there is a file and `resume` is False, or none and it is True; or it cannot be
            written.
    """

    def __init__(self, path: Path, asked: Mapping[str, Any], *, resume: bool) -> None:
        check_writable(path)
        if path.exists() and not resume:
            raise UsageError(f"{path} exists already: add --resume, or choose another --output")
        if resume and not path.exists():
            raise UsageError(f"--resume: there is no {path}")
        self.path = path
        self._asked = asked
        self._missing = 0  # results that failed and are not made again yet
        self._again: dict[int, str] = {}  # their places -> the new ones, which are not in the file
        self._digests: list[str] = []  # of all lines
        self.count = 0

    def begin(self, settings: Mapping[str, Any], lines: Sequence[Line]) -> list[int]:
        """Compare what the file has with these lines.

        Args:
            settings: what all results depend on, as the model runs.
            lines: all lines.

        Returns:
            The places of the lines, from 0, whose results are to be made and added in this order:
            those that failed, and those that have none.

        Raises:
            TokenleapError: a result is damaged, or of another prompt or other options.
            OSError: the file cannot be read or written.
        """
        depends = {**self._asked, **settings}
        self._digests = [_digest(depends, line) for line in lines]
        records = self._read() if self.path.exists() else []
        for number, record in enumerate(records, 1):
            if number > len(lines) or record.get("digest") != self._digests[number - 1]:
                raise TokenleapError(
                    f"{self.path}: line {number} is the result of another prompt, or of other "
                    "options: choose another --output"
                )
        failed = [place for place, each in enumerate(records) if error_of(each) is not None]
        self._missing, self.count = len(failed), len(records)
        self.path.touch()
        return [*failed, *range(self.count, len(lines))]

    def add(self, place: int, record: dict[str, Any]) -> None:
        """Add a result; before this returns, it is in the file, unless others must come first."""
        line = json.dumps({**record, "digest": self._digests[place]}, ensure_ascii=False)
        if place < self.count:
            self._again[place] = line
            self._missing -= 1
            if not self._missing:
                self.replace()
            return
        assert place == self.count, "results come in the order of the lines"
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        self.count += 1

    def replace(self) -> None:
        """Put the results that were made again in the places of those that failed."""
        if not self._again:
            return
        lines = self.path.read_text(encoding="utf-8").split("\n")
        for place, line in self._again.items():
            lines[place] = line
        write_whole(self.path, "\n".join(lines))
        self._again.clear()

    def _read(self) -> list[dict[str, Any]]:
        """The complete results; a line that a kill has cut off is removed."""
        content = self.path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        records = []
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                record = parsed_json(line)
            except ValueError:
                record = None
            outputs = record.get("outputs", []) if isinstance(record, dict) else None
            if not isinstance(outputs, list) or not all(isinstance(x, dict) for x in outputs):
                raise TokenleapError(f"{self.path}: line {number} is not a JSON object")
            records.append(record)
        if whole != content:
            os.truncate(self.path, len(whole))
        return records


def _digest(settings: dict[str, Any], line: Line) -> str:
    fields = [settings, line.shown, line.params.model_dump(), line.references]
    if line.prediction is not None:
        fields.append(line.prediction)
    text = json.dumps(fields, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
