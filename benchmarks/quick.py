"""How much faster is a method than plain decoding? One interleaved run, a few minutes.

In every round each prompt is run with every method, `none` among them, in alternating order: in
one process, on one loaded model, for the same tokens. What slows the machine down for a while
slows all of them down. A prompt's ratio is that of the medians over rounds; the table has the
geometric mean over prompts with a bootstrap 95 % interval over prompts.

The control is text in which there is nothing to find: random tokens, continued at temperature 1.5.
There a method must keep at least 0.97 of plain decoding's tokens/s.

    python -m benchmarks.quick --prompts FILE

Exits with 1 if any output differs from that of `none`, or if the control's ratio is below 0.97
beyond doubt (the whole interval is).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.loading import parse_methods
from benchmarks.prompts import read_prompts, stratified
from benchmarks.report import one_line_errors
from benchmarks.speed_run import Options, check_writable, measured

__all__ = ["main"]


def main(
    prompts: Annotated[
        Path, typer.Option(help="Spec-Bench's JSON lines (first turns only) or others.")
    ],
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write everything measured to this file.")
    ] = None,
    model: Annotated[str, typer.Option(help="Folder, GGUF file or alias.")] = "smollm2-135m",
    draft_model: Annotated[
        str | None, typer.Option(help="For methods that take one; default: the model itself.")
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            help="A method, or a JSON speculative_config (repeatable); default: ngram, ngram_table."
        ),
    ] = None,
    num_speculative_tokens: Annotated[
        int | None, typer.Option(min=1, help="Draft length; default: the method's own.")
    ] = None,
    kind: Annotated[
        list[str] | None, typer.Option(help="A kind of prompt (repeatable); default: all.")
    ] = None,
    per_kind: Annotated[int, typer.Option(min=1, help="Prompts of each kind.")] = 5,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each prompt and method.")] = 4,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens generated per run.")] = 128,
    max_prompt_tokens: Annotated[
        int, typer.Option(min=2, help="The middle of longer prompts is cut out.")
    ] = 2048,
    ignore_eos: Annotated[
        bool, typer.Option(help="Generate on past the end: the same length for every prompt.")
    ] = True,
    control_prompts: Annotated[
        int, typer.Option(min=0, help="Prompts of random tokens; 0 leaves the control out.")
    ] = 8,
    seed: Annotated[int, typer.Option(min=0, help="Of the sample and the control.")] = 0,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="Where the model runs.")] = "auto",
) -> None:
    """Measure tokens/s of methods against plain decoding (none), interleaved in one process.

    Prints a Markdown table. Exits with 1 if an output differs from plain decoding's, or if a method
    is certainly slower than 0.97 of it where there is nothing to find.
    """
    with one_line_errors():
        options = Options(
            model=model,
            draft_model=draft_model,
            num_speculative_tokens=num_speculative_tokens,
            dtype=dtype,
            device=device,
            max_tokens=max_tokens,
            max_prompt_tokens=max_prompt_tokens,
            rounds=rounds,
            ignore_eos=ignore_eos,
            control_prompts=control_prompts,
            seed=seed,
        )
        methods = parse_methods(method or ["ngram", "ngram_table"])
        sample = stratified(read_prompts(prompts), per_kind, seed, kind or ())
        check_writable(json_file)
        report = measured(methods, sample, options)
    print(report.markdown())
    if json_file is not None:
        json_file.write_text(json.dumps(report.as_dict(), indent=1) + "\n", encoding="utf-8")
    raise typer.Exit(0 if report.good else 1)


if __name__ == "__main__":
    typer.run(main)
