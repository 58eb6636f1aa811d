"""Speculative execution outside language models: render a page before the policy has decided.

    python examples/stochastic/prefetch.py
    python examples/stochastic/prefetch.py --visitors 50

A shop shows one of four pages. A policy service (f) answers with the probabilities of the pages for
this visitor. One page is drawn, and another service (g) renders it. The probabilities are logged
with the choice, because the evaluation of experiments divides by them. So the page that is shown
must have exactly that distribution. If the most probable page were rendered in advance and shown
whenever nothing better is ready, the log would be wrong.

Here rendering starts at once, with a page drawn from last week's probabilities (q). The page is
then kept or replaced in such a way that the distribution stays exact.

Both services are stand-ins that only wait, as long as a network would. The waiting is real, and so
is the measured speed-up.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from comparison import Comparison, show_distribution

from tokenleap.analysis.formulas import Speculation
from tokenleap.core.distribution import Distribution
from tokenleap.core.noise import Noise

PAGES = 4
POLICY_SECONDS = 0.030
RENDER_SECONDS = 0.025
SEED = 1

LAST_WEEK = np.array([0.4, 0.3, 0.2, 0.1])


def policy(visitor: int) -> Distribution:
    """Last week's probabilities, changed by what this visitor likes."""
    tastes = np.random.default_rng([SEED, visitor]).normal(0.0, 0.5, PAGES)
    weights = LAST_WEEK * np.exp(tastes)
    return Distribution(torch.from_numpy(weights / weights.sum()))


def f(visitor: int) -> Distribution:
    time.sleep(POLICY_SECONDS)
    return policy(visitor)


def guess(_visitor: int) -> Distribution:
    return Distribution(torch.from_numpy(LAST_WEEK))


def g(page: int) -> str:
    time.sleep(RENDER_SECONDS)
    return f"page {page}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--visitors", type=int, default=150)
    visitors = parser.parse_args(arguments).visitors
    with ThreadPoolExecutor(2) as executor:
        call = Speculation(f, g, guess, executor)
        comparison = Comparison(call)
        for visitor in range(visitors):
            comparison.run(visitor, Noise(SEED).at(visitor))
        alpha = float(np.mean([policy(i).overlap(guess(i)) for i in range(visitors)]))
        comparison.show(alpha, POLICY_SECONDS, RENDER_SECONDS)
        show_distribution(policy(3), guess(3), call, SEED)


if __name__ == "__main__":
    main()
