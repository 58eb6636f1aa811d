"""Options of `tokenleap generate` for several prompts: where they are, and where results go."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tokenleap.cli.flat import in_panel
from tokenleap.cli.line_results import LineResults
from tokenleap.cli.prompt import read_lines
from tokenleap.cli.prompts_file import read_prompts_file
from tokenleap.cli.references import ReferenceOptions
from tokenleap.cli.root import UsageError
from tokenleap.engine.lines import Line

if TYPE_CHECKING:
    from tokenleap.core.params import SamplingParams

__all__ = ["BatchOptions"]


@dataclass(frozen=True)
class BatchOptions:
    """Several prompts at once."""

    jsonl: Annotated[
        bool,
        in_panel(
            "Several prompts",
            "Read a prompt per line of text, write a JSON object per line.",
            "--jsonl",
        ),
    ] = False
    prompts_file: Annotated[
        Path | None,
        in_panel(
            "Several prompts",
            "Read a JSON object per line, with prompt, messages or prompt_token_ids, and sampling "
            "parameters of its own.",
            metavar="FILE.jsonl",
        ),
    ] = None
    output: Annotated[
        Path | None,
        in_panel(
            "Several prompts",
            "Write the JSON lines to this file.",
            metavar="FILE",
            show_default="standard output",
        ),
    ] = None
    resume: Annotated[
        bool, in_panel("Several prompts", "Continue the run that wrote --output.", "--resume")
    ] = False

    @property
    def wanted(self) -> bool:
        """Whether there are several prompts."""
        return self.jsonl or self.prompts_file is not None

    def check(self, prompt: str | None, file: Path | None) -> None:
        """Refuse wrong combinations.

        Raises:
            UsageError: two sources of prompts, or an option without effect.
        """
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
        """The file of the results; None without --output.

        Args:
            asked: options that all results depend on; see `LineResults`.
        """
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
        """The prompts, with parameters and references of their own.

        Raises:
            UsageError: there are no prompts, a line is malformed, or the references do not match
                the prompts.
            TokenleapError: a file is not UTF-8 text.
            OSError: a file cannot be read.
        """
        if self.prompts_file is None:
            texts = read_lines(prompt, file)
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
