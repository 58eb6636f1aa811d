"""Figures of `benchmarks.seq2seq`: speeds, scores and acceptance of each contestant."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median, quantiles
from typing import Any

import numpy as np

from tokenleap.bench.rows import Interval, scipy_stats
from tokenleap.errors import TokenleapError

__all__ = ["BatchPoint", "Results", "Score", "ratio_of_sums", "score"]

_RESAMPLES = 2000
_SUMS = ("tokens", "passes", "drafts", "accepted", "draft_seconds", "verify_seconds")


@dataclass(frozen=True)
class Score:
    """Of translations, by sacreBLEU's defaults.

    Args:
        bleu: BLEU.
        chrf: chrF2.
    """

    bleu: float
    chrf: float


@dataclass(frozen=True)
class BatchPoint:
    """A contestant at one batch size.

    Args:
        size: of the batches.
        latency: seconds until all of a batch is translated, the mean.
        throughput: sentences per second.
    """

    size: int
    latency: float
    throughput: float


def score(texts: Sequence[str], references: Sequence[str]) -> Score:
    """BLEU and chrF2 of translations.

    Raises:
        TokenleapError: sacreBLEU is not installed.
    """
    try:
        sacrebleu: Any = importlib.import_module("sacrebleu")
    except ImportError as error:
        raise TokenleapError("BLEU needs sacreBLEU: pip install 'tokenleap[bench]'.") from error
    found = (
        metric(texts, [references]) for metric in (sacrebleu.corpus_bleu, sacrebleu.corpus_chrf)
    )
    bleu, chrf = (float(each.score) for each in found)
    return Score(bleu, chrf)


def ratio_of_sums(above: Sequence[float], below: Sequence[float], seed: int = 0) -> Interval:
    """sum(above) / sum(below), with a 95 % percentile bootstrap interval over the pairs.

    Args:
        above: positive numbers, one a sentence.
        below: as many, of the same sentences.
        seed: of the resampling.
    """
    first, second = np.asarray(above), np.asarray(below)
    mean = float(first.sum() / second.sum())
    if len(first) < 2:
        return Interval(mean, None, None)
    found = scipy_stats().bootstrap(
        (first, second),
        lambda x, y, axis: x.sum(axis) / y.sum(axis),
        paired=True,
        n_resamples=_RESAMPLES,
        method="percentile",
        rng=np.random.default_rng(seed),
    )
    low, high = found.confidence_interval
    return Interval(mean, float(low), float(high))


class Results:
    """The figures of records.

    Args:
        records: of a journal.
        references: of the sentences.
    """

    def __init__(self, records: Sequence[Mapping[str, Any]], references: Sequence[str]) -> None:
        self._references = references
        self._sentences: dict[str, dict[int, list[Mapping[str, Any]]]] = {}
        self._batches: dict[str, dict[int, list[float]]] = {}
        self._sizes: dict[str, int] = {}
        for record in records:
            if record["type"] == "sentence":
                of_one = self._sentences.setdefault(record["name"], {})
                of_one.setdefault(record["number"], []).append(record)
            elif record["type"] == "batch":
                sizes = self._batches.setdefault(record["name"], {})
                sizes.setdefault(record["size"], []).append(sum(record["seconds"]))
                self._sizes[record["name"]] = record["number"]

    def __contains__(self, name: str) -> bool:
        return name in self._sentences

    @property
    def names(self) -> list[str]:
        """All contestants."""
        return list(self._sentences)

    @property
    def batch_names(self) -> list[str]:
        """Contestants of whom there are batches."""
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
        """The same, of each sentence."""
        pairs = zip(self.seconds(base), self.seconds(name), strict=True)
        return [below / own for below, own in pairs]

    def score(self, name: str) -> Score:
        """Against the references."""
        return score(self.texts(name), [self._references[number] for number in self.numbers])

    def relative_score(self, name: str, base: str) -> Score:
        """Against what another contestant has written."""
        return score(self.texts(name), self.texts(base))

    def same(self, name: str, base: str) -> float:
        """Share of the sentences for which both have the same text."""
        pairs = zip(self.texts(name), self.texts(base), strict=True)
        return sum(one == other for one, other in pairs) / len(self.numbers)

    def tokens_per_pass(self, name: str) -> float:
        """Mean tokens per pass of the target: the paper's Tok."""
        sums = self._sums(name)
        return sums["tokens"] / max(1, sums["passes"])

    def draft_ms(self, name: str) -> float:
        """Mean milliseconds of a draft: the paper's t_d."""
        sums = self._sums(name)
        return 1000 * sums["draft_seconds"] / max(1, sums["drafts"])

    def verify_ms(self, name: str) -> float:
        """Mean milliseconds of a pass of the target."""
        sums = self._sums(name)
        return 1000 * sums["verify_seconds"] / max(1, sums["passes"])

    def _sums(self, name: str) -> dict[str, float]:
        calls = [call for n in self.numbers for call in self._sentences[name][n]]
        return {field: sum(call[field] for call in calls) for field in _SUMS}

    def batch_points(self, name: str) -> list[BatchPoint]:
        """By batch size, of the median round."""
        count = self._sizes[name]
        found = ((size, median(totals)) for size, totals in sorted(self._batches[name].items()))
        return [BatchPoint(size, total / -(-count // size), count / total) for size, total in found]

    def percentiles(self, name: str, base: str) -> list[float]:
        """The 5th, 25th, 50th, 75th and 95th percentile of `single_speedups`."""
        values = self.single_speedups(name, base)
        twentieths = quantiles(values, n=20, method="inclusive") if len(values) > 1 else values * 19
        return [twentieths[place - 1] for place in (1, 5, 10, 15, 19)]
