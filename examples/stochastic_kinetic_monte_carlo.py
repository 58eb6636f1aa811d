"""Speculative execution outside language models: kinetic Monte Carlo, two computations at a time.

    python examples/stochastic_kinetic_monte_carlo.py

An atom hops between the sites of a crystal. Its next site is drawn from rates of harmonic
transition state theory (Vineyard, 1957): a prefactor from the vibrations at each saddle point,
which takes an eigenvalue problem per neighbour, times a Boltzmann factor. That is f. Then the new
site is relaxed and its vibrational free energy logged, another eigenvalue problem: g. Usually f
must end before g can begin. Here g begins at once on a site guessed with one prefactor for all, as
people assume when they cannot afford f, and the guess is kept or replaced so that the walk has
exactly the law of f.
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # one core for f, one for g

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from foretoken.analysis.measure import overlap
from foretoken.law import Law
from foretoken.noise import Noise
from foretoken.stochastic import Speculation, expected_speedup

SIDE = 24  # sites along the edge of a periodic square crystal
MODES_AT_SADDLE = 180  # size of an eigenvalue problem; there are four per hop
MODES_AT_SITE = 330
THERMAL_ENERGY = 0.12
STEPS = 100
DRAWS = 4000
SEED = 1

ENERGIES = np.random.default_rng(SEED).normal(0.0, 0.1, SIDE * SIDE)


def neighbours(site: int) -> list[int]:
    row, column = divmod(site, SIDE)
    around = ((row + 1, column), (row - 1, column), (row, column + 1), (row, column - 1))
    return sorted(r % SIDE * SIDE + c % SIDE for r, c in around)


def log_frequencies(seed: list[int], modes: int) -> float:
    """Sum of the logarithms of the vibrational frequencies: eigenvalues of a dynamical matrix."""
    springs = np.random.default_rng(seed).normal(0.0, 0.025, (modes, modes))
    curvature = np.linalg.eigvalsh(np.eye(modes) + (springs + springs.T) / 2)
    return float(np.log(np.maximum(curvature, 1e-3)).sum() / 2)


def boltzmann(site: int) -> np.ndarray:
    """[4] log-rates to the neighbours with one prefactor for all."""
    climbed: np.ndarray = ENERGIES[neighbours(site)] - ENERGIES[site]
    return -climbed / (2 * THERMAL_ENERGY)


def law_over(sites: list[int], log_rates: np.ndarray) -> Law:
    rates = np.exp(log_rates - log_rates.max())
    return Law(torch.from_numpy(rates / rates.sum()), torch.tensor(sites))


def f(site: int) -> Law:
    """The law of the next site, prefactors computed."""
    saddles = [log_frequencies(sorted([site, to]), MODES_AT_SADDLE) for to in neighbours(site)]
    return law_over(neighbours(site), boltzmann(site) - np.array(saddles))


def guess(site: int) -> Law:
    return law_over(neighbours(site), boltzmann(site))


def g(site: int) -> float:
    """Free energy of the relaxed site."""
    return float(ENERGIES[site]) + THERMAL_ENERGY * log_frequencies([site], MODES_AT_SITE)


def seconds_of(function: Callable[[int], object]) -> float:
    began = time.perf_counter()
    for site in range(10):
        function(site)
    return (time.perf_counter() - began) / 10


def show_speed(call: Speculation[int, float]) -> None:
    """One walk; every hop is timed both ways, so that what else the machine does falls on both."""
    site, noise = 0, Noise(SEED)
    in_turn = parallel = 0.0
    hits, overlaps = [], []
    for i in range(STEPS):
        began = time.perf_counter()
        call.in_turn(site, noise.at(i))
        between = time.perf_counter()
        result = call(site, noise.at(i))
        in_turn, parallel = in_turn + between - began, parallel + time.perf_counter() - between
        hits.append(result.accepted)
        overlaps.append(overlap(f(site), guess(site)))
        site = result.choice
    alpha, f_seconds, g_seconds = float(np.mean(overlaps)), seconds_of(f), seconds_of(g)
    expected = expected_speedup(alpha, f_seconds, g_seconds)
    print(f"f {f_seconds * 1e3:.1f} ms, g {g_seconds * 1e3:.1f} ms, {STEPS} hops")
    print(f"f, then g    {in_turn:.2f} s")
    print(f"speculative  {parallel:.2f} s, {np.mean(hits):.0%} of the guesses kept")
    print(f"speed-up     {in_turn / parallel:.2f}x; with two free cores {expected:.2f}x")
    print(f"             from alpha = {alpha:.3f} = E[sum of min(p, q)]")


def show_exactness(call: Speculation[int, float]) -> None:
    """Frequencies of the speculative choice against the law of f, at one site."""
    site = 5
    p, q = f(site), guess(site)
    quick = Speculation[int, int](lambda _: p, lambda y: y, lambda _: q, call.executor)
    drawn = [quick(site, Noise(SEED).at(i)).choice for i in range(DRAWS)]
    print(f"\nnext site   law of f   drawn in {DRAWS}   the guess's law")
    for to in neighbours(site):
        share = drawn.count(to) / DRAWS
        print(f"{to:9d}   {p.prob(to):8.3f}   {share:13.3f}   {q.prob(to):15.3f}")
    spread = max(np.sqrt(p.prob(to) * (1 - p.prob(to)) / DRAWS) for to in neighbours(site))
    print(f"largest standard error of what was drawn: {spread:.3f}")


def main() -> None:
    with ThreadPoolExecutor(2) as executor:
        call = Speculation(f, g, guess, executor)
        show_speed(call)
        show_exactness(call)


if __name__ == "__main__":
    main()
