"""The prompts of `tokenleap generate`, and the results of several: JSON lines in their order."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tokenleap.cli.console import as_json_line, counting, errors, plain, say
from tokenleap.cli.options import option, option_group
from tokenleap.cli.root import UsageError, check_writable, write_whole
from tokenleap.core.files import JsonLines, parsed_json
from tokenleap.core.peers import ALONE, Peers
from tokenleap.errors import ConfigError, PromptError, TokenleapError
from tokenleap.lines import Line, error_of, line_of

if TYPE_CHECKING:
    from tokenleap.core.params import SamplingParams


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
    if not text.strip():
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


@option_group("Speculation")
class ReferenceOptions:
    """Options for texts that drafts may quote besides the prompt."""

    reference: list[Path] | None = option(
        "A text that answers may quote, for drafting only; may be repeated.", metavar="FILE"
    )
    line_references: Path | None = option(
        "With --jsonl or --prompts-file: a JSON list of such texts per line, for its prompt.",
        metavar="FILE",
    )

    prediction_file: Path | None = option(
        "A text that the answer will mostly repeat, such as a file before an edit.", metavar="FILE"
    )

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


def generate_lines(
    lines: Sequence[Line],
    settings: Mapping[str, Any],
    made: Callable[[Sequence[Line]], Generator[dict[str, Any], None, None]],
    results: LineResults | None,
    *,
    quiet: bool,
    peers: Peers = ALONE,
) -> None:
    """Generate for all lines; write each result as soon as those before it are done."""
    if results is None:
        places = list(range(len(lines)))
    else:
        places = peers.from_first(partial(results.begin, settings, lines))
    if not peers.is_first:
        results = None  # the first process writes
    failed = 0
    # A bar between the lines of a terminal would be in their way.
    quiet = quiet or (results is None and sys.stdout.isatty())
    try:
        with (
            counting(quiet=quiet) as show,
            closing(made([lines[place] for place in places])) as records,
        ):
            for done, place in enumerate(places, len(lines) - len(places)):
                show("lines", done, len(lines))
                record = next(records)
                failed += error_of(record) is not None
                _write(place, record, results)
    except KeyboardInterrupt:
        if results is not None:
            say(f"{results.path} has {results.count} of {len(lines)} lines: add --resume")
        raise
    finally:
        if results is not None:
            results.replace()
    if results is not None and errors().is_terminal and not quiet:
        errors().print(plain(f"{results.count} lines are in {results.path}.", "note"))
    if failed:
        raise TokenleapError(
            f"{failed} of {len(lines)} lines ended with an error: see their 'error'"
        )


def _write(place: int, record: dict[str, Any], results: LineResults | None) -> None:
    if results is not None:
        results.add(place, record)
        return
    print(as_json_line(record))
    sys.stdout.flush()


# Options of `tokenleap generate` for several prompts: where they are, and where results go.


@option_group("Several prompts")
class BatchOptions:
    """Several prompts at once."""

    jsonl: bool = option(
        "Read a prompt per line of text, write a JSON object per line.", "--jsonl", default=False
    )
    prompts_file: Path | None = option(
        "Read a JSON object per line, with prompt, messages or prompt_token_ids, and sampling "
        "parameters of its own.",
        metavar="FILE.jsonl",
    )
    output: Path | None = option(
        "Write the JSON lines to this file.", metavar="FILE", show_default="standard output"
    )
    resume: bool = option("Continue the run that wrote --output.", "--resume", default=False)

    @property
    def wanted(self) -> bool:
        return self.jsonl or self.prompts_file is not None

    def check(self, prompt: str | None, file: Path | None) -> None:
        if self.prompts_file is not None:
            others = {"PROMPT": prompt is not None, "--file": file, "--jsonl": self.jsonl}
            for name, given in others.items():
                if given:
                    raise UsageError(f"--prompts-file has all prompts: leave out {name}")
        if self.output is not None and not self.wanted:
            raise UsageError("--output is for several prompts: add --prompts-file, or --jsonl")
        if self.resume and self.output is None:
            raise UsageError("--resume continues a file: add --output")

    def results(self, asked: Mapping[str, Any]) -> LineResults | None:
        """The file of the results; None without --output."""
        if self.output is None:
            return None
        return LineResults(self.output, asked, resume=self.resume)

    def lines(
        self,
        prompt: str | None,
        file: Path | None,
        params: SamplingParams,
        references: ReferenceOptions,
    ) -> list[Line]:
        """The prompts, with parameters and references of their own."""
        if self.prompts_file is None:
            texts = read_lines(prompt, file)
            for number, text in enumerate(texts, 1):
                if not text.strip():
                    raise UsageError(f"line {number}: the prompt is empty")
            lines = [Line(n, "prompt", text, params) for n, text in enumerate(texts, 1)]
        else:
            lines = read_prompts_file(self.prompts_file, params)
        expected = references.prediction()
        if expected is not None:
            lines = [
                line if line.prediction is not None else replace(line, prediction=expected)
                for line in lines
            ]
        quoted = references.read(len(lines), lines=True)
        if quoted is None:
            return lines
        return [
            replace(line, references=[*(line.references or ()), *texts])
            for line, texts in zip(lines, quoted, strict=True)
        ]


# `tokenleap generate --output`: results as JSON lines, from which an interrupted run continues.


class LineResults:
    """A file with a result per line, in the order of the prompts.

    Every result has a digest of its prompt and of all options that it depends on. So a run never
    continues a file of other prompts or other options. Results with an error are made again; they
    are replaced together: as soon as all of them are there, or by `replace` if the run ends before.

    Args:
        asked: options that all results depend on, such as the model's name; those that the `LLM`
            has resolved are added by `begin`.
        resume: whether the file has the results of an earlier run.

    Attributes:
        count: results that the file has, those with an error included.
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

        Returns:
            The places of the lines, from 0, whose results are to be made and added in this order:
            those that failed, and those that have none.
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
        JsonLines(self.path).append([line])
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
        file, records = JsonLines(self.path), []
        for number, line in enumerate(file, 1):
            try:
                record = parsed_json(line)
            except ValueError:
                record = None
            outputs = record.get("outputs", []) if isinstance(record, dict) else None
            if not isinstance(outputs, list) or not all(isinstance(x, dict) for x in outputs):
                raise TokenleapError(f"{self.path}: line {number} is not a JSON object")
            records.append(record)
        try:
            file.mend()
        except ValueError as error:
            raise TokenleapError(f"{error}: choose another --output") from None
        return records


def _digest(settings: dict[str, Any], line: Line) -> str:
    fields = [settings, line.shown, line.params.model_dump(), line.references]
    if line.prediction is not None:
        fields.append(line.prediction)
    text = json.dumps(fields, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# `tokenleap generate --prompts-file`: a JSON object per line (see `tokenleap.lines`).


def read_prompts_file(file: Path, params: SamplingParams) -> list[Line]:
    """The lines of a file; empty ones are skipped."""
    name = "standard input" if str(file) == STDIN else str(file)
    text = read_stdin() if str(file) == STDIN else decoded(file.read_bytes(), str(file))
    lines = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                lines.append(line_of(number, _fields(line), params))
                if isinstance(lines[-1].prompt, str) and not lines[-1].prompt.strip():
                    raise PromptError(f"{lines[-1].form} must be a text that is not empty")
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
