"""Counter-based randomness: the target's noise at position t is a function of (seed, t) alone.

That is what makes seeded output independent of the drafter, the draft length and the batch
(invariant 7): whoever asks for position t, whenever, gets the same numbers. The generator is Philox
(Salmon et al., "Parallel random numbers: as easy as 1, 2, 3"), whose raw stream NumPy guarantees
to stay the same between versions.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Protocol

import numpy as np
import torch

from foretoken.core.distribution import Distribution

__all__ = ["Noise", "StepNoise", "Stream", "fresh_seed"]

MAX_SEED = 2**63 - 1

_LANES = 64
"""Most drafters of one ensemble; ensembles within ensembles go on counting."""


class Stream(IntEnum):
    """Independent streams of one seed."""

    TARGET = 0
    """Which token the target takes at a position."""
    ACCEPT = 1
    """Whether a drafted token is accepted."""
    DRAFT = 2
    """Which token a drafter proposes, where the rule needs that independent of the target."""


class StepNoise(Protocol):
    """What an acceptance rule may ask of chance, relative to the root of the tree.

    `depth` is that of the node below which the question arises: the token after a node of depth d
    stands d + 1 positions after the root.
    """

    def accepts(self, probability: float, depth: int, trial: int = 0) -> bool:
        """True with the given probability; `trial` tells apart several questions at one place."""
        ...

    def draw(self, distribution: Distribution, depth: int) -> int:
        """A token with the given distribution."""
        ...


@dataclass(frozen=True)
class Noise:
    """The noise of one request.

    Args:
        seed: 0 to 2**63 - 1.
        position: index of the token that follows the root, from which depths count.
        lane: tells apart drafters that draft for the same position in the same step.
        token_stream: the stream that `draw` uses. A drafter under the coupled rule draws from the
            target's own stream, so that it guesses with the target's own luck.
    """

    seed: int
    position: int = 0
    token_stream: Stream = Stream.TARGET
    lane: int = 0

    def at(self, position: int) -> Noise:
        """The same noise, with depths counted from `position`."""
        return Noise(self.seed, position, self.token_stream, self.lane)

    def drafting(self, *, coupled: bool) -> Noise:
        """The drafter's noise: the target's own stream if `coupled`, else an independent one."""
        stream = Stream.TARGET if coupled else Stream.DRAFT
        return replace(self, token_stream=stream)

    def in_lane(self, index: int) -> Noise:
        """The noise of one of several drafters at once; the target's own stream is untouched."""
        return replace(self, lane=_LANES * self.lane + index + 1)

    def derived(self, step: int) -> Noise:
        """Noise of its own for what happens inside one step, independent of all other noise."""
        return Noise(self.seed + (step + 1 << 64) + (self.lane << 112), self.position)

    def accepts(self, probability: float, depth: int, trial: int = 0) -> bool:
        """True with the given probability (see `StepNoise`)."""
        if probability >= 1:
            return True
        return bool(self._uniform(Stream.ACCEPT, depth, 1, trial)[0] < probability)

    def draw(self, distribution: Distribution, depth: int, trial: int = 0) -> int:
        """A token with the given distribution, by the Gumbel-max trick: `argmax(log p + noise)`.

        The noise belongs to the token, not to its place in the support, so two distributions that
        are nearly alike draw the same token nearly always: this is the coupling. `trial` tells
        apart independent draws at one place.
        """
        if distribution.certain is not None:
            return distribution.certain
        best = int(self._scores(distribution, depth, trial).argmax())
        return best if distribution.support is None else int(distribution.support[best])

    def draw_distinct(self, distribution: Distribution, depth: int, count: int) -> list[int]:
        """Up to `count` tokens in the order of successive draws without replacement.

        The largest of `log p + noise` are just that (Gumbel-top-k; Kool et al., "Stochastic Beams
        and Where to Find Them"), and the first is what `draw` gives.
        """
        if distribution.certain is not None:
            return [distribution.certain] if count else []
        scores = torch.from_numpy(self._scores(distribution, depth))
        best = scores.topk(min(count, len(scores))).indices.to(distribution.probs.device)
        tokens: list[int] = distribution.tokens[best].tolist()
        return tokens

    def _scores(self, distribution: Distribution, depth: int, trial: int = 0) -> np.ndarray:
        """[S] log p + noise; by NumPy, which takes a third of PyTorch's time for it."""
        scores: np.ndarray = np.log(distribution.probs.cpu().numpy()) + self._gumbel(
            distribution, depth, trial
        )
        return scores

    def _gumbel(self, distribution: Distribution, depth: int, trial: int) -> np.ndarray:
        """[S] standard Gumbel noise for the tokens of a distribution's support."""
        size = (
            len(distribution.probs)
            if distribution.support is None
            else int(distribution.support[-1]) + 1
        )
        uniform = self._uniform(self.token_stream, depth, size, trial)
        if distribution.support is not None:
            uniform = uniform[distribution.support.cpu().numpy()]
        noise: np.ndarray = -np.log(-np.log(uniform))
        return noise

    def _uniform(self, stream: Stream, depth: int, size: int, trial: int = 0) -> np.ndarray:
        """[size] numbers in (0, 1), both ends excluded so that their logarithms are finite."""
        # Acceptance and drafting must be fresh in every step, although a position may be tried in
        # several: block verification rejects a position because of what was drafted after it.
        step = 0 if stream is Stream.TARGET else self.position
        lane = self.lane if stream is Stream.DRAFT else 0
        # The lowest counter word advances within a draw; the others name the place.
        counter = [0, trial << 48 | step, self.position + depth, lane << 8 | int(stream)]
        raw = np.random.Philox(key=self.seed, counter=counter).random_raw(size)
        # 52 bits and a half: the largest number still rounds to less than 1.
        numbers: np.ndarray = ((raw >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
        return numbers


def fresh_seed() -> int:
    """A seed for a request that names none."""
    return secrets.randbelow(MAX_SEED + 1)
