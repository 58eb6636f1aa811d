"""`tokenleap bench`: compare methods and peers on a file of prompts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tokenleap.cli.bench_options import Amount, BenchEngine, Contenders, Emissions
from tokenleap.cli.bench_view import show_results
from tokenleap.cli.console import counting, display, errors, plain
from tokenleap.cli.files import write_whole
from tokenleap.cli.flat import flat, in_panel
from tokenleap.cli.options import DEFAULT_METHOD, ModelOptions
from tokenleap.cli.report import as_json
from tokenleap.cli.root import UsageError, examples
from tokenleap.cli.session import find_draft, resolve

if TYPE_CHECKING:
    from tokenleap.bench.contestants import Contestant, Setting
    from tokenleap.bench.journal import Journal
    from tokenleap.bench.run import Plan
    from tokenleap.bench.summary import Results

__all__ = ["EXAMPLES", "bench"]

EXAMPLES = examples(
    "tokenleap bench questions.jsonl  # none, ngram and Transformers",
    "tokenleap bench mine.txt --method suffix --method ngram_table --all",
    "tokenleap bench mine.txt --peers transformers,openvino --gguf model.gguf",
    "tokenleap bench mine.txt --temperature 0.8 --method suffix",
    "tokenleap bench mine.txt --batch-sizes 4,16 --output results",
    "tokenleap bench mine.txt --output results --resume  # after Ctrl-C",
)

RECORDS, TABLE, PAGE = "results.jsonl", "table.md", "report.html"


@flat
def bench(
    prompts: Annotated[
        Path, typer.Argument(help="JSON lines (Spec-Bench's or others), or one prompt per line.")
    ],
    contenders: Contenders,
    target: ModelOptions,
    engine: BenchEngine,
    amount: Amount,
    emissions: Emissions,
    output: Annotated[
        Path, in_panel("Output", "Folder for the records, the table and the report.", metavar="DIR")
    ] = Path("tokenleap-bench"),
    resume: Annotated[
        bool, in_panel("Output", "Continue the run that is recorded in --output.", "--resume")
    ] = False,
    json_output: Annotated[bool, in_panel("Output", "Print one JSON object.", "--json")] = False,
) -> None:
    """Compare methods and peers on your prompts.

    Every contestant has a process of its own. They take turns, and get the
    same prompts, seeds, output lengths and threads. Results are ratios to
    plain decoding (none) with bootstrap intervals. Exits with 1 if an
    output that must be plain decoding's differs.
    """
    plan = _plan(prompts, contenders, target, engine, amount)
    journal = _journal(plan, output, resume=resume)
    from tokenleap.bench.rows import Footprint
    from tokenleap.bench.run import run
    from tokenleap.bench.summary import Results

    with counting(quiet=json_output) as show:
        run(plan, journal, show)
    footprint = Footprint(emissions.pue, emissions.co2)
    results = Results(journal.records, plan.contestants, amount.seed, footprint)
    _write(plan, results, output, as_object=json_output)
    if broken := results.broken():
        names = ", ".join(dict.fromkeys(row.label for row in broken))
        errors().print(plain(f"error: outputs differ from plain decoding's: {names}", "error"))
        raise typer.Exit(1)


def _plan(
    file: Path, contenders: Contenders, target: ModelOptions, engine: BenchEngine, amount: Amount
) -> Plan:
    """The plan of the run, with every check that needs no model loaded."""
    from tokenleap.bench.contestants import PEERS, Setting, peers
    from tokenleap.models.resolver import gguf_file

    sizes = amount.batches()
    if engine.max_num_seqs is not None and not sizes:
        raise UsageError("--max-num-seqs is for several prompts at once: add --batch-sizes")
    gguf, itself = contenders.gguf, gguf_file(target.model)
    if gguf is not None and not gguf.is_file():
        raise UsageError(f"--gguf: there is no file {gguf}")
    readable = gguf or itself
    setting = Setting(
        model=target.model,
        dtype=target.dtype,
        runtime=target.runtime,
        device=target.device,
        draft_model=contenders.draft_model,
        gguf=None if readable is None else str(readable.resolve()),
        threads=target.threads or _threads(),
        max_tokens=amount.max_tokens,
        temperature=amount.temperature,
        max_prompt_tokens=amount.max_prompt_tokens,
        max_model_len=target.max_model_len,
        **{"max_num_seqs": max((16, *sizes)), **engine.arguments()},
    )
    quantization = _quantization(target)
    own = _methods(contenders, setting, quantization)
    others = peers(contenders.peers, setting)
    if not any("gguf" in PEERS[one.kind].needs for one in others):
        setting = replace(setting, gguf=None)
    _refuse_unused(contenders, [one.kind for one in others], [dict(one.config) for one in own])
    sample = amount.sample(file)
    folder = _found(setting.model, quantization)
    if gguf is not None and gguf.resolve() != itself:
        from tokenleap.bench.same_model import check_same_model

        check_same_model(gguf, folder or resolve(setting.model))
    _find_drafts(own, others, setting)
    from tokenleap.bench.run import Plan, check_installed

    check_installed()
    return Plan((*own, *others), setting, sample, amount.rounds, sizes, amount.control)


def _quantization(target: ModelOptions) -> str | None:
    """What contestants take that name none: "auto" for a GGUF file, in its own numbers."""
    from tokenleap.models.resolver import gguf_file

    if target.quantization == "auto":
        return None if gguf_file(target.model) is None else "auto"
    return None if target.quantization == "none" else target.quantization


def _found(model: str, quantization: str | None) -> Path | None:
    """A model's folder; None for a GGUF file that contestants load in its own numbers.

    Raises:
        ModelError: there is no such model, or the file is damaged.
    """
    from tokenleap.models.gguf_file import GgufFile
    from tokenleap.models.resolver import gguf_file

    if quantization is not None and (file := gguf_file(model)) is not None:
        GgufFile.read(file)
        return None
    return resolve(model)


def _find_drafts(own: list[Contestant], others: list[Contestant], setting: Setting) -> None:
    """Fetch or convert draft models, so that no contestant's time to load has it in it."""
    from tokenleap.config import SpeculativeConfig

    for one in own:
        config = SpeculativeConfig.parse(one.config)
        if config.takes_head:
            find_draft(config)
        elif config.model is not None:
            _found(config.model, one.quantization)
    if setting.draft_model is not None and "transformers-assistant" in [o.kind for o in others]:
        resolve(setting.draft_model)


def _methods(
    contenders: Contenders, setting: Setting, quantization: str | None
) -> list[Contestant]:
    """The baseline, and what is chosen, or the default of the model."""
    from tokenleap.bench.contestants import methods
    from tokenleap.drafters.heads.shipped import shipped_config

    shipped = None if contenders.method else shipped_config(setting.model, trees=True)
    if shipped is None:
        return methods(contenders.method or [DEFAULT_METHOD], setting.draft_model, quantization)
    baseline, default = methods([json.dumps(shipped)], None, quantization)
    return [baseline, replace(default, label=shipped["method"])]


def _refuse_unused(
    contenders: Contenders, kinds: list[str], configs: list[dict[str, object]]
) -> None:
    """Refuse options that would have no effect."""
    if contenders.gguf is not None and all(kind.startswith("transformers") for kind in kinds):
        raise UsageError("--gguf is for the peers llama.cpp and openvino: add --peers")
    used = any(config.get("model") == contenders.draft_model for config in configs)
    if contenders.draft_model is not None and not used and "transformers-assistant" not in kinds:
        raise UsageError(
            "--draft-model: no contestant takes it: add --method draft_model or "
            "--peers transformers-assistant"
        )


def _threads() -> int:
    """OMP_NUM_THREADS if it is set, or all cores."""
    import os

    from tokenleap.runtime.cores import available_cores

    threads = os.environ.get("OMP_NUM_THREADS", "")
    return int(threads) if threads.isdigit() and int(threads) > 0 else available_cores()


def _journal(plan: Plan, folder: Path, *, resume: bool) -> Journal:
    """The record file in this folder; makes the folder if needed.

    Raises:
        UsageError: there are records but no --resume, or --resume but no records.
    """
    from tokenleap.bench.journal import Journal
    from tokenleap.bench.run import FORMAT

    file = folder / RECORDS
    if file.exists() and not resume:
        raise UsageError(f"{file} exists already: add --resume, or choose another --output")
    if resume and not file.exists():
        raise UsageError(f"--resume: there is no {file}")
    folder.mkdir(parents=True, exist_ok=True)
    return Journal(file, FORMAT, plan.header())


def _write(plan: Plan, results: Results, folder: Path, *, as_object: bool) -> None:
    """Write the table and the report to the folder; print the results.

    On a terminal they are tables of its width, on a pipe Markdown, or one JSON object.
    """
    from tokenleap.bench.page import html
    from tokenleap.bench.ran import settings_that_ran
    from tokenleap.bench.report import markdown

    header = plan.header()
    table = markdown(results, header)
    write_whole(folder / TABLE, table)
    write_whole(folder / PAGE, html(results, header))
    if as_object:
        ran = settings_that_ran(header, results)
        display().out(as_json({"settings": ran, **results.as_dict()}))
        return
    if display().is_terminal:
        show_results(results, header)
    else:
        display().out(table.rstrip())
    console = errors()
    if console.is_terminal:
        console.print(plain(f"{RECORDS}, {TABLE} and {PAGE} are in {folder}.", "note"))
