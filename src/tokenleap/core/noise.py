"""Counter-based randomness: the target's noise at position t is a function of (seed, t) alone.

Seeded output therefore does not depend on the drafter, the draft length or the batch (invariant 7):
position t gets the same numbers in whatever step it is computed. Acceptance rules and drafters draw
all their random numbers here. The generator is Philox (Salmon et al., "Parallel random numbers: as
easy as 1, 2, 3"). NumPy guarantees that its raw stream stays the same between versions.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from hashlib import blake2b
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from tokenleap.core.distribution import Distribution
from tokenleap.core.params import MAX_SEED, SamplingParams

_LANES = 64
"""Most drafters of one ensemble. Each level of nesting multiplies the lane number by this."""
_KEY_BYTES = 16
"""Of Philox' key."""


class Stream(IntEnum):
    """Independent random streams of one seed."""

    TARGET = 0
    """Draws the target's token at a position."""
    ACCEPT = 1
    """Decides whether a drafted token is accepted."""
    DRAFT = 2
    """Draws a drafter's tokens, under rules that need them independent of the target's."""


class StepNoise(Protocol):
    """The random decisions of an acceptance rule in one step.

    `depth` is the depth of the node whose successor is decided. The successor of a node of depth d
    stands d + 1 positions after the root.
    """

    def accepts(self, probability: float, depth: int, trial: int = 0) -> bool:
        """True with this probability; `trial` numbers the independent decisions at one node."""
        ...

    def draw(self, distribution: Distribution, depth: int) -> int:
        """Draw a token from this distribution."""
        ...


class LogitsDraw(NamedTuple):
    """A draw from logits [V], after all that changes them but temperature and truncation."""

    logits: Tensor
    noise: Noise
    params: SamplingParams


class FasterDraws(Protocol):
    """Finds what `Noise.draw` draws; None where that is not certain."""

    @staticmethod
    def reads(values: Tensor) -> bool:
        """Whether it can read probabilities or logits of this kind."""
        ...

    def from_probs(
        self, noise: Noise, distribution: Distribution, depth: int, trial: int
    ) -> int | None:
        """An index of the support."""
        ...

    def from_logits(self, draws: Sequence[LogitsDraw]) -> Sequence[int | None]:
        """The tokens at depth 0, all in one call."""
        ...


_faster: FasterDraws | None = None


def draw_by(faster: FasterDraws) -> None:
    """Let this process draw by `faster` where it is certain of the same token."""
    global _faster
    _faster = faster


def draws_from_logits(logits: Tensor) -> bool:
    """Whether `drawn_from_logits` may know what is drawn from logits of this kind."""
    return _faster is not None and _faster.reads(logits)


def drawn_from_logits(draws: Sequence[LogitsDraw]) -> Sequence[int | None]:
    """See `FasterDraws`."""
    return _faster.from_logits(draws) if _faster is not None and draws else [None] * len(draws)


@dataclass(frozen=True)
class Noise:
    """The noise of one request.

    Args:
        seed: 0 to 2**63 - 1, or the 128 bits of derived noise.
        position: index, in the sequence, of the token that follows the root. Depth 0 means this
            position.
        token_stream: the stream that `draw` uses. Under the coupled rule a drafter draws from the
            target's own stream, so that it tends to draw the token the target will draw.
        lane: number of the drafter, if several draft for the same position in the same step.
        ahead: tokens before `position` that were drafted in this step, so that it began there.
    """

    seed: int
    position: int = 0
    token_stream: Stream = Stream.TARGET
    lane: int = 0
    ahead: int = 0

    def at(self, position: int) -> Noise:
        """The same noise with depths counted from `position` (a sequence index)."""
        return Noise(self.seed, position, self.token_stream, self.lane, self.ahead)

    def drafting(self, *, coupled: bool) -> Noise:
        """The noise of a drafter: the target's stream if `coupled`, else an independent one."""
        stream = Stream.TARGET if coupled else Stream.DRAFT
        return Noise(self.seed, self.position, stream, self.lane, self.ahead)

    def in_lane(self, index: int) -> Noise:
        """The noise of drafter `index` of several; the target's stream does not change."""
        return replace(self, lane=_LANES * self.lane + index + 1)

    def derived(self, step: int) -> Noise:
        """Noise for decisions inside one step, independent of all other noise.

        A cascade uses it for the steps of its middle model.

        Args:
            step: identifies the step; the position of its root will do.
        """
        # A hash, because noise is derived from derived noise where cascades are nested.
        given = f"{self.seed} {step} {self.lane}".encode()
        seed = int.from_bytes(blake2b(given, digest_size=_KEY_BYTES).digest())
        return Noise(seed, self.position)

    def accepts(self, probability: float, depth: int, trial: int = 0) -> bool:
        """True with this probability; arguments as in `StepNoise.accepts`."""
        if probability >= 1:
            return True
        return bool(self._uniform(Stream.ACCEPT, depth, 1, trial)[0] < probability)

    def draw(self, distribution: Distribution, depth: int, trial: int = 0) -> int:
        """Draw a token by the Gumbel-max trick: `argmax(log p + noise)`.

        The noise belongs to the token id, not to its index in the support. Two similar
        distributions therefore nearly always draw the same token. This is the coupling of p and q.

        Args:
            distribution: the distribution to draw from.
            depth: depth of the node whose successor is drawn.
            trial: number of the draw, for several independent draws at one node.
        """
        if distribution.drawn is not None and self.token_stream is Stream.TARGET and not trial:
            return distribution.drawn
        if distribution.certain is not None:
            return distribution.certain
        best = None
        if _faster is not None:
            best = _faster.from_probs(self, distribution, depth, trial)
        if best is None:
            best = int(self.scores(distribution, depth, trial).argmax())
        return best if distribution.support is None else int(distribution.support[best])

    def uniform_token(self, vocab_size: int, depth: int) -> int:
        """Draw from the uniform distribution, with one number instead of one per token."""
        return int(self._uniform(self.token_stream, depth, 1)[0] * vocab_size)

    def draw_distinct(self, distribution: Distribution, depth: int, count: int) -> list[int]:
        """Draw up to `count` tokens without replacement, in the order of the draws.

        They are the tokens with the largest `log p + noise` (Gumbel-top-k; Kool et al., "Stochastic
        Beams and Where to Find Them"). The first is the token that `draw` returns.

        Args:
            distribution: the distribution to draw from.
            depth: depth of the node whose successors are drawn.
            count: most tokens; a smaller support gives fewer.
        """
        if distribution.certain is not None:
            return [distribution.certain] if count else []
        scores = torch.from_numpy(self.scores(distribution, depth))
        best = scores.topk(min(count, len(scores))).indices.to(distribution.probs.device)
        tokens: list[int] = distribution.tokens[best].tolist()
        return tokens

    def scores(self, distribution: Distribution, depth: int, trial: int = 0) -> np.ndarray:
        """[S] log p + noise of the support: the largest is drawn; arguments as in `draw`."""
        # NumPy needs a third of PyTorch's time for it.
        scores: np.ndarray = np.log(distribution.probs.cpu().numpy()) + self._gumbel(
            distribution, depth, trial
        )
        return scores

    def _gumbel(self, distribution: Distribution, depth: int, trial: int) -> np.ndarray:
        """[S] standard Gumbel noise for the tokens of the support."""
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

    def counter(self, stream: Stream, depth: int, trial: int = 0) -> list[int]:
        """[4] the words of Philox' counter that a draw begins with; its key is the seed."""
        # Several steps may draft the same position: block verification may reject a position
        # because of the tokens drafted after it. Each step needs new noise for acceptance and
        # drafting, so their counter includes the step.
        step = 0 if stream is Stream.TARGET else self.position - self.ahead
        lane = self.lane if stream is Stream.DRAFT else 0
        # The lowest word advances within a draw; the other words identify the draw.
        return [0, trial << 48 | step, self.position + depth, lane << 8 | int(stream)]

    def _uniform(self, stream: Stream, depth: int, size: int, trial: int = 0) -> np.ndarray:
        """[size] numbers in the open interval (0, 1), so that their logarithms are finite."""
        counter = self.counter(stream, depth, trial)
        raw = np.random.Philox(key=self.seed, counter=counter).random_raw(size)
        # 52 random bits plus one half: the largest number is still less than 1.
        numbers: np.ndarray = ((raw >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
        return numbers


def fresh_seed() -> int:
    """A random seed for a request without one."""
    return secrets.randbelow(MAX_SEED + 1)
