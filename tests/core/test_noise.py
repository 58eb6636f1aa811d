"""Noise that is derived from a request's."""

from __future__ import annotations

import torch

from tokenleap.core.distribution import Distribution, LazyDistribution
from tokenleap.core.noise import Noise


def test_derived_noise_differs_by_every_step_it_is_derived_for() -> None:
    """In nested cascades, too: steps 3 and 5 are neither 5 and 3 nor 4 and 4."""
    noise = Noise(7)
    lanes = (noise, noise.in_lane(0), noise.in_lane(1))
    found = [each.derived(step) for each in lanes for step in range(20)]
    found += [noise.derived(outer).derived(inner) for outer in range(20) for inner in range(20)]
    seeds = {each.seed for each in found}
    assert len(seeds) == len(found) == 460
    assert max(seeds) < 2**128
    assert noise.derived(3) == noise.derived(3)


def test_a_known_draw_is_that_of_the_target_alone() -> None:
    """The other streams and further trials draw for themselves."""
    uniform = Distribution(torch.full((1000,), 1e-3))
    known, noise = LazyDistribution(lambda: uniform, draw=lambda: 3), Noise(seed=5)
    assert noise.draw(uniform, 0) != 3 == noise.draw(known, 0)
    for other, trial in ((noise, 1), (noise.drafting(coupled=False), 0)):
        assert other.draw(known, 0, trial) == other.draw(uniform, 0, trial) != 3
