"""`foretoken generate` for several prompts: a JSON object per line, in the order of the prompts."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from foretoken.cli.console import counting, errors, plain, say
from foretoken.cli.line_results import LineResults
from foretoken.cli.report import as_json_line
from foretoken.errors import ForetokenError, PromptError

if TYPE_CHECKING:
    from foretoken.cli.prompts_file import Line
    from foretoken.engine.jobs import Job
    from foretoken.llm import LLM, Prompt

__all__ = ["generate_lines"]


def generate_lines(
    llm: LLM,
    lines: Sequence[Line],
    as_prompt: Callable[[Line], Prompt],
    results: LineResults | None,
    *,
    quiet: bool,
) -> None:
    """Generate for all lines together; write each result as soon as those before it are done.

    Args:
        llm: the model.
        lines: what was read.
        as_prompt: the prompt of a line.
        results: where results go, which may have some already; None for standard output.
        quiet: show no bar.

    Raises:
        PromptError: a line is no prompt. Then nothing is generated.
        ForetokenError: a request failed. The other lines are complete.
    """
    peers = llm.engine.target.peers
    if results is None:
        places = list(range(len(lines)))
    else:
        places = peers.from_first(partial(results.begin, llm, lines))
    if not peers.is_first:
        results = None  # the first process writes
    quoted = llm.engine.references.read_all([lines[place].references for place in places])
    jobs = deque(
        _job(llm, lines[place], as_prompt(lines[place]), texts)
        for place, texts in zip(places, quoted, strict=True)
    )
    failed = 0
    # A bar between the lines of a terminal would be in their way.
    quiet = quiet or (results is None and sys.stdout.isatty())
    try:
        with counting(quiet=quiet) as show:
            llm.engine.start(list(jobs))
            for done, place in enumerate(places, len(lines) - len(places)):
                show("lines", done, len(lines))
                while not jobs[0].finished:
                    llm.engine.step()
                failed += any(request.failure is not None for request in jobs[0].requests)
                _write(place, {**lines[place].shown, **_fields(jobs.popleft())}, results)
    except KeyboardInterrupt:
        if results is not None:
            say(f"{results.path} has {results.count} of {len(lines)} lines: add --resume")
        raise
    finally:
        llm.engine.end(list(jobs))
    if results is not None and errors().is_terminal and not quiet:
        errors().print(plain(f"{results.count} lines are in {results.path}.", "note"))
    if failed:
        raise ForetokenError(
            f"{failed} of {len(lines)} lines ended with an error: see their 'error'"
        )


def _job(llm: LLM, line: Line, prompt: Prompt, references: Any) -> Job:
    from foretoken.engine.job_spec import JobSpec

    spec = JobSpec(prompt, line.params, references=references, prediction=line.prediction)
    try:
        return llm.engine.job(spec)
    except PromptError as error:
        raise PromptError(f"line {line.number}: {error}") from None


def _write(place: int, record: dict[str, Any], results: LineResults | None) -> None:
    if results is not None:
        results.add(place, record)
        return
    print(as_json_line(record))
    sys.stdout.flush()


def _fields(job: Job) -> dict[str, Any]:
    """What a result says of the output: the first answer's fields, then all if several."""
    result = job.result()
    outputs = [output.as_dict() for output in result.outputs]
    first = {name: field for name, field in outputs[0].items() if name != "index"}
    return {
        **result.prompt_as_dict(),
        **first,
        **({"outputs": outputs} if len(outputs) > 1 else {}),
    }
