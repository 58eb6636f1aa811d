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
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from statistics import median, quantiles
from typing import Annotated, Any

import numpy as np
import torch
import typer
from annotated_types import Ge

from benchmarks import BenchmarkError, harness
from benchmarks.seq2seq_data import CATALOGUES, HELP, download, lines, prepare
from benchmarks.seq2seq_training import (
    AUTOREGRESSIVE,
    MAIN,
    SHAPES,
    DrafterOptions,
    TargetOptions,
    average,
    drafters_in,
    train_drafters,
    train_target,
)
from tokenleap import LLM, SamplingParams
from tokenleap.bench.report import markdown_table
from tokenleap.bench.run import Journal
from tokenleap.bench.summary import BatchPoint, Interval, bleu_metric, percentiles
from tokenleap.core.config import Config
from tokenleap.training.report import Panel, save_panels

_FORMAT = "tokenleap-seq2seq-2"
_RECORDS = "measurements.jsonl"

BEAM, GREEDY = "beam 5", "greedy"
"""The baselines."""
K, BETA, TAU = 25, 3, 1.0
"""SpecDec's published values."""
SHORT = 5
"""Tokens of a draft that pays for a small model."""
LENGTHS = (SHORT, 10, 15, 20, 25, 30)
_CHOSEN = (SHORT, 10, K)
"""Those of tables that do not compare them."""
_DRAFT_MODEL_LENGTHS = (3, SHORT)
BETAS, TAUS = (3, 5), (1.0, 2.0, 3.0, 4.0, 5.0)

_MOST_TOKENS = 200


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
    with harness.one_line_errors():
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
        print(harness.in_one_line(prepare(out / "data", root, most=planned.pairs)))


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
    with harness.one_line_errors():
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
        train_drafters(out, planned.drafters, planned.target, only or ())


@app.command("measure")
def measure_command(out: _Out, quick: _Quick = False, plan: _PlanFile = None) -> None:
    """Translate the test part with every contestant, one by one and in batches."""
    with _planned(quick, plan) as planned:
        llm, (sources, _) = _target(out, planned), _sample(out, planned)
        journal, drafters = _journal(out, planned), drafters_in(out, planned.drafters)
        all_of_them = contestants(planned.drafters, drafters)
        measure(llm, all_of_them, sources, planned.rounds, journal)
        main = (specdec(MAIN), specdec(MAIN, SHORT), lossless(MAIN))
        batched = [one for one in all_of_them if one.name in (BEAM, GREEDY, *main)]
        some = sources[: planned.batch_sentences]
        measure_batches(llm, batched, some, planned.batch_sizes, planned.rounds, journal)


@app.command("tables")
def tables_command(out: _Out, quick: _Quick = False, plan: _PlanFile = None) -> None:
    """Print the tables as Markdown; write them to OUT/results.json, and OUT/figures.png."""
    with _planned(quick, plan) as planned:
        if not (out / _RECORDS).exists():
            raise BenchmarkError(f"{out}: nothing is measured yet; run `measure` first.")
        journal, drafters = _journal(out, planned), drafters_in(out, planned.drafters)
        results = Results(journal.records, _sample(out, planned)[1])
        found = tables(results, planned.drafters, drafters)
        facts = harness.machine("cpu") | {"dtype": planned.dtype}
        facts |= {"sentences": len(results.numbers), "drafters": ", ".join(drafters)}
        written = {"facts": facts, "tables": [each.as_dict() for each in found]}
        (out / "results.json").write_text(json.dumps(written, indent=1) + "\n")
        print(harness.report("seq2seq", facts, *map(as_markdown, found)))
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


def _sample(out: Path, plan: Plan) -> tuple[list[str], list[str]]:
    """Sentences to translate, in random order, and their references."""
    sides = [lines(out / f"data/test.{side}") for side in ("en", "de")]
    order = torch.randperm(len(sides[0]), generator=torch.Generator().manual_seed(0)).tolist()
    sources, references = ([side[each] for each in order[: plan.sentences]] for side in sides)
    return sources, references


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


# The contestants share one process and one target, and take turns on every sentence


@dataclass(frozen=True)
class Contestant:
    """A way to translate: a speculative_config, or a width of beam search."""

    name: str
    config: Mapping[str, Any] = field(default_factory=lambda: {"method": "none"}, hash=False)
    beams: int = 1

    def __str__(self) -> str:
        return self.name

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(temperature=0, max_tokens=_MOST_TOKENS, beam_width=self.beams)


def specdec(drafter: str, k: int = K, beta: int = BETA, tau: float = TAU) -> str:
    """The name of a Spec-Drafter with `top_beta`."""
    return f"{drafter} k={k} beta={beta} tau={tau:g}"


def blockwise(k: int, rule: str = "") -> str:
    """The name of a drafter of blockwise heads; without a rule it is lossless."""
    return f"blockwise-{k}" + (f" {rule}" if rule else "")


def lossless(drafter: str, k: int | None = None) -> str:
    """The name of a Spec-Drafter with the default rule; without k, with the default controller."""
    return f"{drafter} lossless" + ("" if k is None else f" k={k}")


def unverified(drafter: str, k: int) -> str:
    """The name of a Spec-Drafter of whose drafts every token is kept, as if there was no target."""
    return f"{drafter} unverified k={k}"


def autoregressive(k: int, rule: str = "") -> str:
    """The name of the autoregressive draft model; without a rule it is lossless."""
    return f"{AUTOREGRESSIVE} k={k}" + (f" {rule}" if rule else "")


def contestants(options: DrafterOptions, drafters: Mapping[str, Path]) -> list[Contestant]:
    """The baselines, and whatever those of the planned drafters that are there allow."""
    found = [Contestant(BEAM, beams=5), Contestant(GREEDY)]
    for k in (10, 25):
        if (path := drafters.get(blockwise(k))) is not None:
            base = {**_config("blockwise", path, k), "controller": "fixed"}
            found.append(Contestant(blockwise(k), base))
            found.append(Contestant(blockwise(k, "top_beta"), {**base, "acceptance": _rule()}))
    specs = [(f"specdec-{shape}", K, BETA, TAU) for shape in SHAPES]
    specs += [(own, k, BETA, TAU) for k in LENGTHS if (own := options.drafter_of(k, drafters))]
    specs += [(MAIN, K, beta, tau) for beta, tau in product(BETAS, TAUS)]
    for name, k, beta, tau in dict.fromkeys(specs):
        if name in drafters:
            config = {**_config("spec_drafter", drafters[name], k), "controller": "fixed"}
            config["draft_quantization"] = "none"  # as published
            config["acceptance"] = _rule(beta, tau)
            found.append(Contestant(specdec(name, k, beta, tau), config))
            if name == MAIN and k in _CHOSEN and (beta, tau) == (BETA, TAU):
                every = {**_rule(), "minimum_block": k + 1}
                found.append(Contestant(unverified(name, k), {**config, "acceptance": every}))
    if MAIN in drafters:
        found.append(Contestant(lossless(MAIN), _config("spec_drafter", drafters[MAIN], K)))
        short = {**_config("spec_drafter", drafters[MAIN], SHORT), "controller": "fixed"}
        found.append(Contestant(lossless(MAIN, SHORT), short))
    if (path := drafters.get(AUTOREGRESSIVE)) is not None:
        for k in _DRAFT_MODEL_LENGTHS:
            base = {**_config("draft_model", path, k), "controller": "fixed"}
            found.append(Contestant(autoregressive(k), base))
            found.append(Contestant(autoregressive(k, "top_beta"), {**base, "acceptance": _rule()}))
    return found


def _config(method: str, path: Path, k: int) -> dict[str, Any]:
    return {"method": method, "model": str(path), "num_speculative_tokens": k}


def _rule(beta: int = BETA, tau: float = TAU) -> dict[str, Any]:
    return {"rule": "top_beta", "beta": beta, "tau": tau}


def measure(
    llm: LLM,
    all_of_them: Sequence[Contestant],
    sources: Sequence[str],
    rounds: int,
    journal: Journal,
) -> None:
    """Translate sentence by sentence: a record for each contestant, sentence and round."""

    def translate(one: Contestant, source: str) -> dict[str, Any]:
        (output,) = llm.generate(source, one.params, speculative_config=one.config)
        metrics = output.metrics
        if metrics.drafter_failure is not None:
            raise BenchmarkError(f"{one.name}: {metrics.drafter_failure}")
        return {
            "text": output.text,
            "tokens": metrics.generated_tokens,
            "seconds": metrics.seconds,
            "encode_seconds": metrics.encode_seconds,
            "draft_seconds": metrics.draft_seconds,
            "verify_seconds": metrics.verify_seconds,
            "passes": metrics.target_passes,
            "drafts": metrics.num_drafts,
            "accepted": metrics.num_accepted_tokens,
        }

    harness.in_turn(all_of_them, sources[:1], 1, translate, doing="warm-up")
    harness.in_turn(all_of_them, sources, rounds, translate, doing="sentence", journal=journal)


def measure_batches(
    llm: LLM,
    all_of_them: Sequence[Contestant],
    sources: Sequence[str],
    sizes: Sequence[int],
    rounds: int,
    journal: Journal,
) -> None:
    """Translate the sources in batches of each size: a record for each contestant and round.

    The sources are in random order, so that batches hold sentences of all lengths.
    """
    mixed = random.Random(0).sample(list(sources), len(sources))

    def translate(one: Contestant, size: int) -> dict[str, Any]:
        seconds = []
        for start in range(0, len(mixed), size):
            batch = mixed[start : start + size]
            run = partial(llm.generate, batch, one.params, speculative_config=one.config)
            seconds.append(harness.timed(run)[0])
        return {"sentences": len(mixed), "seconds": seconds}

    harness.in_turn(
        all_of_them, sizes, rounds, translate, doing="batch", journal=journal, numbers=sizes
    )


# Figures of the records

_RESAMPLES = 2000


@dataclass(frozen=True)
class Score:
    bleu: float
    chrf: float


def score(texts: Sequence[str], references: Sequence[str]) -> Score:
    """BLEU and chrF2 of translations."""
    metrics = bleu_metric("BLEU"), bleu_metric("CHRF")
    return Score(*(float(each.corpus_score(texts, [references]).score) for each in metrics))


def ratio_of_sums(above: Sequence[float], below: Sequence[float], seed: int = 0) -> Interval:
    """sum(above) / sum(below) with a 95 % percentile bootstrap interval over the pairs."""
    pairs = np.asarray(above), np.asarray(below)

    def ratio(x: Any, y: Any, axis: int) -> Any:
        return x.sum(axis) / y.sum(axis)

    ends = percentiles(pairs, ratio, seed=seed, resamples=_RESAMPLES)
    return Interval(float(ratio(*pairs, 0)), *(ends or (None, None)))


class Results:
    """The figures of a journal's records: speeds, scores and acceptance of each contestant."""

    def __init__(self, records: Sequence[Mapping[str, Any]], references: Sequence[str]) -> None:
        self._references = references
        self._sentences: dict[str, dict[int, list[Mapping[str, Any]]]] = {}
        self._batches: dict[str, dict[int, list[float]]] = {}
        self._counts: dict[str, int] = {}
        for record in records:
            if record["type"] == "sentence":
                of_one = self._sentences.setdefault(record["name"], {})
                of_one.setdefault(record["number"], []).append(record)
            elif record["type"] == "batch":
                sizes = self._batches.setdefault(record["name"], {})
                sizes.setdefault(record["number"], []).append(sum(record["seconds"]))
                self._counts[record["name"]] = record["sentences"]

    def __contains__(self, name: str) -> bool:
        return name in self._sentences

    @property
    def batch_names(self) -> list[str]:
        return list(self._batches)

    @cached_property
    def numbers(self) -> list[int]:
        """Sentences that all contestants have translated."""
        return sorted(set.intersection(*(set(each) for each in self._sentences.values())))

    def texts(self, name: str) -> list[str]:
        """The translations of `numbers`, of the first round."""
        return [self._sentences[name][number][0]["text"] for number in self.numbers]

    def seconds(self, name: str) -> list[float]:
        """The time of each of `numbers`: the median of the rounds."""
        own = self._sentences[name]
        return [median(call["seconds"] for call in own[number]) for number in self.numbers]

    def speedup(self, name: str, base: str) -> Interval:
        """Total time of the base over that of the contestant."""
        return ratio_of_sums(self.seconds(base), self.seconds(name))

    def single_speedups(self, name: str, base: str) -> list[float]:
        pairs = zip(self.seconds(base), self.seconds(name), strict=True)
        return [below / own for below, own in pairs]

    def score(self, name: str, base: str | None = None) -> Score:
        """Against the references, or against what the base has written."""
        wanted = [self._references[number] for number in self.numbers]
        return score(self.texts(name), wanted if base is None else self.texts(base))

    def same(self, name: str, base: str) -> float:
        pairs = zip(self.texts(name), self.texts(base), strict=True)
        return sum(one == other for one, other in pairs) / len(self.numbers)

    def mean(self, name: str, field: str, per: str) -> float:
        """The sum of a field of the records over that of another, such as tokens per pass."""
        calls = [call for n in self.numbers for call in self._sentences[name][n]]
        above, below = (sum(call[each] for call in calls) for each in (field, per))
        return float(above / max(1, below))

    def batch_points(self, name: str) -> list[BatchPoint]:
        """By batch size, of the median round."""
        count = self._counts[name]
        found = ((size, median(totals)) for size, totals in sorted(self._batches[name].items()))
        return [
            BatchPoint(name, size, total / -(-count // size), count / total)
            for size, total in found
        ]

    def twentieths(self, name: str, base: str) -> list[float]:
        """The 5th, 10th, ... and 95th percentile of `single_speedups`."""
        values = self.single_speedups(name, base)
        return quantiles(values, n=20, method="inclusive") if len(values) > 1 else values * 19

    def slower(self, name: str, base: str) -> float:
        """Share of the sentences that take longer than with the base."""
        slower = sum(ratio < 1 for ratio in self.single_speedups(name, base))
        return slower / len(self.numbers)


# The paper's tables


@dataclass(frozen=True)
class Table:
    """A table of the paper, with its number in the title; without rows, nothing was measured."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    def as_dict(self) -> dict[str, Any]:
        rows = [dict(zip(self.header, row, strict=True)) for row in self.rows]
        return {"title": self.title, "rows": rows}


def as_markdown(each: Table) -> str:
    return f"### {each.title}\n\n{markdown_table(each.header, each.rows)}"


_LOSSLESS = (
    (f"Spec-Drafter, lossless, k {SHORT}", lossless(MAIN, SHORT)),
    ("Spec-Drafter, lossless, default controller", lossless(MAIN)),
)
_BINS = (*(number / 2 for number in range(20)), 10.0)
_PERCENTILES = {"5 %": 0, "25 %": 4, "median": 9, "75 %": 14, "95 %": 18}
"""Places among twentieths."""

_CELLS: dict[str, Callable[[Results, str], str]] = {
    "over beam 5": lambda results, name: str(results.speedup(name, BEAM)),
    "over greedy": lambda results, name: str(results.speedup(name, GREEDY)),
    "BLEU": lambda results, name: f"{results.score(name).bleu:.2f}",
    "chrF": lambda results, name: f"{results.score(name).chrf:.2f}",
    "Tok.": lambda results, name: f"{results.mean(name, 'tokens', 'passes'):.2f}",
    "same as greedy": lambda results, name: f"{results.same(name, GREEDY):.1%}",
    "t_d (ms)": lambda r, name: f"{1000 * r.mean(name, 'draft_seconds', 'drafts'):.2f}",
    "pass of the target (ms)": lambda r, name: (
        f"{1000 * r.mean(name, 'verify_seconds', 'passes'):.2f}"
    ),
    "BLEU against greedy": lambda r, name: f"{r.score(name, GREEDY).bleu:.2f}",
    "chrF against greedy": lambda r, name: f"{r.score(name, GREEDY).chrf:.2f}",
    "BLEU against beam 5": lambda r, name: f"{r.score(name, BEAM).bleu:.2f}",
    "chrF against beam 5": lambda r, name: f"{r.score(name, BEAM).chrf:.2f}",
    **{
        title: lambda r, name, place=place: f"{r.twentieths(name, BEAM)[place]:.2f}"  # type: ignore[misc]
        for title, place in _PERCENTILES.items()
    },
    "slower than greedy": lambda results, name: f"{results.slower(name, GREEDY):.1%}",
}
"""A cell of a contestant, by the title of its column."""

_Named = Iterable[tuple[tuple[str, ...], str]]
"""Labels of a row, and the contestant."""


def tables(results: Results, options: DrafterOptions, drafters: Iterable[str]) -> list[Table]:
    """All tables of which something was measured, with the drafters that took part."""
    there = dict.fromkeys(drafters)
    own = {k: name for k in LENGTHS if (name := options.drafter_of(k, there)) is not None}
    lengths = {k: specdec(name, k) for k, name in own.items()}
    chosen = [((f"SpecDec, k {k}",), lengths.get(k, "")) for k in _CHOSEN]
    exact = [((label,), name) for label, name in _LOSSLESS]
    heads = [((f"blockwise, k {k}",), blockwise(k)) for k in (10, 25)]
    shapes = [((f"{each}, k {K}",), specdec(f"specdec-{each}")) for each in reversed(SHAPES)]
    tolerances = [
        ((f"{beta}", f"{tau:g}"), specdec(MAIN, K, beta, tau)) for beta in BETAS for tau in TAUS
    ]
    greedy = [((GREEDY,), GREEDY)]
    draft_model = [
        ((f"draft model, {rule or 'lossless'}, k {k}",), autoregressive(k, rule))
        for k in _DRAFT_MODEL_LENGTHS
        for rule in ("", "top_beta")
    ]

    def table(title: str, labels: Sequence[str], named: _Named, columns: Sequence[str]) -> Table:
        rows = [
            [*row, *(_CELLS[column](results, name) for column in columns)]
            for row, name in named
            if name in results
        ]
        return Table(title, (*labels, *columns), rows)

    found = (
        table(
            "Table 1: speed and quality",
            [""],
            [((BEAM,), BEAM), *greedy, *heads, *chosen, *exact],
            ["over beam 5", "over greedy", "BLEU", "chrF", "Tok.", "same as greedy"],
        ),
        table(
            "Table 2: drafters, all with top_beta",
            ["drafter"],
            [((f"heads, k {K}",), blockwise(K, "top_beta")), *shapes],
            ["Tok.", "t_d (ms)", "pass of the target (ms)", "over beam 5", "BLEU"],
        ),
        table(
            "Table 3: length of the drafts",
            ["k"],
            [((_of_most(k, name, options.num_masks),), name) for k, name in lengths.items()],
            ["Tok.", "BLEU", "over beam 5"],
        ),
        table("Table 4: tolerance", ["beta", "tau"], tolerances, ["Tok.", "BLEU", "over beam 5"]),
        _batches(results),
        table(
            "Table 6: against the target's own output",
            [""],
            [*greedy, *chosen],
            [f"{metric} against {base}" for base in (GREEDY, BEAM) for metric in ("BLEU", "chrF")],
        ),
        table(
            "Tables 6, 10 and 11: the drafter without the target, every token kept",
            [""],
            [((f"k {k}",), unverified(MAIN, k)) for k in _CHOSEN],
            ["Tok.", "over beam 5", "over greedy", "BLEU", "chrF"],
        ),
        table(
            "Table 14: an autoregressive draft model, of two decoder layers, too",
            [""],
            [*chosen, *exact, *draft_model] if AUTOREGRESSIVE in there else [],
            ["Tok.", "t_d (ms)", "pass of the target (ms)", "over beam 5", "over greedy", "BLEU"],
        ),
        table(
            "Figure 6: speed-ups of single sentences",
            ["over beam 5"],
            [*chosen, *exact],
            [*_PERCENTILES, "slower than greedy"],
        ),
    )
    return [each for each in found if each.rows]


def _of_most(k: int, name: str, most: int) -> str:
    """A length of drafts; of those with the first masks of `MAIN`, beside the number of all."""
    return f"{k} of {most}" if name == specdec(MAIN, k) and k < most else f"{k}"


def _batches(results: Results) -> Table:
    rows = [
        [name, str(each.size), f"{each.latency:.3f}", f"{each.throughput:.2f}"]
        for name in results.batch_names
        for each in results.batch_points(name)
    ]
    header = ("", "batch", "latency (s)", "sentences/s")
    return Table("Figure 5: latency and throughput", header, rows)


def save_figures(path: Path, results: Results) -> None:
    """Draw figures 5 and 6 as a PNG file, of SpecDec's measurements and of batches."""
    points = {name: results.batch_points(name) for name in results.batch_names}
    sizes = sorted({point.size for each in points.values() for point in each})
    ratios = results.single_speedups(specdec(MAIN), BEAM)
    bins = [max(low for low in _BINS if low <= ratio) for ratio in ratios]  # the last is open
    shares = [bins.count(low) / len(bins) for low in _BINS]
    panels = [
        Panel("Sentences per second", "batch size", sizes, _curves(points, "throughput")),
        Panel("Latency of a batch (s)", "batch size", sizes, _curves(points, "latency")),
        Panel("Share of the sentences", f"{MAIN} over beam 5", _BINS, {"": shares}),
    ]
    save_panels(path, panels)


def _curves(points: dict[str, Any], field: str) -> dict[str, list[float]]:
    return {name: [getattr(point, field) for point in each] for name, each in points.items()}


if __name__ == "__main__":
    app()
