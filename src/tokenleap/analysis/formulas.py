"""Expected tokens, wall-time, operations and the best draft length, from alpha, gamma and c.

The formulas are those of Leviathan et al. (2023) unless another paper is named. They assume that
every drafted token is accepted with probability alpha, independently (i.i.d. betas). A draft step
costs c target passes. A target pass costs the same for one position as for gamma + 1, except in the
`_on_curve` functions, which take a measured curve. `tokenleap plan` and `tokenleap.tuning` call
them. An argument out of its range raises a `ConfigError` that names it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tokenleap.errors import ConfigError

if TYPE_CHECKING:
    from tokenleap.core.distribution import Distribution
    from tokenleap.core.noise import Noise, StepNoise

MAX_GAMMA = 256
"""Longest draft that is considered: the maximum of `SpeculativeConfig`."""


def expected_tokens(alpha: float, gamma: int) -> float:
    """Expected tokens per step, correction or bonus token included: equation 1.

        E = (1 - alpha^(gamma+1)) / (1 - alpha) = 1 + alpha + ... + alpha^gamma

    This is the mean of a geometric variable with success probability 1 - alpha, capped at gamma +
    1. The code computes the sum, which is exact at alpha = 1, too, and loses no digits near it.

    Args:
        alpha: acceptance rate, in [0, 1].
        gamma: drafted tokens per step, 0 or more.
    """
    alpha, gamma = _checked_rate("alpha", alpha), checked_count("gamma", gamma)
    return float(_powers(alpha, gamma).sum())


def accepted_distribution(alpha: float, gamma: int) -> NDArray[np.float64]:
    """Distribution of the number of accepted tokens: the capped geometric one of equation 1.

    Args:
        alpha: acceptance rate, in [0, 1].
        gamma: drafted tokens per step, 0 or more.

    Returns:
        [gamma+1] probabilities of n = 0 to gamma accepted tokens: alpha^n (1 - alpha) for
        n < gamma, and alpha^gamma for n = gamma.
    """
    alpha, gamma = _checked_rate("alpha", alpha), checked_count("gamma", gamma)
    at_least = _powers(alpha, gamma)  # [gamma+1] probability of n or more
    more = np.append(at_least[1:], 0.0)
    distribution: NDArray[np.float64] = at_least - more
    return distribution


def improvement(alpha: float, gamma: int, c: float) -> float:
    """Expected factor by which the wall-time shrinks: theorem 3.8.

        (1 - alpha^(gamma+1)) / ((1 - alpha) (gamma c + 1))

    Args:
        alpha: acceptance rate, in [0, 1].
        gamma: drafted tokens per step, 0 or more.
        c: time of one draft step over time of one target pass (definition 3.7).
    """
    return expected_tokens(alpha, gamma) / (gamma * checked_cost("c", c) + 1)


def pays(alpha: float, c: float) -> bool:
    """Whether any draft length is faster than none: corollary 3.9, alpha > c.

    The condition is also necessary: for alpha <= c every term alpha^i of equation 1 with i > 0 is
    at most c, so the improvement is at most (1 + gamma c) / (1 + gamma c).

    Args:
        alpha: acceptance rate, in [0, 1].
        c: time of one draft step over time of one target pass.
    """
    return _checked_rate("alpha", alpha) > checked_cost("c", c)


def guaranteed_improvement(alpha: float, c: float) -> float:
    """A lower bound on the best improvement, if drafting pays: corollary 3.9.

        (1 + alpha) / (1 + c), the improvement of gamma = 1

    Args:
        alpha: acceptance rate, in [0, 1], above c.
        c: time of one draft step over time of one target pass.

    Raises:
        ConfigError: an argument is out of range, or alpha is not above c.
    """
    if not pays(alpha, c):
        raise ConfigError(f"alpha: must be above c ({c}) for drafting to pay, got {alpha}.")
    return (1 + alpha) / (1 + c)


def operations(alpha: float, gamma: int, c_hat: float) -> float:
    """Expected factor by which the arithmetic operations grow: theorem 3.11.

        (1 - alpha) (gamma c_hat + gamma + 1) / (1 - alpha^(gamma+1))

    Args:
        alpha: acceptance rate, in [0, 1].
        gamma: drafted tokens per step, 0 or more.
        c_hat: operations per token of the drafter over those of the target (definition 3.10).
    """
    tokens = expected_tokens(alpha, gamma)
    return (gamma * checked_cost("c_hat", c_hat) + gamma + 1) / tokens


def memory_reduction(alpha: float, gamma: int) -> float:
    """Expected factor by which reads of the target's weights and KV cache shrink: section 3.4.

    A pass reads them once, however many tokens it verifies, so the factor is equation 1. The
    drafter's own reads are not counted.

    Args:
        alpha: acceptance rate, in [0, 1].
        gamma: drafted tokens per step, 0 or more.
    """
    return expected_tokens(alpha, gamma)


def best_gamma(alpha: float, c: float, max_gamma: int = MAX_GAMMA) -> int:
    """The whole draft length with the largest improvement: section 3.5.

    Args:
        alpha: acceptance rate, in [0, 1].
        c: time of one draft step over time of one target pass.
        max_gamma: longest draft to consider. With c = 0 and alpha > 0, or alpha = 1 and c < 1, a
            longer draft is always better, so this is the answer.

    Returns:
        The smallest gamma of 0 to `max_gamma` that reaches the maximum; 0 if drafting does not pay.
    """
    return best_gamma_on_curve(
        alpha, c, np.ones(checked_count("max_gamma", max_gamma) + 1).tolist()
    )


def improvement_on_curve(alpha: float, gamma: int, c: float, verify_cost: Sequence[float]) -> float:
    """Theorem 3.8 for passes whose cost grows with the tokens they verify.

        (1 - alpha^(gamma+1)) / ((1 - alpha) (gamma c + v(gamma)))

    Drafting costs gamma c and verifying gamma + 1 positions costs v(gamma), in plain passes:
    v(0) = 1. With v = 1 everywhere this is theorem 3.8.

    Args:
        alpha: acceptance rate, in [0, 1].
        gamma: drafted tokens per step, within the curve.
        c: time of one draft step over time of one plain target pass.
        verify_cost: [G+1] v(0) to v(G): time of a pass over n drafted tokens (n + 1 positions),
            over time of a plain pass.
    """
    curve = _checked_curve("verify_cost", verify_cost)
    if checked_count("gamma", gamma) >= len(curve):
        raise ConfigError(f"gamma: the curve ends at {len(curve) - 1}, got {gamma}.")
    cost = gamma * checked_cost("c", c) + float(curve[gamma])
    return expected_tokens(alpha, gamma) / cost


def best_gamma_on_curve(alpha: float, c: float, verify_cost: Sequence[float]) -> int:
    """The whole draft length with the largest `improvement_on_curve`: section 3.5 on a curve.

    Args:
        alpha: acceptance rate, in [0, 1].
        c: time of one draft step over time of one plain target pass.
        verify_cost: [G+1] as in `improvement_on_curve`.

    Returns:
        The smallest gamma of 0 to G that reaches the maximum.
    """
    alpha, c = _checked_rate("alpha", alpha), checked_cost("c", c)
    curve = _checked_curve("verify_cost", verify_cost)
    longest = len(curve) - 1
    tokens = _powers(alpha, longest).cumsum()  # [G+1] equation 1 for every gamma
    return int((tokens / (np.arange(longest + 1) * c + curve)).argmax())


def oracle_improvement(alpha: float, c: float) -> float:
    """Improvement if an oracle tells before each step how many drafts pass: section 3.5.

    The step then drafts exactly these K tokens, and all are accepted. K is the geometric variable
    without a cap: P(K = n) = alpha^n (1 - alpha), E[K] = alpha / (1 - alpha). A step yields K + 1
    tokens and costs K c + 1. Over many steps the speed is the ratio of the means (renewal-reward):

        (E[K] + 1) / (E[K] c + 1) = 1 / (1 - alpha + alpha c)

    The paper has the numerator 1 / (1 - alpha) and reports up to 60 % over the best fixed gamma.

    Args:
        alpha: acceptance rate, in [0, 1].
        c: time of one draft step over time of one target pass.

    Returns:
        The bound; infinite for alpha = 1 and c = 0. It is below 1 for alpha > 0 and c > 1, since
        this oracle drafts all K tokens even if drafting costs more than the target.
    """
    alpha, c = _checked_rate("alpha", alpha), checked_cost("c", c)
    cost = 1 - alpha + alpha * c
    return 1 / cost if cost > 0 else math.inf


def specdec_latency(
    length: int, tokens_per_step: float, draft_seconds: float, verify_seconds: float
) -> float:
    """Latency of draft-then-verify: Xia et al., "Speculative Decoding" (2023), equation 4.

        T = L / Tok * t_d + L / Tok * t_v

    Args:
        length: L, tokens to generate, 0 or more.
        tokens_per_step: Tok, mean tokens per step, at least 1.
        draft_seconds: t_d, time of drafting in a step.
        verify_seconds: t_v, time of verification in a step.

    Returns:
        Seconds.
    """
    if _checked_positive("tokens_per_step", tokens_per_step) < 1:
        raise ConfigError(f"tokens_per_step: must be at least 1, got {tokens_per_step}.")
    steps = checked_count("length", length) / tokens_per_step
    draft = checked_cost("draft_seconds", draft_seconds)
    return steps * draft + steps * checked_cost("verify_seconds", verify_seconds)


def _powers(alpha: float, gamma: int) -> NDArray[np.float64]:
    """[gamma+1] alpha^0 to alpha^gamma."""
    return np.power(alpha, np.arange(gamma + 1, dtype=np.float64))


# The acceptance rate from the two distributions, by Leviathan et al. (2023).
#
# It has definitions 3.1 and 3.2, theorem 3.5, corollary 3.6 and appendices A.2 and A.5. p is the
# target's distribution and q the drafter's, as dense arrays [V]. Decoding keeps distributions on
# their support only; `Distribution.overlap` is for those. The package exports these functions.


def lk_divergence(p: ArrayLike, q: ArrayLike) -> float:
    """D_LK(p, q) = sum over x of |p - M| with M = (p + q) / 2: definition 3.2.

    By lemma 3.3 it equals 1 - sum of min(p, q). It is symmetric, 0 for equal distributions and 1
    for disjoint ones: the total variation distance.

    Args:
        p: [V] the target's probabilities.
        q: [V] the drafter's.
    """
    p, q = _pair(p, q)
    return float(np.abs(p - (p + q) / 2).sum())


def acceptance_probability(p: ArrayLike, q: ArrayLike) -> float:
    """Beta: the probability that a token drawn from q is accepted.

    Definition 3.1; by theorem 3.5 it is 1 - D_LK(p, q) = sum over x of min(p(x), q(x)).

    Args:
        p: [V] the target's probabilities.
        q: [V] the drafter's.
    """
    p, q = _pair(p, q)
    return float(np.minimum(p, q).sum())


def acceptance_rate(p: ArrayLike, q: ArrayLike) -> float:
    """Alpha = E[beta] = E[sum of min(p, q)], over positions: corollary 3.6.

    Args:
        p: [N, V] the target's probabilities at N positions of a text drawn from the target.
        q: [N, V] the drafter's.
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
    if _checked_positive("lenience", lenience) > 1:
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
    """
    p, q = _pair(p, q)
    possible = p > 0
    return min(1.0, float((q[possible] / p[possible]).min()))


def _pair(
    p: ArrayLike, q: ArrayLike, dimensions: int = 1
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    p, q = _checked_distribution("p", p), _checked_distribution("q", q)
    if p.shape != q.shape:
        raise ConfigError(f"p and q: must have one shape, got {p.shape} and {q.shape}.")
    if p.ndim != dimensions:
        raise ConfigError(f"p and q: must have {dimensions} dimension(s), got {p.ndim}.")
    return p, q


X = TypeVar("X")
Z = TypeVar("Z")


@dataclass(frozen=True)
class Result(Generic[Z]):
    """One call.

    Args:
        choice: y, with the distribution f(x).
        value: g(y).
        guess: y', on which g ran while f did.
        accepted: whether y is the guess, so that g did not have to run again.
    """

    choice: int
    value: Z
    guess: int
    accepted: bool


@dataclass(frozen=True)
class Speculation(Generic[X, Z]):
    """Computes `g(y), y drawn from f(x)`, with f and g running at the same time.

    Args:
        f: the slow function that gives the distribution of g's input, over 0, 1, ...
        g: the slow function of that input. It also runs on rejected guesses, so it must not have
            side effects.
        guess: q, a cheap distribution near f(x). The nearer it is, the faster; any q is exact.
        executor: runs g on the guess while f runs in the calling thread. Use threads for functions
            that wait or release the interpreter lock, and processes for others. A g on a rejected
            guess occupies its worker until it ends, which may delay the next guess in a pool of
            one. Two workers suffice if g takes no longer than f.
    """

    f: Callable[[X], Distribution]
    g: Callable[[int], Z]
    guess: Callable[[X], Distribution]
    executor: Executor

    def __call__(self, x: X, noise: Noise) -> Result[Z]:
        """Draw y from f(x) and return it with g(y).

        Args:
            x: the input of f.
            noise: the randomness. Calls of one seed need different positions: `noise.at(i)`.

        Raises:
            ConfigError: f or guess did not return probabilities.
            Exception: whatever f raises, and what g raises for y; not what g raises for a rejected
                guess.
        """
        q = _checked("guess", self.guess(x))
        guessed = noise.drafting(coupled=False).draw(q, 0)
        ahead = self.executor.submit(self.g, guessed)
        try:
            p = _checked("f", self.f(x))
        except BaseException:
            ahead.cancel()
            raise
        choice, accepted = decide(p, q, guessed, noise)
        return Result(choice, self._value(choice, accepted, ahead), guessed, accepted)

    def in_turn(self, x: X, noise: Noise) -> tuple[int, Z]:
        """The same distribution without speculation, the baseline: f, then g."""
        choice = noise.draw(_checked("f", self.f(x)), 0)
        return choice, self.g(choice)

    def _value(self, choice: int, accepted: bool, ahead: Future[Z]) -> Z:
        if accepted:
            return ahead.result()
        ahead.cancel()  # a call that has begun runs to its end; its result is dropped
        return self.g(choice)


def decide(p: Distribution, q: Distribution, guessed: int, noise: StepNoise) -> tuple[int, bool]:
    """Accept the guess or draw from the residual distribution: algorithm 1.

    Args:
        p: the distribution wanted.
        q: the distribution that `guessed` was drawn from.
        guessed: y'.
        noise: the randomness, independent of the draw of `guessed`.

    Returns:
        y, which has the distribution p, and whether it is the accepted guess.
    """
    if noise.accepts(p.prob(guessed) / q.prob(guessed), 0):
        return guessed, True
    return noise.draw(p.residual(q), 0), False


def expected_speedup(alpha: float, f_seconds: float, g_seconds: float) -> float:
    """Expected speed-up of a speculative call over calling f and then g.

        (f + g) / (alpha max(f, g) + (1 - alpha) (f + g))

    This follows from the scheme of section 6. A call with an accepted guess takes as long as the
    slower function. A call with a rejected one takes as long as without speculation, since g starts
    again when f ends.

    Args:
        alpha: E[sum of min(p, q)], in [0, 1].
        f_seconds: how long f takes, above 0.
        g_seconds: how long g takes, above 0.
    """
    f_seconds = _checked_positive("f_seconds", f_seconds)
    g_seconds = _checked_positive("g_seconds", g_seconds)
    alpha, both = _checked_rate("alpha", alpha), f_seconds + g_seconds
    return both / (alpha * max(f_seconds, g_seconds) + (1 - alpha) * both)


def _checked(name: str, distribution: Distribution) -> Distribution:
    """Refuse what is not a distribution, since the result would not show it."""
    from tokenleap.core.distribution import Distribution  # PyTorch takes seconds to import

    if not isinstance(distribution, Distribution):
        raise ConfigError(f"{name}: must return a Distribution, got {type(distribution).__name__}.")
    _checked_distribution(name, distribution.probs.cpu().numpy())
    return distribution


# Checks of arguments: a `ConfigError` names the argument and its range.

SUM_TOLERANCE = 1e-4
"""How far a sum of probabilities may be from 1: float32 rounding over a large vocabulary."""


def _checked_rate(name: str, value: float) -> float:
    """A probability: a number in [0, 1]."""
    if not 0 <= value <= 1:  # also refuses NaN
        raise ConfigError(f"{name}: must be between 0 and 1, got {value}.")
    return float(value)


def checked_cost(name: str, value: float) -> float:
    """A cost ratio: a finite number, 0 or more."""
    if not 0 <= value < math.inf:
        raise ConfigError(f"{name}: must be a finite number of at least 0, got {value}.")
    return float(value)


def _checked_positive(name: str, value: float) -> float:
    """A finite number above 0."""
    if not 0 < value < math.inf:
        raise ConfigError(f"{name}: must be a finite number above 0, got {value}.")
    return float(value)


def checked_count(name: str, value: int, least: int = 0) -> int:
    """A whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise ConfigError(f"{name}: must be a whole number of at least {least}, got {value!r}.")
    return int(value)


def _checked_curve(name: str, values: Sequence[float]) -> NDArray[np.float64]:
    """Costs of verification by draft length, [G+1] with G >= 0, all finite and above 0."""
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or not len(array) or not np.all((array > 0) & np.isfinite(array)):
        raise ConfigError(f"{name}: must be a list of finite numbers above 0, got {values!r}.")
    return array


def _checked_distribution(name: str, values: ArrayLike) -> NDArray[np.float64]:
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
