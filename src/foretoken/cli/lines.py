"""`foretoken generate --jsonl`: a prompt per line, a JSON object per line."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from foretoken.cli.report import as_json_line
from foretoken.errors import ForetokenError, PromptError

if TYPE_CHECKING:
    from foretoken.core.params import SamplingParams
    from foretoken.core.references import References
    from foretoken.engine.jobs import Job
    from foretoken.llm import LLM, Prompt

__all__ = ["generate_lines"]


def generate_lines(
    llm: LLM,
    lines: Sequence[str],
    prompts: Sequence[Prompt],
    params: SamplingParams,
    references: Sequence[Sequence[str]] | None = None,
) -> None:
    """Generate for all lines together, and print each result as soon as those before it are done.

    Args:
        llm: the model.
        lines: the lines as they were read.
        prompts: one prompt per line.
        params: sampling parameters of all of them.
        references: what the drafts for each line may quote; None for nothing.

    Raises:
        PromptError: a line is no prompt. Then nothing is generated.
        ForetokenError: a request failed. The other lines are complete.
    """
    engine = llm.engine
    quoted = engine.references.read_all(len(prompts), references)
    jobs = [
        _job(llm, number, prompt, params, texts)
        for number, (prompt, texts) in enumerate(zip(prompts, quoted, strict=True), 1)
    ]
    failed = 0
    try:
        engine.start(jobs)
        for number, (line, job) in enumerate(zip(lines, jobs, strict=True), 1):
            while not job.finished:
                engine.step()
            print(as_json_line({"line": number, **_fields(line, job)}))
            sys.stdout.flush()
            failed += any(request.failure is not None for request in job.requests)
    finally:
        engine.end(jobs)
    if failed:
        raise ForetokenError(
            f"{failed} of {len(jobs)} lines ended with an error: see their 'error'"
        )


def _job(
    llm: LLM, number: int, prompt: Prompt, params: SamplingParams, references: References
) -> Job:
    try:
        return llm.engine.job(prompt, params, references=references)
    except PromptError as error:
        raise PromptError(f"line {number}: {error}") from None


def _fields(line: str, job: Job) -> dict[str, Any]:
    """What is printed for a line: the first answer's fields, then all answers if several."""
    result = job.result()
    outputs = [output.as_dict() for output in result.outputs]
    first = {name: field for name, field in outputs[0].items() if name != "index"}
    return {
        "prompt": line,
        **result.ids_as_dict(),
        **first,
        **({"outputs": outputs} if len(outputs) > 1 else {}),
    }
