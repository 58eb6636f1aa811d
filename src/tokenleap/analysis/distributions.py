"""The acceptance rate from the two distributions, by Leviathan et al. (2023).

It has definitions 3.1 and 3.2, theorem 3.5, corollary 3.6 and appendices A.2 and A.5. p is the
target's distribution and q the drafter's, as dense arrays [V]. Decoding keeps distributions on
their support only; `Distribution.overlap` is for those. The package exports these functions.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tokenleap.analysis import domain
from tokenleap.errors import ConfigError

__all__ = [
    "acceptance_probability",
    "acceptance_rate",
    "lenient_acceptance_probability",
    "lk_divergence",
    "rejection_sampling_probability",
]


def lk_divergence(p: ArrayLike, q: ArrayLike) -> float:
    """D_LK(p, q) = sum over x of |p - M| with M = (p + q) / 2: definition 3.2.

    By lemma 3.3 it equals 1 - sum of min(p, q). It is symmetric, 0 for equal distributions and 1
    for disjoint ones: the total variation distance.

    Args:
        p: [V] the target's probabilities.
        q: [V] the drafter's.

    Raises:
        ConfigError: p and q are not distributions of one length.
    """
    p, q = _pair(p, q)
    return float(np.abs(p - (p + q) / 2).sum())


def acceptance_probability(p: ArrayLike, q: ArrayLike) -> float:
    """Beta: the probability that a token drawn from q is accepted.

    Definition 3.1; by theorem 3.5 it is 1 - D_LK(p, q) = sum over x of min(p(x), q(x)).

    Args:
        p: [V] the target's probabilities.
        q: [V] the drafter's.

    Raises:
        ConfigError: p and q are not distributions of one length.
    """
    p, q = _pair(p, q)
    return float(np.minimum(p, q).sum())


def acceptance_rate(p: ArrayLike, q: ArrayLike) -> float:
    """Alpha = E[beta] = E[sum of min(p, q)], over positions: corollary 3.6.

    Args:
        p: [N, V] the target's probabilities at N positions of a text drawn from the target.
        q: [N, V] the drafter's.

    Raises:
        ConfigError: p and q are not distributions of one shape.
    """
    p, q = _pair(p, q, dimensions=2)
    return float(np.minimum(p, q).sum(axis=-1).mean())


def lenient_acceptance_probability(p: ArrayLike, q: ArrayLike, lenience: float) -> float:
    """Beta under lenience l, which accepts x with probability min(1, p / (l q)): appendix A.5.

        E over x from q of p / max(p, l q) = 1/l * sum over x of min(p(x), l q(x))

    No token's output probability then exceeds p(x) / l. With l = 1 this is theorem 3.5.

    Args:
        p: [V] the target's probabilities.
        q: [V] the drafter's.
        lenience: l, in (0, 1].

    Raises:
        ConfigError: p and q are not distributions of one length, or l is out of range.
    """
    p, q = _pair(p, q)
    if domain.positive("lenience", lenience) > 1:
        raise ConfigError(f"lenience: must be above 0 and at most 1, got {lenience}.")
    return float(np.minimum(p, lenience * q).sum() / lenience)


def rejection_sampling_probability(p: ArrayLike, q: ArrayLike) -> float:
    """Beta of rejection sampling without iteration: appendix A.2.

    The textbook's rejection sampling accepts x, drawn from q, with probability p(x) / (M q(x)), M =
    max over x of p(x) / q(x). If x is rejected, the token is drawn from p itself instead of trying
    again. This is lossless, too, but accepts with probability

        E over x from q of p / (M q) = 1 / M = min over x with p(x) > 0 of q(x) / p(x)

    That is never more than speculative sampling's sum of min(p, q), for it is the sum over x of
    p(x) min over x' of q(x') / p(x'), and each term is at most min(p(x), q(x)). Both are equal only
    where q is proportional to p on p's support, as it is for a greedy (one-hot) p. The rule
    `rejection` of this library is speculative sampling, not this.

    Args:
        p: [V] the target's probabilities.
        q: [V] the drafter's.

    Raises:
        ConfigError: p and q are not distributions of one length.
    """
    p, q = _pair(p, q)
    possible = p > 0
    return min(1.0, float((q[possible] / p[possible]).min()))


def _pair(
    p: ArrayLike, q: ArrayLike, dimensions: int = 1
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    p, q = domain.distribution("p", p), domain.distribution("q", q)
    if p.shape != q.shape:
        raise ConfigError(f"p and q: must have one shape, got {p.shape} and {q.shape}.")
    if p.ndim != dimensions:
        raise ConfigError(f"p and q: must have {dimensions} dimension(s), got {p.ndim}.")
    return p, q
