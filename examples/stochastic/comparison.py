"""Measures the speed of speculative execution, and shows that it keeps the distribution."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from tokenleap.analysis.formulas import Result, Speculation, expected_speedup
from tokenleap.core.distribution import Distribution
from tokenleap.core.noise import Noise

DRAWS = 4000


class Comparison:
    """Times calls with and without speculation.

    Both kinds of call take turns, so that other work of the machine slows both down alike.

    Args:
        call: f, g and the guess.
    """

    def __init__(self, call: Speculation[Any, Any]) -> None:
        self._call = call
        self._in_turn: list[float] = []
        self._speculative: list[float] = []
        self._kept: list[bool] = []

    def run(self, x: Any, noise: Noise) -> Result[Any]:
        """Make one call without and one with speculation; returns the result of the latter."""
        began = time.perf_counter()
        self._call.in_turn(x, noise)
        between = time.perf_counter()
        result = self._call(x, noise)
        self._in_turn.append(between - began)
        self._speculative.append(time.perf_counter() - between)
        self._kept.append(result.accepted)
        return result

    def show(self, alpha: float, f_seconds: float, g_seconds: float) -> None:
        """Print the measured speed-up, and the expected one for this alpha and these times."""
        in_turn, speculative = sum(self._in_turn), sum(self._speculative)
        expected = expected_speedup(alpha, f_seconds, g_seconds)
        print(f"f {f_seconds * 1e3:.1f} ms, g {g_seconds * 1e3:.1f} ms, {len(self._kept)} calls")
        print(f"f, then g    {in_turn:.2f} s")
        print(f"speculative  {speculative:.2f} s, {np.mean(self._kept):.0%} of the guesses kept")
        print(f"speed-up     {in_turn / speculative:.2f}x")
        print(f"             {expected:.2f}x where f and g never wait for each other,")
        print(f"             from alpha = {alpha:.3f} = E[sum of min(p, q)]")


def show_distribution(
    p: Distribution, q: Distribution, call: Speculation[Any, Any], seed: int
) -> None:
    """Print how often each y was chosen, beside the distribution that f gives for one input.

    f and g do not wait here.
    """
    quick = Speculation[None, int](lambda _: p, lambda y: y, lambda _: q, call.executor)
    drawn = [quick(None, Noise(seed).at(i)).choice for i in range(DRAWS)]
    print(f"\nchoice   distribution of f   chosen in {DRAWS}   the guess's distribution")
    for y in p.tokens.tolist():
        share = drawn.count(y) / DRAWS
        print(f"{y:6d}   {p.prob(y):8.3f}   {share:14.3f}   {q.prob(y):15.3f}")
    spread = max(np.sqrt(p.prob(y) * (1 - p.prob(y)) / DRAWS) for y in p.tokens.tolist())
    print(f"largest standard error of what was chosen: {spread:.3f}")
