"""Speculative execution outside language models: fetch before the policy has decided.

    python examples/stochastic_prefetch.py

A shop shows one of four pages. A policy service (f) answers with the probabilities of the pages for
this visitor, one is drawn, and the page is rendered by another service (g). The probabilities are
logged with the choice, because experiments are evaluated by dividing by them, so the page shown
must have exactly that law: "render the likeliest one in advance and show it if there is nothing
better" would spoil the log. Here rendering starts at once on a page drawn from last week's
probabilities (q), and is kept or replaced so that the law stays exact.

Both services are stand-ins that wait as long as a network would; the waiting is real, and so is
the measured speed-up.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from foretoken.analysis.measure import overlap
from foretoken.law import Law
from foretoken.noise import Noise
from foretoken.stochastic import Speculation, expected_speedup

PAGES = 4
POLICY_SECONDS = 0.030
RENDER_SECONDS = 0.025
VISITORS = 150
DRAWS = 4000
SEED = 1

LAST_WEEK = np.array([0.4, 0.3, 0.2, 0.1])


def policy(visitor: int) -> Law:
    """Last week's probabilities, turned towards what this visitor likes."""
    tastes = np.random.default_rng([SEED, visitor]).normal(0.0, 0.5, PAGES)
    weights = LAST_WEEK * np.exp(tastes)
    return Law(torch.from_numpy(weights / weights.sum()))


def f(visitor: int) -> Law:
    time.sleep(POLICY_SECONDS)
    return policy(visitor)


def guess(_visitor: int) -> Law:
    return Law(torch.from_numpy(LAST_WEEK))


def g(page: int) -> str:
    time.sleep(RENDER_SECONDS)
    return f"page {page}"


def show_speed(call: Speculation[int, str]) -> None:
    """Every visitor is served both ways."""
    in_turn = parallel = 0.0
    kept = []
    for visitor in range(VISITORS):
        noise = Noise(SEED).at(visitor)
        began = time.perf_counter()
        call.in_turn(visitor, noise)
        between = time.perf_counter()
        kept.append(call(visitor, noise).accepted)
        in_turn, parallel = in_turn + between - began, parallel + time.perf_counter() - between
    alpha = float(np.mean([overlap(policy(i), guess(i)) for i in range(VISITORS)]))
    expected = expected_speedup(alpha, POLICY_SECONDS, RENDER_SECONDS)
    print(
        f"{VISITORS} visitors, policy {POLICY_SECONDS * 1e3:.0f} ms, "
        f"page {RENDER_SECONDS * 1e3:.0f} ms"
    )
    print(f"f, then g    {in_turn:.2f} s")
    print(f"speculative  {parallel:.2f} s, {np.mean(kept):.0%} of the guesses kept")
    print(f"speed-up     {in_turn / parallel:.2f}x; expected {expected:.2f}x")
    print(f"             from alpha = {alpha:.3f} = E[sum of min(p, q)]")


def show_exactness(call: Speculation[int, str]) -> None:
    """Frequencies of the page shown against the policy, for one visitor and without waiting."""
    visitor = 3
    p, q = policy(visitor), guess(visitor)
    quick = Speculation[int, int](policy, lambda page: page, guess, call.executor)
    shown = [quick(visitor, Noise(SEED).at(i)).choice for i in range(DRAWS)]
    print(f"\npage   policy   shown in {DRAWS}   last week")
    for page in range(PAGES):
        share = shown.count(page) / DRAWS
        print(f"{page:4d}   {p.prob(page):6.3f}   {share:13.3f}   {q.prob(page):9.3f}")
    error = max(np.sqrt(p.prob(page) * (1 - p.prob(page)) / DRAWS) for page in range(PAGES))
    print(f"largest standard error of what was shown: {error:.3f}")


def main() -> None:
    with ThreadPoolExecutor(2) as executor:
        call = Speculation(f, g, guess, executor)
        show_speed(call)
        show_exactness(call)


if __name__ == "__main__":
    main()
