"""What `tokenleap generate` does for one prompt: streams its answer, or shows several, or JSON."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tokenleap.cli.console import display, plain, working
from tokenleap.cli.report import as_json, show_summary, what_ran
from tokenleap.cli.writer import TokenWriter

if TYPE_CHECKING:
    from tokenleap.core.params import SamplingParams
    from tokenleap.llm import LLM, Prompt
    from tokenleap.outputs import CompletionOutput, RequestOutput

__all__ = ["Question", "print_json", "show_several", "stream"]


@dataclass(frozen=True)
class Question:
    """One prompt and what belongs to it.

    Args:
        text: the prompt as it was typed.
        prompt: as `LLM.generate` takes it.
        params: how it is answered.
        references: texts that drafts may quote.
        prediction: what the answer is expected to repeat.
    """

    text: str
    prompt: Prompt
    params: SamplingParams
    references: Sequence[str] | None
    prediction: str | None

    @property
    def beside(self) -> dict[str, Any]:
        """The texts beside the prompt, as arguments of `LLM.generate`."""
        return {"references": self.references, "prediction": self.prediction}


def stream(llm: LLM, question: Question, *, trace: bool, quiet: bool) -> CompletionOutput:
    """Show the answer while it is written."""
    writer = TokenWriter()
    output = None
    with closing(writer):
        for chunk in llm.stream(question.prompt, question.params, **question.beside, trace=trace):
            writer.write(chunk.tokens)
            output = chunk.output
    assert output is not None, "the last chunk has the output"
    if not quiet:
        show_summary(output, writer)
    return output


def show_several(llm: LLM, question: Question, *, quiet: bool) -> None:
    """Generate all answers in one batch and show them one after the other."""
    with working(f"Generating {question.params.n} answers", quiet=quiet):
        outputs = _result(llm, question).outputs
    console = display()
    for output in outputs:
        if output.index > 0:
            console.print()
        if console.is_terminal:
            console.print(plain(f"Answer {output.index + 1} of {len(outputs)}", "head"))
        writer = TokenWriter()
        with closing(writer):
            writer.write(output.tokens)
        if not quiet:
            show_summary(output, writer)


def print_json(
    llm: LLM, model: str, question: Question, *, trace: bool, quiet: bool
) -> CompletionOutput:
    """Print one object: the first answer's fields, and all answers if there are several.

    Returns:
        The first answer.
    """
    with working("Generating", quiet=quiet):
        result = _result(llm, question, trace=trace)
    outputs = [
        output.as_dict() | ({"trace": output.trace.as_dict()} if trace else {})
        for output in result.outputs
    ]
    first = {name: field for name, field in outputs[0].items() if name != "index"}
    found = {
        "model": model,
        **what_ran(llm),
        "prompt": question.text,
        **result.prompt_as_dict(),
        **first,
        **({"outputs": outputs} if len(outputs) > 1 else {}),
    }
    print(as_json(found))
    return result.outputs[0]


def _result(llm: LLM, question: Question, *, trace: bool = False) -> RequestOutput:
    (result,) = llm.generate(
        [question.prompt], question.params, **question.beside, trace=trace, use_tqdm=False
    )
    return result
