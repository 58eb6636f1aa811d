"""Ratios of speeds over prompts: geometric means and bootstrap confidence intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["Interval", "bootstrap_ratio", "geometric_mean"]

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


def geometric_mean(values: Sequence[float]) -> float:
    """The mean for ratios: of twice and half it is 1."""
    return float(np.exp(np.log(np.asarray(values, dtype=np.float64)).mean()))


def bootstrap_ratio(ratios: Sequence[float], seed: int = 0) -> Interval:
    """Geometric mean of ratios with its 95 % percentile bootstrap interval over prompts.

    Resampling prompts and not rounds: the interval says what another sample of prompts would give.

    Args:
        ratios: one per prompt, positive.
        seed: of the resampling.
    """
    logs = np.log(np.asarray(ratios, dtype=np.float64))  # [P]
    mean = geometric_mean(ratios)
    if len(logs) < 2:
        return Interval(mean, None, None)
    picks = np.random.default_rng(seed).integers(len(logs), size=(RESAMPLES, len(logs)))
    means = np.exp(logs[picks].mean(axis=1))  # [RESAMPLES]
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return Interval(mean, float(low), float(high))
