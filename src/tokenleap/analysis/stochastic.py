"""Speculative execution of two functions: the first gives the distribution of the other's input.

Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (2023), section 6.
f(x) is a distribution over a finite set, y is drawn from it, and g(y) is wanted. While f(x) is
being computed, g runs on a guess y' drawn from a cheap distribution q(x). y' is kept with
probability min(1, p(y') / q(y')), where p = f(x). Otherwise y is drawn from norm(max(p - q, 0)) and
g runs again. y has exactly the distribution p, whatever q is. In a language model f and g are the
same network, but nothing here depends on that. The scripts in `examples/` use it.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Generic, TypeVar

from tokenleap.analysis import domain
from tokenleap.core.distribution import Distribution
from tokenleap.core.noise import Noise, StepNoise
from tokenleap.errors import ConfigError

__all__ = ["Result", "Speculation", "expected_speedup"]

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

    Raises:
        ConfigError: an argument is out of range.
    """
    f_seconds = domain.positive("f_seconds", f_seconds)
    g_seconds = domain.positive("g_seconds", g_seconds)
    alpha, both = domain.rate("alpha", alpha), f_seconds + g_seconds
    return both / (alpha * max(f_seconds, g_seconds) + (1 - alpha) * both)


def _checked(name: str, distribution: Distribution) -> Distribution:
    """Refuse what is not a distribution, since the result would not show it."""
    if not isinstance(distribution, Distribution):
        raise ConfigError(f"{name}: must return a Distribution, got {type(distribution).__name__}.")
    domain.distribution(name, distribution.probs.cpu().numpy())
    return distribution
