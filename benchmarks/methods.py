"""All methods on all kinds of prompts, against plain decoding: which one is for what?

As in `benchmarks.quick` every prompt is run with every method in every round, in alternating order,
in one process on one loaded model. The tables have a row per method and a column per kind: tokens/s
over those of `none`, and mean acceptance lengths. Methods that lose are in them.

    python -m benchmarks.methods --prompts spec_bench.jsonl --corpus texts.txt

Methods with a draft model take part with --draft-model, methods with a corpus with --corpus (text
that has nothing to do with the prompts, or the comparison is worth nothing).
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks import BenchmarkError, flags
from benchmarks.loading import BASELINE, Method, parse_methods
from benchmarks.prompts import read_prompts, stratified
from benchmarks.report import command_line, markdown_table, one_line_errors
from benchmarks.speed_report import CONTROL, Report
from benchmarks.speed_run import Options, check_writable, measured
from benchmarks.timing import Row
from foretoken import models
from foretoken.drafters.registry import METHODS
from foretoken.drafters.text.datastore import build_datastore
from foretoken.drafters.text.ngrams import build_ngrams

__all__ = ["main", "roster", "table"]

NGRAM, TABLE, COPY = {"method": "ngram"}, {"method": "ngram_table"}, {"method": "copy"}
ALONE = {"suffix_decoding_max_cached_requests": 0}
"""Nothing is remembered of earlier outputs."""

SELF_CONTAINED = (
    Method("ngram, 5 tokens", {**NGRAM, "num_speculative_tokens": 5}),
    Method("ngram, 8 tokens", {**NGRAM, "num_speculative_tokens": 8}),
    Method("ngram, cost_model", {**NGRAM, "controller": "cost_model"}),
    Method("suffix, cost_model", {"method": "suffix", **ALONE, "controller": "cost_model"}),
    Method("suffix, remembering, cost_model", {"method": "suffix", "controller": "cost_model"}),
    Method("ngram_table", TABLE),
    Method("suffix", {"method": "suffix", **ALONE}),
    Method("suffix, trees", {"method": "suffix", "branching": True, **ALONE}),
    Method("copy", COPY),
    Method("recycle, cost_model", {"method": "recycle", "controller": "cost_model"}),
    Method(
        "ensemble (ngram, recycle), cost_model",
        {
            "method": "ensemble",
            "drafters": [NGRAM, {"method": "recycle"}],
            "num_speculative_tokens": 16,
            "controller": "cost_model",
        },
    ),
    Method("lookahead", {"method": "lookahead"}),
    Method("pad", {"method": "pad"}),
    Method("early_exit", {"method": "early_exit"}),
    Method("layer_skip", {"method": "layer_skip"}),
    Method("random", {"method": "random"}),
    Method("ensemble (ngram, ngram_table)", {"method": "ensemble", "drafters": [NGRAM, TABLE]}),
    Method(
        "switch (ngram, ngram_table, copy)", {"method": "switch", "drafters": [NGRAM, TABLE, COPY]}
    ),
    Method(
        "horizontal_cascade (ngram, ngram_table)",
        {"method": "horizontal_cascade", "drafters": [NGRAM, TABLE], "tokens": [4, 2]},
    ),
)
WITH_DRAFT_MODEL = (
    Method("draft_model", {"method": "draft_model"}),
    Method("cascade (ngram)", {"method": "cascade", "drafter": NGRAM}),
)


def roster(corpus: Path | None, datastore: Path | None, *, draft_model: bool) -> list[Method]:
    """What can take part.

    Args:
        corpus: a file of n-grams.
        datastore: a datastore.
        draft_model: whether there is one.
    """
    methods = list(SELF_CONTAINED)
    if corpus is not None:
        methods.append(Method("corpus_ngram", {"method": "corpus_ngram", "corpus": str(corpus)}))
    if datastore is not None:
        methods.append(Method("rest", {"method": "rest", "datastore": str(datastore)}))
    methods += WITH_DRAFT_MODEL if draft_model else ()
    # What a method is worth shows in drafts of one length, also where they do not pay.
    return [replace(method, fields={"controller": "fixed", **method.fields}) for method in methods]


def left_out(methods: Sequence[Method]) -> list[str]:
    """Methods of the registry that do not take part."""
    present = {method.fields["method"] for method in [*methods, BASELINE]}
    return [name for name in METHODS if name not in present]


def table(rows: Sequence[Row], cell: Callable[[Row], str], last: Callable[[Row], str]) -> str:
    """A Markdown table: a row per method, a column per kind, and one for all of them."""
    labels = list(dict.fromkeys(row.label for row in rows))
    by_place = {(row.method, row.label): row for row in rows}
    lines = []
    for method in dict.fromkeys(row.method for row in rows):
        found = [by_place[method, label] for label in labels]
        lines.append([method, *(last(r) if r.label == "all" else cell(r) for r in found)])
    return markdown_table(["method", *labels], lines)


def main(
    prompts: flags.Prompts,
    corpus: Annotated[
        list[Path] | None, typer.Option(help="UTF-8 text for corpus_ngram and rest (repeatable).")
    ] = None,
    json_file: flags.JsonFile = None,
    model: flags.Model = "smollm2-135m",
    draft_model: Annotated[
        str | None, typer.Option(help="For draft_model and cascade; without it they are left out.")
    ] = None,
    method: Annotated[
        list[str] | None, typer.Option(help="Only these (repeatable), names or JSON.")
    ] = None,
    per_kind: flags.PerKind = 3,
    all_prompts: Annotated[bool, typer.Option("--all", help="Every prompt of the file.")] = False,
    rounds: flags.Rounds = 2,
    max_tokens: flags.MaxTokens = 64,
    max_prompt_tokens: flags.MaxPromptTokens = 2048,
    control_prompts: flags.ControlPrompts = 3,
    seed: flags.Seed = 0,
    dtype: flags.Dtype = "auto",
    device: flags.Device = "auto",
) -> None:
    """Compare all methods with plain decoding and print two Markdown tables.

    Exits with 1 if an output differs from plain decoding's.
    """
    with one_line_errors(), tempfile.TemporaryDirectory() as folder:
        options = Options(
            model=model,
            draft_model=draft_model,
            num_speculative_tokens=None,
            dtype=dtype,
            device=device,
            max_tokens=max_tokens,
            max_prompt_tokens=max_prompt_tokens,
            rounds=rounds,
            ignore_eos=True,
            control_prompts=control_prompts,
            seed=seed,
        )
        known = read_prompts(prompts)
        sample = known if all_prompts else stratified(known, per_kind, seed)
        check_writable(json_file)
        tables, datastore = _of_corpus(corpus or [], model, Path(folder))
        methods = roster(tables, datastore, draft_model=draft_model is not None)
        if method:
            methods = _only(methods, method)
        report = measured(methods, sample, options)
    print("\n\n".join(_text(report, methods)))
    if json_file is not None:
        json_file.write_text(json.dumps(report.as_dict(), indent=1) + "\n", encoding="utf-8")
    raise typer.Exit(1 if any(row.differing for row in report.rows) else 0)


def _of_corpus(files: list[Path], model: str, folder: Path) -> tuple[Path | None, Path | None]:
    """N-grams and datastore of these files."""
    if not files:
        return None, None
    tokenizer = models.load_tokenizer(models.resolve(model))
    if tokenizer is None:
        raise BenchmarkError(f"{model} has no tokenizer, so that --corpus cannot be used.")
    tables, datastore = folder / "corpus.ngrams", folder / "corpus.datastore"
    build_ngrams(files, tokenizer).save(tables)
    build_datastore(files, tokenizer).save(datastore)
    return tables, datastore


def _only(methods: Sequence[Method], chosen: Sequence[str]) -> list[Method]:
    """The roster's methods of these names or labels; what it does not know is taken as it is."""
    found: list[Method] = []
    for text in chosen:
        known = [m for m in methods if text in (m.label, m.fields["method"])]
        found += known or parse_methods([text])
    return found


def _text(report: Report, methods: Sequence[Method]) -> Iterator[str]:
    facts: dict[str, Any] = report.facts
    yield f"`{command_line('benchmarks.methods')}`"
    yield ", ".join(f"{name} {value}" for name, value in facts.items() if value is not None)
    yield "Tokens/s over those of `none` (for all kinds with a 95 % interval over prompts):"
    yield table(report.rows, lambda row: f"{row.ratio.mean:.2f}", lambda row: str(row.ratio))
    yield "Mean acceptance length, and the share of target passes that had a draft:"
    yield table(report.rows, _acceptance, _acceptance)
    differing = sum(row.differing for row in report.rows if row.label not in ("all", CONTROL))
    yield f"Outputs that differ from those of `none`: {differing}."
    yield f"{report.ended} outputs went on past an end-of-sequence token."
    if missing := left_out(methods):
        yield f"Not in the tables: {', '.join(missing)}."


def _acceptance(row: Row) -> str:
    return f"{row.mean_acceptance_length:.2f} ({row.drafting_share:.0%})"


if __name__ == "__main__":
    typer.run(main)
