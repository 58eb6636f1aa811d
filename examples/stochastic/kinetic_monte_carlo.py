"""Speculative execution outside language models: two computations of kinetic Monte Carlo at once.

    python examples/stochastic/kinetic_monte_carlo.py
    python examples/stochastic/kinetic_monte_carlo.py --hops 30

An atom hops between the sites of a crystal.

- f computes the distribution of its next site by harmonic transition state theory (Vineyard, 1957).
  The rate to each neighbour is a prefactor from the vibrations at the saddle point, times a
  Boltzmann factor. Each prefactor takes an eigenvalue problem.
- g relaxes the new site and logs its vibrational free energy, which is another eigenvalue problem.

Usually f must end before g can begin. Here g begins at once, on a guessed site. The guess takes the
same prefactor for all neighbours, as people do when f is too expensive. It is then kept or replaced
in such a way that the walk has exactly the distribution of f.

This gains time only if f and g compute at the same time. Without a second free core, the same work
takes as long as before, and rejected guesses add to it. Also, neither may hold the interpreter's
lock while it computes: `numpy.linalg.eigvalsh` holds it, PyTorch's function releases it.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"  # one core for f, one for g

import argparse
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from comparison import Comparison, show_distribution

from tokenleap.analysis.formulas import Speculation
from tokenleap.core.distribution import Distribution
from tokenleap.core.noise import Noise

SIDE = 24  # sites along the edge of a periodic square crystal
MODES_AT_SADDLE = 180  # size of an eigenvalue problem; there are four per hop
MODES_AT_SITE = 330
THERMAL_ENERGY = 0.12
SEED = 1

ENERGIES = np.random.default_rng(SEED).normal(0.0, 0.1, SIDE * SIDE)


def neighbours(site: int) -> list[int]:
    row, column = divmod(site, SIDE)
    around = ((row + 1, column), (row - 1, column), (row, column + 1), (row, column - 1))
    return sorted(r % SIDE * SIDE + c % SIDE for r, c in around)


def log_frequencies(seed: list[int], modes: int) -> float:
    """Sum of the logarithms of the vibrational frequencies: eigenvalues of a dynamical matrix."""
    springs = np.random.default_rng(seed).normal(0.0, 0.025, (modes, modes))
    dynamical = torch.from_numpy(np.eye(modes) + (springs + springs.T) / 2)
    return float(torch.linalg.eigvalsh(dynamical).clamp(min=1e-3).log().sum() / 2)


def boltzmann(site: int) -> np.ndarray:
    """[4] log-rates to the neighbours, with the same prefactor for all."""
    climbed: np.ndarray = ENERGIES[neighbours(site)] - ENERGIES[site]
    return -climbed / (2 * THERMAL_ENERGY)


def distribution_over(sites: list[int], log_rates: np.ndarray) -> Distribution:
    rates = np.exp(log_rates - log_rates.max())
    return Distribution(torch.from_numpy(rates / rates.sum()), torch.tensor(sites))


def f(site: int) -> Distribution:
    """The distribution of the next site, with computed prefactors."""
    saddles = [log_frequencies(sorted([site, to]), MODES_AT_SADDLE) for to in neighbours(site)]
    return distribution_over(neighbours(site), boltzmann(site) - np.array(saddles))


def guess(site: int) -> Distribution:
    return distribution_over(neighbours(site), boltzmann(site))


def g(site: int) -> float:
    """Free energy of the relaxed site."""
    return float(ENERGIES[site]) + THERMAL_ENERGY * log_frequencies([site], MODES_AT_SITE)


def seconds_of(function: Callable[[int], object]) -> float:
    began = time.perf_counter()
    for site in range(10):
        function(site)
    return (time.perf_counter() - began) / 10


def main(arguments: Sequence[str] | None = None) -> None:
    """One walk."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hops", type=int, default=100)
    hops = parser.parse_args(arguments).hops
    with ThreadPoolExecutor(2) as executor:
        call = Speculation(f, g, guess, executor)
        comparison, overlaps, site = Comparison(call), [], 0
        for hop in range(hops):
            overlaps.append(f(site).overlap(guess(site)))
            site = comparison.run(site, Noise(SEED).at(hop)).choice
        comparison.show(float(np.mean(overlaps)), seconds_of(f), seconds_of(g))
        show_distribution(f(5), guess(5), call, SEED)


if __name__ == "__main__":
    main()
