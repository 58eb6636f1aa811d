"""Appendix A.2 of Leviathan et al. (2023): rejection sampling without iteration is never better."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tokenleap import ConfigError
from tokenleap import analysis as theory

ALARM = 1e-9
"""Bounds the chance that a right formula fails (Hoeffding, as in `test_analysis.py`)."""
STEPS = 40_000


def distributions(size: int = 6) -> st.SearchStrategy[np.ndarray]:
    """Random distributions over `size` tokens, with zeros."""
    weights = arrays(np.float64, size, elements=st.one_of(st.just(0.0), st.floats(1e-3, 1)))
    return weights.filter(lambda w: bool(w.sum() > 0)).map(lambda w: np.asarray(w / w.sum()))


def sampled(p: np.ndarray, q: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """[STEPS] whether the draw from q was accepted, and [STEPS] the tokens that came out."""
    dice = np.random.default_rng(seed)
    most = (p[p > 0] / q[p > 0]).max()  # M
    drawn = dice.choice(len(q), size=STEPS, p=q)
    accepted = dice.random(STEPS) < p[drawn] / (most * q[drawn])
    return accepted, np.where(accepted, drawn, dice.choice(len(p), size=STEPS, p=p))


@given(distributions(), distributions())
def test_it_never_exceeds_speculative_sampling(p: np.ndarray, q: np.ndarray) -> None:
    found = theory.rejection_sampling_probability(p, q)
    assert 0 <= found <= theory.acceptance_probability(p, q) + 1e-12


@given(distributions(), distributions())
def test_it_is_the_sum_over_the_draws(p: np.ndarray, q: np.ndarray) -> None:
    """E over x from q of p(x) / (M q(x)), term by term; no draw passes where M is infinite."""
    with np.errstate(divide="ignore"):
        most = (p[p > 0] / q[p > 0]).max()
    passes = sum(qx * px / (most * qx) for px, qx in zip(p, q, strict=True) if qx > 0)
    assert theory.rejection_sampling_probability(p, q) == pytest.approx(passes, abs=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_it_is_lossless_and_accepts_as_predicted(seed: int) -> None:
    dice = np.random.default_rng(seed)
    p, q = dice.dirichlet([2.0] * 6), dice.dirichlet([2.0] * 6)
    accepted, tokens = sampled(p, q, seed)
    bound = math.sqrt(math.log(2 / ALARM) / (2 * STEPS))
    assert accepted.mean() == pytest.approx(theory.rejection_sampling_probability(p, q), abs=bound)
    assert np.abs(np.bincount(tokens, minlength=6) / STEPS - p).max() < bound


@pytest.mark.parametrize(
    ("p", "q"),
    [
        ([0.2, 0.8, 0.0], [0.2, 0.8, 0.0]),
        ([0.0, 1.0, 0.0], [0.3, 0.3, 0.4]),  # greedy: p is one-hot
        ([0.5, 0.5, 0.0], [0.2, 0.2, 0.6]),  # q is proportional to p where p is
    ],
)
def test_both_are_equal_where_q_is_proportional_to_p(p: list[float], q: list[float]) -> None:
    found = theory.rejection_sampling_probability(p, q)
    assert found == pytest.approx(theory.acceptance_probability(p, q))
    assert found > 0


def test_a_token_that_q_never_draws_rules_everything_out() -> None:
    assert theory.rejection_sampling_probability([0.1, 0.9], [0.0, 1.0]) == 0
    assert theory.acceptance_probability([0.1, 0.9], [0.0, 1.0]) == 0.9


def test_what_is_no_pair_of_distributions_is_refused() -> None:
    with pytest.raises(ConfigError, match="p and q: must have one shape"):
        theory.rejection_sampling_probability([1], [0.5, 0.5])
