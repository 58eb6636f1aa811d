"""Ratios of speeds: geometric means with confidence intervals, computed by SciPy."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import geometric_mean
from typing import Any

import numpy as np

from tokenleap.errors import TokenleapError

__all__ = ["Interval", "bootstrap_ratio", "geometric_mean", "scipy_stats", "t_ratio"]

RESAMPLES = 10_000
LEVEL = 0.95


@dataclass(frozen=True)
class Interval:
    """A geometric mean and its confidence interval; a single value has none."""

    mean: float
    low: float | None
    high: float | None

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.mean:.3f}"
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


def scipy_stats() -> Any:
    """The module `scipy.stats`, imported at its first use because that takes a second.

    Raises:
        TokenleapError: SciPy is not installed.
    """
    try:
        return importlib.import_module("scipy.stats")
    except ImportError as error:
        raise TokenleapError(
            "confidence intervals need SciPy: pip install 'tokenleap[bench]'."
        ) from error


def bootstrap_ratio(ratios: Sequence[float], seed: int = 0) -> Interval:
    """Geometric mean of ratios with a 95 % percentile bootstrap interval.

    With one ratio per prompt, prompts are resampled: the interval says how far the mean of another
    sample of prompts may lie.

    Args:
        ratios: positive numbers.
        seed: of the resampling.
    """
    mean = geometric_mean(ratios)
    if len(ratios) < 2:
        return Interval(mean, None, None)
    found = scipy_stats().bootstrap(
        (np.log(ratios),),
        np.mean,
        n_resamples=RESAMPLES,
        confidence_level=LEVEL,
        method="percentile",
        rng=np.random.default_rng(seed),
    )
    low, high = np.exp(found.confidence_interval)
    return Interval(mean, float(low), float(high))


def t_ratio(ratios: Sequence[float], level: float) -> Interval:
    """Geometric mean of ratios with Student's t interval of their logarithms.

    For a few rounds of the same measurement. A percentile bootstrap of five values is too narrow:
    its 95 % intervals contain the true mean in 83 % of cases.

    Args:
        ratios: positive numbers, one per round.
        level: the share of such intervals that contain the true mean.
    """
    mean = geometric_mean(ratios)
    if len(ratios) < 2:
        return Interval(mean, None, None)
    stats, logs = scipy_stats(), np.log(ratios)
    half = stats.t.ppf((1 + level) / 2, len(logs) - 1) * stats.sem(logs)
    return Interval(mean, float(mean * np.exp(-half)), float(mean * np.exp(half)))
