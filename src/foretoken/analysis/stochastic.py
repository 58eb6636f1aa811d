"""Speculative execution of two functions, where one draws the other's input.

Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", section 6: if f(x)
is a distribution over a finite set, y is drawn from it and g(y) is wanted, then g can run on a
guess y' drawn from a cheap distribution q(x) while f(x) is still being computed. y' is kept with
probability min(1, p(y') / q(y')), where p = f(x); otherwise y is drawn from norm(max(p - q, 0)) and
g runs again. y has exactly the distribution p, whatever q is. Language models are the case where f
and g are the same network; nothing here knows about them.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Generic, TypeVar

from foretoken.analysis import domain
from foretoken.core.distribution import Distribution
from foretoken.core.noise import Noise, StepNoise
from foretoken.errors import ConfigError

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
        accepted: whether y is the guess, so that its g was not in vain.
    """

    choice: int
    value: Z
    guess: int
    accepted: bool


@dataclass(frozen=True)
class Speculation(Generic[X, Z]):
    """`z = g(y), y drawn from f(x)`, with f and g at the same time.

    Args:
        f: the distribution of g's input, over 0, 1, ...; slow.
        g: what is wanted of the input; slow. It also runs on guesses that are thrown away, so it
            must not change anything that others see.
        guess: q, a cheap distribution near f(x). The nearer, the faster; any is exact.
        executor: runs g on the guess, while f runs in the calling thread. Threads serve functions
            that wait or compute outside the interpreter lock; a process pool serves the others. A
            g that was in vain occupies its worker to its end, so that a pool of one may keep the
            next guess waiting; two suffice where g takes no longer than f.
    """

    f: Callable[[X], Distribution]
    g: Callable[[int], Z]
    guess: Callable[[X], Distribution]
    executor: Executor

    def __call__(self, x: X, noise: Noise) -> Result[Z]:
        """Draw y from f(x) and return it with g(y).

        Args:
            x: the input of f.
            noise: chance. Calls of one seed need different positions: `noise.at(i)`.

        Raises:
            ConfigError: f or guess did not return probabilities.
            Exception: whatever f raises, and what g raises for the y drawn; not what it raises
                for a guess that is turned down.
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
        """The same distribution without speculation, f first: the baseline."""
        choice = noise.draw(_checked("f", self.f(x)), 0)
        return choice, self.g(choice)

    def _value(self, choice: int, accepted: bool, ahead: Future[Z]) -> Z:
        if accepted:
            return ahead.result()
        ahead.cancel()  # a call that has begun runs to its end, unheard
        return self.g(choice)


def decide(p: Distribution, q: Distribution, guessed: int, noise: StepNoise) -> tuple[int, bool]:
    """Keep the guess or draw anew, so that the choice is distributed as p (algorithm 1).

    Args:
        p: the distribution wanted.
        q: the distribution that `guessed` was drawn from.
        guessed: y'.
        noise: chance, independent of the draw of `guessed`.

    Returns:
        y, and whether it is the accepted guess.
    """
    if noise.accepts(p.prob(guessed) / q.prob(guessed), 0):
        return guessed, True
    return noise.draw(p.residual(q), 0), False


def expected_speedup(alpha: float, f_seconds: float, g_seconds: float) -> float:
    """Time of f and then g over the expected time of a speculative call.

        (f + g) / (alpha max(f, g) + (1 - alpha) (f + g))

    An accepted guess takes as long as the slower of the two; a rejected one costs nothing, since g
    begins again when f ends, as it would have without a guess.

    Args:
        alpha: E[sum of min(p, q)], in [0, 1].
        f_seconds: how long f takes, above 0.
        g_seconds: the same of g.

    Raises:
        ConfigError: an argument is out of range.
    """
    f_seconds = domain.positive("f_seconds", f_seconds)
    g_seconds = domain.positive("g_seconds", g_seconds)
    alpha, both = domain.rate("alpha", alpha), f_seconds + g_seconds
    return both / (alpha * max(f_seconds, g_seconds) + (1 - alpha) * both)


def _checked(name: str, distribution: Distribution) -> Distribution:
    """Refuse what is not a distribution: the mathematics would hide it."""
    if not isinstance(distribution, Distribution):
        raise ConfigError(f"{name}: must return a Distribution, got {type(distribution).__name__}.")
    domain.distribution(name, distribution.probs.cpu().numpy())
    return distribution
