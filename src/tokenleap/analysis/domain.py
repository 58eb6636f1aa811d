"""Checks of the formulas' arguments: a `ConfigError` names the argument and its range.

`formulas`, `distributions`, `stochastic` and `tokenleap.tuning.sequoia` call them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tokenleap.errors import ConfigError

__all__ = ["cost", "count", "curve", "distribution", "positive", "rate"]

SUM_TOLERANCE = 1e-4
"""How far a sum of probabilities may be from 1: float32 rounding over a large vocabulary."""


def rate(name: str, value: float) -> float:
    """A probability: a number in [0, 1]."""
    if not 0 <= value <= 1:  # also refuses NaN
        raise ConfigError(f"{name}: must be between 0 and 1, got {value}.")
    return float(value)


def cost(name: str, value: float) -> float:
    """A cost ratio: a finite number, 0 or more."""
    if not 0 <= value < math.inf:
        raise ConfigError(f"{name}: must be a finite number of at least 0, got {value}.")
    return float(value)


def positive(name: str, value: float) -> float:
    """A finite number above 0."""
    if not 0 < value < math.inf:
        raise ConfigError(f"{name}: must be a finite number above 0, got {value}.")
    return float(value)


def count(name: str, value: int, least: int = 0) -> int:
    """A whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise ConfigError(f"{name}: must be a whole number of at least {least}, got {value!r}.")
    return int(value)


def curve(name: str, values: Sequence[float]) -> NDArray[np.float64]:
    """Costs of verification by draft length, [G+1] with G >= 0, all finite and above 0."""
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or not len(array) or not np.all((array > 0) & np.isfinite(array)):
        raise ConfigError(f"{name}: must be a list of finite numbers above 0, got {values!r}.")
    return array


def distribution(name: str, values: ArrayLike) -> NDArray[np.float64]:
    """Probabilities along the last axis, [..., V]: each in [0, 1], summing to 1."""
    array = np.asarray(values, dtype=np.float64)
    if array.ndim < 1 or not array.size:
        raise ConfigError(f"{name}: must have at least one probability, got shape {array.shape}.")
    if not np.all((array >= 0) & (array <= 1 + SUM_TOLERANCE)):
        raise ConfigError(f"{name}: probabilities must be between 0 and 1.")
    sums = array.sum(axis=-1)
    if not np.all(np.abs(sums - 1) <= SUM_TOLERANCE):
        worst = float(sums.flat[int(np.abs(sums - 1).argmax())])
        raise ConfigError(f"{name}: probabilities must sum to 1, got a sum of {worst:.6g}.")
    return array
