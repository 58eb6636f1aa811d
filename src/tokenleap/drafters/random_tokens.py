"""`random`: tokens drawn uniformly from the vocabulary.

The baseline of Leviathan et al. Its acceptance rate is the sum over x of min(p(x), 1 / V): it is
1 / V for a one-hot p, and higher for any other p. Every useful drafter must do better than that. It
also shows that the output distribution does not depend on the quality of the drafter.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from tokenleap.control import Budget
from tokenleap.core.distribution import Distribution
from tokenleap.core.tree import Draft, chain
from tokenleap.drafters.base import Drafter
from tokenleap.request import Request

__all__ = ["RandomDrafter"]


class RandomDrafter(Drafter):
    """Chains with a uniform q, at every temperature.

    Args:
        coupled: whether to draw with the target's own noise. This raises the probability that the
            drafted token is the target's token.
    """

    def __init__(self, *, coupled: bool) -> None:
        self._coupled = coupled

    def propose(self, batch: Sequence[Request], budgets: Sequence[Budget]) -> list[Draft]:
        """Chains up to the budget's limits."""
        return [
            self._propose(request, budget) for request, budget in zip(batch, budgets, strict=True)
        ]

    def _propose(self, request: Request, budget: Budget) -> Draft:
        vocab_size = request.sampler.vocab_size
        distribution = uniform(vocab_size)
        noise = request.noise.at(len(request.token_ids)).drafting(coupled=self._coupled)
        drafted: list[int] = []
        while len(drafted) < budget.chain:
            drafted.append(noise.draw(distribution, len(drafted)))
            if budget.stops_below(1 / vocab_size, vocab_size ** -len(drafted)):
                break
        return Draft(chain([request.root, *drafted]), (distribution,) * len(drafted))


@lru_cache(maxsize=8)
def uniform(vocab_size: int) -> Distribution:
    """The distribution with probability 1 / V for each of V tokens."""
    return Distribution(torch.full((vocab_size,), 1 / vocab_size))
