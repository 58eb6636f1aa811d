"""Edits of a file, with the file as the prediction (`generate(prediction=...)`).

The prompt has a Python file (the first lines of the standard library's `textwrap`) and asks for a
change. The prediction is the file as it was. A small model cannot edit 300 lines, so its output is
forced to be the changed file: a grammar admits nothing else (`structured_outputs`). The passes, the
drafts and their verification are those of a model that writes this by itself. The grammar takes
time at every verified token, so it makes drafts a little dearer than they are without it. With
`--free` nothing is forced, and the model itself edits the file.

`unrelated` is a prediction of no use: other code. It must not lose.

Every run has the tokens of plain decoding, or the program fails. Runs alternate in one process.

    python -m benchmarks.prediction

Prints a Markdown table.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks import BenchmarkError, harness
from tokenleap.bench.report import markdown_table
from tokenleap.core.params import SamplingParams
from tokenleap.llm import LLM
from tokenleap.outputs import RequestOutput

UNRELATED = "unrelated"

EDITS: dict[str, tuple[str, str, str]] = {
    "nothing": ("Repeat this file.", r"^$(?!)", ""),
    "rename": ("Rename `chunk` to `fragment`.", r"\bchunk(s?)\b", r"fragment\1"),
    "add an argument": (
        "Give every function a last argument `strict`.",
        r"(def \w+\([^)]*)\)",
        r"\1, strict=False)",
    ),
    "remove comments": ("Remove all comment lines.", r"\n *#[^\n]*", ""),
}
"""What is asked for, and how it is done: a pattern and its replacement."""


@dataclass(frozen=True)
class Case:
    """An edit of a file: the texts before and after, and what is given as the prediction."""

    name: str
    prompt: str
    before: str
    after: str
    prediction: str


@dataclass(frozen=True)
class Run:
    """How an edit is generated: the usual drafter (None is the default), and the prediction."""

    method: str | None
    predicted: bool

    @property
    def title(self) -> str:
        return f"`{self.method or 'default'}`" + (" and prediction" if self.predicted else "")

    @property
    def config(self) -> Mapping[str, Any] | None:
        return None if self.method is None else {"method": self.method}


def cases(lines: int) -> list[Case]:
    """The edits of the first so many lines of the file, and one with a useless prediction."""
    source = inspect.getsource(textwrap).splitlines()
    if lines > len(source):
        raise BenchmarkError(f"--lines: the file has {len(source)}")
    before = "\n".join(source[:lines]) + "\n"
    made = []
    for name, (asked, pattern, replacement) in EDITS.items():
        after = re.sub(pattern, replacement, before)
        made.append(Case(name, f"{asked}\n\n{before}", before, after, before))
    rename = next(case for case in made if case.name == "rename")
    other = "\n".join(inspect.getsource(re).splitlines()[:lines])
    made.append(Case(UNRELATED, rename.prompt, before, rename.after, other))
    return made


def chosen(made: Sequence[Case], names: str) -> list[Case]:
    """The cases of these names, separated by commas; all of them if none is named."""
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    known = [case.name for case in made]
    if unknown := [name for name in wanted if name not in known]:
        raise BenchmarkError(
            f"--edits: there is no {', '.join(map(repr, unknown))}; choose from {', '.join(known)}."
        )
    return [case for case in made if not wanted or case.name in wanted]


@harness.one_line_errors()
def main(
    model: harness.TinyModel = "smollm2-135m",
    lines: Annotated[int, typer.Option(min=1, help="Lines of the file.")] = 300,
    edits: Annotated[str, typer.Option(help="Some of the edits, by commas.")] = "",
    methods: Annotated[
        str, typer.Option(help="The usual drafters, by commas; the first is compared with.")
    ] = "none,default,suffix",
    rounds: harness.Rounds = 3,
    free: Annotated[bool, typer.Option("--free", help="Let the model write what it will.")] = False,
    quantization: Annotated[str, typer.Option(help="See `LLM`.")] = "auto",
) -> None:
    """Measure edits of a file with and without the file as the prediction."""
    wanted = chosen(cases(lines), edits)
    runs = [
        Run(None if method == "default" else method, predicted)
        for method in methods.split(",")
        for predicted in (False, True)
    ]
    llm = LLM(model, quantization=quantization)
    rows = [[case.name, *measure(llm, case, runs, rounds, free=free)] for case in wanted]
    header = ["edit", "tokens", *(run.title for run in runs), "passes", "accepted, rejected"]
    remark = (
        f"Speed of decoding over {runs[0].title}, with 95 % intervals over rounds. Passes, and "
        "tokens of the prediction, are those of the last column of speeds."
    )
    facts = harness.machine(llm.device, llm.dtype)
    facts["model"] = f"{Path(model).name}, {llm.engine.target.quantization or 'not quantized'}"
    print(harness.report("prediction", facts, markdown_table(header, rows), remark))


def measure(
    llm: LLM, case: Case, runs: Sequence[Run], rounds: int, *, free: bool = False
) -> list[str]:
    """The cells of an edit: its tokens, the speeds of all runs, and what the last one did."""
    form = None if free else {"regex": re.escape(case.after)}
    most = 2 * len(llm.encode(case.after)) if free else None
    params = SamplingParams(temperature=0, max_tokens=most, structured_outputs=form)

    def generate(run: Run, case: Case) -> RequestOutput:
        llm.reset_drafter_memory()
        (result,) = llm.generate(
            [harness.message(llm, case.prompt)],
            params,
            speculative_config=run.config,
            prediction=case.prediction if run.predicted else None,
            use_tqdm=False,
        )
        if not free and result.text != case.after:
            raise BenchmarkError(f"{run.title}: the output is not the changed file.")
        return result

    outputs = harness.flat(harness.in_turn(runs, [case], rounds, generate, doing=case.name))
    expected = outputs[runs[0]][0].token_ids
    for run, results in outputs.items():
        if any(result.token_ids != expected for result in results):
            raise BenchmarkError(f"{run.title} has other tokens than {runs[0].title}.")
    seconds = {
        run: [result.metrics.seconds - result.metrics.prefill_seconds for result in results]
        for run, results in outputs.items()
    }
    last = outputs[runs[-1]][-1].metrics
    speeds = map(str, harness.speeds_over(runs[0], seconds).values())
    counts = f"{last.accepted_prediction_tokens}, {last.rejected_prediction_tokens}"
    return [str(last.generated_tokens), *speeds, str(last.target_passes), counts]


if __name__ == "__main__":
    typer.run(main)
