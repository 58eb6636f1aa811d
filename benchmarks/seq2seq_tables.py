"""The tables of `benchmarks.seq2seq`, as in the paper of SpecDec (arXiv 2203.16487)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.report import markdown_table
from benchmarks.seq2seq_drafters import MAIN, SHAPES, DrafterOptions
from benchmarks.seq2seq_measure import (
    BEAM,
    BETAS,
    GREEDY,
    LENGTHS,
    SHORT,
    TAUS,
    K,
    blockwise,
    lossless,
    specdec,
)
from benchmarks.seq2seq_results import Results
from tokenleap.training.report import Panel, save_panels

__all__ = ["Table", "as_markdown", "save_figures", "tables"]

_CHOSEN = (SHORT, 10, K)
"""Lengths of drafts in tables that do not compare them."""
_LOSSLESS = (
    (f"Spec-Drafter, lossless, k {SHORT}", lossless(MAIN, SHORT)),
    ("Spec-Drafter, lossless, default controller", lossless(MAIN)),
)
_BINS = (*(number / 2 for number in range(20)), 10.0)


class Table(NamedTuple):
    """A table of the results.

    Args:
        title: with the paper's number.
        header: of the columns.
        rows: cells; empty if nothing of it was measured.
    """

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "title": self.title,
            "rows": [dict(zip(self.header, r, strict=True)) for r in self.rows],
        }


def tables(results: Results, options: DrafterOptions, drafters: Iterable[str]) -> list[Table]:
    """All tables of which something was measured.

    Args:
        results: of the measurements.
        options: the planned drafters.
        drafters: names of those that took part.
    """
    there = dict.fromkeys(drafters)
    own = {k: name for k in LENGTHS if (name := options.drafter_of(k, there)) is not None}
    lengths = {k: specdec(name, k) for k, name in own.items()}
    found = (
        _speeds(results, lengths),
        _ablation(results),
        _block_lengths(results, lengths, options.num_masks),
        _tolerance(results),
        _batches(results),
        _relative(results, lengths),
        _single(results, lengths),
    )
    return [table for table in found if table.rows]


def as_markdown(each: Table) -> str:
    """With its title."""
    return f"### {each.title}\n\n{markdown_table(each.header, each.rows)}"


def _rows(
    results: Results, named: Iterable[tuple[str, str]], cells: Callable[[str], Sequence[str]]
) -> list[list[str]]:
    """A row for each (label, name) that was measured."""
    return [[label, *cells(name)] for label, name in named if name in results]


def _chosen(lengths: dict[int, str]) -> list[tuple[str, str]]:
    """Labels and names of SpecDec with `_CHOSEN` lengths."""
    return [(f"SpecDec, k {k}", lengths.get(k, "")) for k in _CHOSEN]


def _speeds(results: Results, lengths: dict[int, str]) -> Table:
    named = [
        (BEAM, BEAM),
        (GREEDY, GREEDY),
        *((f"blockwise, k {k}", blockwise(k)) for k in (10, 25)),
        *_chosen(lengths),
        *_LOSSLESS,
    ]

    def cells(name: str) -> list[str]:
        found = results.score(name)
        return [
            *(str(results.speedup(name, base)) for base in (BEAM, GREEDY)),
            f"{found.bleu:.2f}",
            f"{found.chrf:.2f}",
            f"{results.tokens_per_pass(name):.2f}",
            f"{results.same(name, GREEDY):.1%}",
        ]

    header = ("", "over beam 5", "over greedy", "BLEU", "chrF", "Tok.", "same as greedy")
    return Table("Table 1: speed and quality", header, _rows(results, named, cells))


def _ablation(results: Results) -> Table:
    named = [
        (f"heads, k {K}", blockwise(K, "top_beta")),
        *((f"{shape}, k {K}", specdec(f"specdec-{shape}")) for shape in reversed(SHAPES)),
    ]

    def cells(name: str) -> list[str]:
        return [
            f"{results.tokens_per_pass(name):.2f}",
            f"{results.draft_ms(name):.2f}",
            f"{results.verify_ms(name):.2f}",
            str(results.speedup(name, BEAM)),
            f"{results.score(name).bleu:.2f}",
        ]

    header = ("drafter", "Tok.", "t_d (ms)", "pass of the target (ms)", "over beam 5", "BLEU")
    return Table("Table 2: drafters, all with top_beta", header, _rows(results, named, cells))


def _block_lengths(results: Results, lengths: dict[int, str], most: int) -> Table:
    first = {k for k, name in lengths.items() if name == specdec(MAIN, k) and k < most}
    named = [(f"{k} of {most}" if k in first else f"{k}", name) for k, name in lengths.items()]

    def cells(name: str) -> list[str]:
        return [
            f"{results.tokens_per_pass(name):.2f}",
            f"{results.score(name).bleu:.2f}",
            str(results.speedup(name, BEAM)),
        ]

    header = ("k", "Tok.", "BLEU", "over beam 5")
    return Table("Table 3: length of the drafts", header, _rows(results, named, cells))


def _tolerance(results: Results) -> Table:
    rows = [
        [
            f"{beta}",
            f"{tau:g}",
            f"{results.tokens_per_pass(name):.2f}",
            f"{results.score(name).bleu:.2f}",
            str(results.speedup(name, BEAM)),
        ]
        for beta in BETAS
        for tau in TAUS
        if (name := specdec(MAIN, K, beta, tau)) in results
    ]
    return Table("Table 4: tolerance", ("beta", "tau", "Tok.", "BLEU", "over beam 5"), rows)


def _batches(results: Results) -> Table:
    rows = [
        [name, str(each.size), f"{each.latency:.3f}", f"{each.throughput:.2f}"]
        for name in results.batch_names
        for each in results.batch_points(name)
    ]
    header = ("", "batch", "latency (s)", "sentences/s")
    return Table("Figure 5: latency and throughput", header, rows)


def _relative(results: Results, lengths: dict[int, str]) -> Table:
    named = [(GREEDY, GREEDY), *_chosen(lengths)]

    def cells(name: str) -> list[str]:
        found = [results.relative_score(name, base) for base in (GREEDY, BEAM)]
        return [f"{number:.2f}" for each in found for number in (each.bleu, each.chrf)]

    bases = ("greedy", "beam 5")
    header = ("", *(f"{metric} against {base}" for base in bases for metric in ("BLEU", "chrF")))
    return Table("Table 6: against the target's own output", header, _rows(results, named, cells))


def _single(results: Results, lengths: dict[int, str]) -> Table:
    named = [
        *_chosen(lengths),
        *_LOSSLESS,
    ]

    def cells(name: str) -> list[str]:
        slower = sum(ratio < 1 for ratio in results.single_speedups(name, GREEDY))
        return [
            *(f"{value:.2f}" for value in results.percentiles(name, BEAM)),
            f"{slower / len(results.numbers):.1%}",
        ]

    header = ("over beam 5", "5 %", "25 %", "median", "75 %", "95 %", "slower than greedy")
    return Table("Figure 6: speed-ups of single sentences", header, _rows(results, named, cells))


def save_figures(path: Path, results: Results) -> None:
    """Draw figures 5 and 6 as a PNG file.

    Args:
        path: of the file.
        results: of the measurements, with SpecDec's and batches.
    """
    points = {name: results.batch_points(name) for name in results.batch_names}
    sizes = sorted({point.size for each in points.values() for point in each})
    ratios = results.single_speedups(specdec(MAIN), BEAM)
    bins = [max(low for low in _BINS if low <= ratio) for ratio in ratios]  # the last is open
    shares = [bins.count(low) / len(bins) for low in _BINS]
    panels = [
        Panel("Sentences per second", "batch size", sizes, _lines(points, "throughput")),
        Panel("Latency of a batch (s)", "batch size", sizes, _lines(points, "latency")),
        Panel("Share of the sentences", f"{MAIN} over beam 5", _BINS, {"": shares}),
    ]
    save_panels(path, panels)


def _lines(points: dict[str, Any], field: str) -> dict[str, list[float]]:
    return {name: [getattr(point, field) for point in each] for name, each in points.items()}
