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
from typing import Annotated

import typer

from benchmarks import flags
from benchmarks.loading import parse_methods
from benchmarks.prompts import read_prompts, stratified
from benchmarks.report import one_line_errors
from benchmarks.speed_run import Options, check_writable, measured

__all__ = ["main"]


def main(
    prompts: flags.Prompts,
    json_file: flags.JsonFile = None,
    model: flags.Model = "smollm2-135m",
    draft_model: flags.DraftModel = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            help="A method, or a JSON speculative_config (repeatable); default: ngram, ngram_table."
        ),
    ] = None,
    num_speculative_tokens: Annotated[
        int | None, typer.Option(min=1, help="Draft length; default: the method's own.")
    ] = None,
    kind: flags.Kinds = None,
    per_kind: flags.PerKind = 5,
    rounds: flags.Rounds = 4,
    max_tokens: flags.MaxTokens = 128,
    max_prompt_tokens: flags.MaxPromptTokens = 2048,
    ignore_eos: Annotated[
        bool, typer.Option(help="Generate on past the end: the same length for every prompt.")
    ] = True,
    control_prompts: flags.ControlPrompts = 8,
    seed: flags.Seed = 0,
    dtype: flags.Dtype = "auto",
    device: flags.Device = "auto",
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
