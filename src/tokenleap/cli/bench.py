"""`tokenleap bench`: compare methods and peers on a file of prompts."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.cells import cell_len
from rich.console import Group
from rich.table import Table

from tokenleap.cli.console import counting, display, errors, plain, show, show_json
from tokenleap.cli.options import (
    DEFAULT_METHOD,
    UNSAID,
    EngineOptions,
    JsonOutput,
    MaxNumSeqs,
    ModelOptions,
    check_head,
    few,
    flat,
    in_panel,
    numbers,
    option,
    option_group,
    resolve,
)
from tokenleap.cli.root import UsageError, examples, write_whole

if TYPE_CHECKING:
    from tokenleap.bench.contestants import Contestant, Setting
    from tokenleap.bench.prompts_file import Prompt
    from tokenleap.bench.run import Journal, Plan
    from tokenleap.bench.summary import Results

_output = partial(in_panel, "Output")


# What `tokenleap bench` compares, and how much it measures: its options in groups.


_DEFAULT_PEERS = "transformers-plain"
_DEFAULT_PER_KIND = 5


@option_group("Contestants")
class Contenders:
    """The methods and peers that are compared with plain decoding."""

    method: list[str] | None = option(
        f"A method, {UNSAID}, or a JSON speculative_config (quantization allowed). Repeatable.",
        show_default=f"{DEFAULT_METHOD}; hybrid where a head comes with the package",
    )
    peers: str = option(
        "transformers, llama.cpp, openvino, or none. For one mode, add -plain, -lookup or "
        "-assistant.",
        default=_DEFAULT_PEERS,
        metavar="PEER,...",
    )
    gguf: Path | None = option(
        "GGUF file of the model, for llama.cpp and openvino.",
        metavar="FILE",
        show_default="--model, if it is one",
    )
    draft_model: str | None = option(
        "Draft model, for methods that take one and transformers-assistant."
    )


@dataclass(frozen=True)
class BenchEngine(EngineOptions):
    """Engine options of this library's contestants.

    There is no option for prefix caching: it is off, because the rounds repeat every prompt.
    """

    max_num_seqs: MaxNumSeqs = None


@option_group("Output")
class Emissions:
    """How measured energy is turned into emissions; see `bench.summary.Footprint`."""

    pue: float = option(
        "Power usage effectiveness, where energy can be measured.", default=1.1, min=1
    )
    co2: float = option("Grams of CO2 per Wh.", default=0.385, min=0)


@option_group("Amount")
class Amount:
    """How much to measure."""

    per_kind: int | None = option(
        "Prompts of each kind.", min=1, show_default=str(_DEFAULT_PER_KIND)
    )
    everything: bool = option("Use all prompts of the file.", "--all", default=False)
    rounds: int = option("Runs of every prompt.", default=3, min=1)
    max_tokens: int = option("Tokens to generate per prompt.", default=128, min=2)
    temperature: float = option(
        "Sampling; a prompt has the same seed for all contestants. 0 is greedy.", default=0.0, min=0
    )
    max_prompt_tokens: int = option(
        "Limit of prompt tokens; longer prompts lose their middle.", default=2048, min=2
    )
    batch_sizes: str | None = option(
        "Also run batches of these sizes, where supported.", metavar="N,N,...", show_default="1"
    )
    control: int = option(
        "Also run prompts of random tokens, which drafts cannot copy.", default=0, min=0
    )
    seed: int = option("Seed of the sample of prompts.", default=0, min=0)

    def sample(self, file: Path) -> tuple[Prompt, ...]:
        """The prompts to run: a sample of each kind, or all of them."""
        from tokenleap.bench.prompts_file import read_prompts, stratified

        prompts = read_prompts(file)
        if self.everything:
            if self.per_kind is not None:
                raise UsageError(f"--all takes every prompt: leave out --per-kind {self.per_kind}")
            return tuple(prompts)
        return tuple(stratified(prompts, self.per_kind or _DEFAULT_PER_KIND, self.seed))

    def batches(self) -> tuple[int, ...]:
        """Batch sizes other than 1, in ascending order."""
        wrong = "--batch-sizes takes numbers, as in 1,4,16"
        sizes = numbers(self.batch_sizes or "1", int, wrong, lambda size: size >= 1)
        return tuple(sorted({*sizes} - {1}))


EXAMPLES = examples(
    "tokenleap bench questions.jsonl  # none, the default method and Transformers",
    "tokenleap bench mine.txt --method suffix --method ngram_table --all",
    "tokenleap bench mine.txt --peers transformers,openvino --gguf model.gguf",
    "tokenleap bench mine.txt --temperature 0.8 --method suffix",
    "tokenleap bench mine.txt --batch-sizes 4,16 --output results",
    "tokenleap bench mine.txt --output results --resume  # after Ctrl-C",
)

RECORDS, TABLE, PAGE = "results.jsonl", "table.md", "report.html"


@few("method peers draft_model model quantization per_kind max_tokens output resume json_output")
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
        Path, _output("Folder for the records, the table and the report.", metavar="DIR")
    ] = Path("tokenleap-bench"),
    resume: Annotated[
        bool, _output("Continue the run that is recorded in --output.", "--resume")
    ] = False,
    json_output: JsonOutput = False,
) -> None:
    """Compare methods and peers on your prompts.

    Every contestant has a process of its own. They take turns, and get the
    same prompts, seeds, output lengths and threads. Results are ratios to
    plain decoding (none) with bootstrap intervals. Exits with 1 if an
    output that must be plain decoding's differs.
    """
    plan = _plan(prompts, contenders, target, engine, amount)
    journal = _journal(plan, output, resume=resume)
    from tokenleap.bench.run import run
    from tokenleap.bench.summary import Footprint, Results

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
        from tokenleap.bench.contestants import check_same_model

        check_same_model(gguf, folder or resolve(setting.model))
    _find_drafts(own, others, setting)
    from tokenleap.bench.run import Plan, check_installed

    check_installed()
    return Plan((*own, *others), setting, sample, amount.rounds, sizes, amount.control)


def _quantization(target: ModelOptions) -> str | None:
    """The default of contestants that name none: "auto" for a GGUF file."""
    from tokenleap.models.resolver import gguf_file

    if target.quantization == "auto":
        return None if gguf_file(target.model) is None else "auto"
    return None if target.quantization == "none" else target.quantization


def _found(model: str, quantization: str | None) -> Path | None:
    """A model's folder; None for a GGUF file that contestants load as it is."""
    from tokenleap.models.gguf import GgufFile
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
        if config.model is not None and not config.takes_head:
            _found(config.model, one.quantization)
    if setting.draft_model is not None and "transformers-assistant" in [o.kind for o in others]:
        resolve(setting.draft_model)


def _methods(
    contenders: Contenders, setting: Setting, quantization: str | None
) -> list[Contestant]:
    """The baseline, and what is chosen, or the default of the model."""
    from tokenleap.bench.contestants import methods
    from tokenleap.config import SpeculativeConfig
    from tokenleap.drafters.heads.shipped import shipped_head

    default = DEFAULT_METHOD if shipped_head(setting.model) is None else "hybrid"
    own: dict[str, Contestant] = {}
    for text in contenders.method or [UNSAID]:
        name, draft = (default, None) if text == UNSAID else (text, setting.draft_model)
        for one in methods([name], draft, quantization, target=setting.model):
            check_head(SpeculativeConfig.parse(one.config))
            own[one.label] = one
    return list(own.values())


def _refuse_unused(
    contenders: Contenders, kinds: list[str], configs: list[dict[str, object]]
) -> None:
    if contenders.gguf is not None and all(kind.startswith("transformers") for kind in kinds):
        raise UsageError("--gguf is for the peers llama.cpp and openvino: add --peers")
    used = any(config.get("model") == contenders.draft_model for config in configs)
    if contenders.draft_model is not None and not used and "transformers-assistant" not in kinds:
        raise UsageError(
            "--draft-model: no contestant takes it: add --method draft_model or "
            "--peers transformers-assistant"
        )


def _threads() -> int:
    import os

    from tokenleap.runtime.cores import available_cores

    threads = os.environ.get("OMP_NUM_THREADS", "")
    return int(threads) if threads.isdigit() and int(threads) > 0 else available_cores()


def _journal(plan: Plan, folder: Path, *, resume: bool) -> Journal:
    """The record file in this folder; makes the folder if needed."""
    from tokenleap.bench.run import FORMAT, Journal

    file = folder / RECORDS
    if file.exists() and not resume:
        raise UsageError(f"{file} exists already: add --resume, or choose another --output")
    if resume and not file.exists():
        raise UsageError(f"--resume: there is no {file}")
    folder.mkdir(parents=True, exist_ok=True)
    return Journal(file, FORMAT, plan.header())


def _write(plan: Plan, results: Results, folder: Path, *, as_object: bool) -> None:
    """Write the table and the report; print tables, Markdown on a pipe, or one JSON object."""
    from tokenleap.bench.report import html, markdown, settings_that_ran

    header = plan.header()
    table = markdown(results, header)
    write_whole(folder / TABLE, table)
    write_whole(folder / PAGE, html(results, header))
    if as_object:
        ran = settings_that_ran(header, results)
        show_json({"settings": ran, **results.as_dict()})
        return
    if display().is_terminal:
        show_results(results, header)
    else:
        display().out(table.rstrip())
    console = errors()
    if console.is_terminal:
        console.print(plain(f"{RECORDS}, {TABLE} and {PAGE} are in {folder}.", "note"))


# The results of `tokenleap bench` on a terminal: tables that fit its width.


_WRAPPED = ((60, 60), (40, 20), (30, 14), (24, 10), (24, 0))
"""How wide the labels of contestants and the names of columns may be, from wide to narrow."""

_GAP = 2


def show_results(results: Results, settings: Mapping[str, Any]) -> None:
    from tokenleap.bench.report import facts_line, notes, tables

    parts = [
        Group(plain(f"{title} (continued)" if number else title, "head"), part)
        for title, header, rows in tables(results)
        for number, part in enumerate(fitted(header, rows, display().width))
    ]
    grid = Table.grid(padding=(0, 1, 0, 0))
    for note in notes(results):
        grid.add_row("-", plain(note))
    show(plain(facts_line(settings, results), "note"), *parts, grid)


def fitted(header: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> list[Table]:
    """A table as one that fits, or as several with the same first column.

    Where it would be too wide, labels and names of columns wrap, then intervals go to a second line
    of their cells. If that is not enough, the table is cut between columns.
    """
    whole = [list(column) for column in zip(header, *rows, strict=True)]
    stacked = [whole[0], *([name, *map(_below, cells)] for name, *cells in whole[1:])]
    for given in (whole, stacked):
        for label_cells, name_cells in _WRAPPED:
            columns = _wrapped_columns(given, label_cells, name_cells)
            widths = [max(map(_widest_line, column)) for column in columns]
            if sum(widths) + _GAP * (len(columns) - 1) <= width:
                return [_table(columns, widths)]
    return [
        _table([columns[0], *columns[start:end]], [widths[0], *widths[start:end]])
        for start, end in pairwise(_cuts(widths, width))
    ]


def _wrapped_columns(
    columns: Sequence[Sequence[str]], label_cells: int, name_cells: int
) -> list[list[str]]:
    """The columns with lines of at most so many cells, unless a word or another cell is longer."""
    labels = [_wrapped(cell, label_cells) for cell in columns[0]]
    wrapped = [labels]
    for name, *cells in columns[1:]:
        longest = max(map(_widest_line, cells), default=0)
        wrapped.append([_wrapped(name, max(longest, name_cells)), *cells])
    return wrapped


def _cuts(widths: Sequence[int], width: int) -> list[int]:
    """Where a table is cut: the first column of each part, and the number of columns."""
    cuts, used = [1], widths[0]
    for at, size in enumerate(widths[1:], 1):
        if used + _GAP + size > width and at > cuts[-1]:
            cuts.append(at)
            used = widths[0]
        used += _GAP + size
    return [*cuts, len(widths)]


def _table(columns: Sequence[Sequence[str]], widths: Sequence[int]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="head", padding=(0, _GAP, 0, 0))
    for index, (column, width) in enumerate(zip(columns, widths, strict=True)):
        name = plain(column[0])
        table.add_column(name, justify="right" if index else "left", width=width, vertical="top")
    for row in zip(*(column[1:] for column in columns), strict=True):
        table.add_row(*map(plain, row))
    return table


def _wrapped(text: str, width: int) -> str:
    """Text in lines of at most so many cells, if its words allow that; they break at hyphens."""
    longest = max((len(part) for part in text.replace("-", "- ").split()), default=1)
    return "\n".join(textwrap.wrap(text, max(width, longest), break_long_words=False))


def _below(cell: str) -> str:
    """A cell with its interval, or what stands in brackets, on a second line."""
    return cell.replace(" [", "\n[").replace(" (", "\n(")


def _widest_line(cell: str) -> int:
    return max(map(cell_len, cell.split("\n")))
