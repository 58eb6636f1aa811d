"""SpecDec's tables (Xia et al., arXiv 2203.16487) on a translator that is trained here.

English to German, on LibreOffice's help pages. All parts, in this order:

    python -m benchmarks.seq2seq data OUT       sentence pairs, from Debian's packages
    python -m benchmarks.seq2seq target OUT     a Marian model, 6 + 6 layers of 256
    python -m benchmarks.seq2seq drafters OUT   Spec-Drafters, and blockwise heads
    python -m benchmarks.seq2seq measure OUT    every contestant on every sentence of the test part
    python -m benchmarks.seq2seq tables OUT     tables as Markdown and JSON, figures as PNG

`all OUT` runs them one after the other. Every part goes on where it stopped. `score OUT` translates
the dev part with the mean of the last checkpoints, to see how the training goes; `average OUT`
makes that mean the target before the training ends. `--quick` makes everything tiny, to see that
all parts work: translations are then nonsense. `--plan FILE` has options as JSON (`Plan`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from annotated_types import Ge

from benchmarks import BenchmarkError
from benchmarks.report import command_line, in_one_line, machine, one_line_errors
from benchmarks.seq2seq_data import CATALOGUES, HELP, download, prepare
from benchmarks.seq2seq_drafters import MAIN, DrafterOptions, drafters_in, train_drafters
from benchmarks.seq2seq_measure import (
    BEAM,
    GREEDY,
    SHORT,
    Sample,
    contestants,
    lossless,
    measure,
    measure_batches,
    specdec,
)
from benchmarks.seq2seq_results import Results, score
from benchmarks.seq2seq_tables import as_markdown, save_figures, tables
from benchmarks.seq2seq_target import TargetOptions, average, lines, train_target
from tokenleap import LLM, SamplingParams
from tokenleap.bench.run import Journal
from tokenleap.core.config import Config

__all__ = ["QUICK", "Plan", "app"]

_FORMAT = "tokenleap-seq2seq-1"
_RECORDS = "measurements.jsonl"


class Plan(Config):
    """The training and the measurements.

    Args:
        catalogues: packages whose catalogues are learnt besides the help pages.
        pairs: most pairs to learn; None is all.
        target: how the target is trained.
        steps: of its training.
        drafters: which drafters are trained, and how.
        dtype: of target and drafters, when they are measured.
        sentences: of the test part, drawn at random; None is all.
        rounds: how often each is translated.
        batch_sizes: of figure 5.
        batch_sentences: of figure 5; a multiple of all sizes.
        threads: of PyTorch.
    """

    catalogues: tuple[str, ...] = CATALOGUES
    pairs: Annotated[int, Ge(40)] | None = None
    target: TargetOptions = TargetOptions()
    steps: Annotated[int, Ge(1)] = 20_000
    drafters: DrafterOptions = DrafterOptions()
    dtype: str = "auto"
    sentences: Annotated[int, Ge(1)] | None = None
    rounds: Annotated[int, Ge(1)] = 1
    batch_sizes: tuple[Annotated[int, Ge(1)], ...] = (1, 2, 4, 8, 16, 32)
    batch_sentences: Annotated[int, Ge(1)] = 64
    threads: Annotated[int, Ge(1)] = 1


QUICK = Plan(
    pairs=1000,
    target=TargetOptions(
        vocab_size=600, width=32, layers=2, feed_forward=64, heads=2, save_every=20, averaged=2
    ),
    steps=40,
    drafters=DrafterOptions(
        spec_set=(
            "size=0.25",
            "max_steps=8",
            "batch_tokens=512",
            "accumulation=1",
            "max_length=32",
        ),
        heads_set=("max_steps=8", "batch_tokens=512", "max_length=32"),
        tokens=2000,
        held_out_tokens=100,
    ),
    sentences=4,
    batch_sizes=(1, 4),
    batch_sentences=8,
)
"""Everything tiny."""

app = typer.Typer(
    help="SpecDec's tables on a translator that is trained here. The parts, in order: data, "
    "target, drafters, measure, tables.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
)

_Out = Annotated[Path, typer.Argument(help="Folder of everything.", metavar="OUT")]
_Quick = Annotated[bool, typer.Option("--quick", help="Everything tiny.")]
_PlanFile = Annotated[Path | None, typer.Option("--plan", help="Options as JSON (`Plan`).")]
_Only = Annotated[list[str] | None, typer.Option(help="A drafter (repeatable). Default: all.")]


@contextmanager
def _planned(quick: bool, path: Path | None) -> Iterator[Plan]:
    with one_line_errors():
        if quick and path is not None:
            raise BenchmarkError("--quick and --plan: give one of the two.")
        try:
            plan = QUICK if quick else Plan(**json.loads(path.read_text()) if path else {})
        except (OSError, TypeError, json.JSONDecodeError) as error:
            raise BenchmarkError(f"--plan: {path} cannot be read: {error}.") from None
        torch.set_num_threads(plan.threads)
        yield plan


@app.command("data")
def data_command(out: _Out, quick: _Quick = False, plan: _PlanFile = None) -> None:
    """Download Debian's packages, align them, and write the parts."""
    with _planned(quick, plan) as planned:
        root = download((*HELP, *planned.catalogues), out / "packages")
        print(in_one_line(prepare(out / "data", root, most=planned.pairs)))


@app.command("target")
def target_command(out: _Out, quick: _Quick = False, plan: _PlanFile = None) -> None:
    """Train the target, from its last checkpoint if there is one."""
    with _planned(quick, plan) as planned:
        print(train_target(out, planned.target, planned.steps))


@app.command("average")
def average_command(
    out: _Out,
    last: Annotated[int, typer.Option(min=1, help="So many checkpoints.")],
) -> None:
    """Make the mean of the last checkpoints the target, as `target` does at its end."""
    with one_line_errors():
        print(average(out, last))


@app.command("score")
def score_command(
    out: _Out,
    quick: _Quick = False,
    plan: _PlanFile = None,
    last: Annotated[int, typer.Option(min=1, help="So many checkpoints.")] = 1,
    part: Annotated[str, typer.Option(help="dev or test.")] = "dev",
    beams: Annotated[int, typer.Option(min=1, help="Width of the search.")] = 1,
) -> None:
    """Translate a part with the mean of the last checkpoints; print BLEU, chrF and examples."""
    with _planned(quick, plan) as planned:
        llm = LLM(average(out, last, "scored"), dtype=planned.dtype, max_num_seqs=32)
        params = SamplingParams(temperature=0, max_tokens=200, beam_width=beams)
        sources, references = (lines(out / f"data/{part}.{side}") for side in ("en", "de"))
        texts = [output.text for output in llm.generate(sources, params)]
        found = score(texts, references)
        print(f"BLEU {found.bleu:.2f}, chrF {found.chrf:.2f}, {len(texts)} sentences")
        for one in list(zip(sources, texts, references, strict=True))[:8]:
            print("\n" + "\n".join(one))


@app.command("drafters")
def drafters_command(
    out: _Out, quick: _Quick = False, plan: _PlanFile = None, only: _Only = None
) -> None:
    """Train the drafters, each from its last checkpoint if there is one."""
    with _planned(quick, plan) as planned:
        train_drafters(out, planned.drafters, only or ())


@app.command("measure")
def measure_command(out: _Out, quick: _Quick = False, plan: _PlanFile = None) -> None:
    """Translate the test part with every contestant, one by one and in batches."""
    with _planned(quick, plan) as planned:
        llm, sample = _target(out, planned), _sample(out, planned)
        journal, drafters = _journal(out, planned), drafters_in(out, planned.drafters)
        all_of_them = contestants(planned.drafters, drafters)
        measure(llm, all_of_them, sample, planned.rounds, journal)
        batched = [one for one in all_of_them if one.name in _BATCHED]
        sources = sample.sources[: planned.batch_sentences]
        measure_batches(llm, batched, sources, planned.batch_sizes, planned.rounds, journal)


_BATCHED = (BEAM, GREEDY, specdec(MAIN), specdec(MAIN, SHORT), lossless(MAIN))


@app.command("tables")
def tables_command(out: _Out, quick: _Quick = False, plan: _PlanFile = None) -> None:
    """Print the tables as Markdown; write them to OUT/results.json, and OUT/figures.png."""
    with _planned(quick, plan) as planned:
        if not (out / _RECORDS).exists():
            raise BenchmarkError(f"{out}: nothing is measured yet; run `measure` first.")
        journal, drafters = _journal(out, planned), drafters_in(out, planned.drafters)
        results = Results(journal.records, _sample(out, planned).references)
        found = tables(results, planned.drafters, drafters)
        facts = machine(torch.device("cpu")) | {"dtype": planned.dtype}
        facts |= {"sentences": len(results.numbers), "drafters": ", ".join(drafters)}
        written = {"facts": facts, "tables": [each.as_dict() for each in found]}
        (out / "results.json").write_text(json.dumps(written, indent=1) + "\n")
        print(f"{command_line('benchmarks.seq2seq')}\n\n{in_one_line(facts)}")
        for each in found:
            print(f"\n{as_markdown(each)}")
        if specdec(MAIN) in results and results.batch_names:
            save_figures(out / "figures.png", results)


@app.command("all")
def all_command(out: _Out, quick: _Quick = False, plan: _PlanFile = None) -> None:
    """Everything, one part after the other."""
    parts: tuple[Callable[..., None], ...] = (
        *(data_command, target_command, drafters_command),
        *(measure_command, tables_command),
    )
    for part in parts:
        part(out, quick, plan)


def _target(out: Path, plan: Plan) -> LLM:
    most = max(plan.batch_sizes)
    return LLM(out / "target", dtype=plan.dtype, max_num_seqs=most, enable_prefix_caching=False)


def _sample(out: Path, plan: Plan) -> Sample:
    sources, references = (lines(out / f"data/test.{side}") for side in ("en", "de"))
    order = torch.randperm(len(sources), generator=torch.Generator().manual_seed(0)).tolist()
    chosen = order[: plan.sentences]
    return Sample([sources[each] for each in chosen], [references[each] for each in chosen])


def digest(folder: Path) -> str:
    """Tells two models apart: of the weights and the configuration in a folder."""
    found = hashlib.sha256()
    for path in sorted([*folder.glob("*.safetensors"), folder / "config.json"]):
        found.update(path.name.encode())
        with path.open("rb") as file:
            found.update(hashlib.file_digest(file, "sha256").digest())
    return found.hexdigest()[:16]


def _journal(out: Path, plan: Plan) -> Journal:
    settings: dict[str, Any] = plan.model_dump(
        mode="json", include={"dtype", "threads", "sentences"}
    )
    folders = {"target": out / "target", **drafters_in(out, plan.drafters)}
    settings["models"] = {name: digest(folder) for name, folder in folders.items()}
    return Journal(out / _RECORDS, _FORMAT, settings)


if __name__ == "__main__":
    app()
