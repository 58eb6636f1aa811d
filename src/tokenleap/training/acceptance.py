"""How often a drafter's greedy drafts are right, and the mean acceptance length that follows.

The drafts of all roots are known from one pass of training. A chain of n tokens is simulated on
them as decoding would use it: it accepts the right tokens in front of the first wrong one, adds the
target's own token, and goes on from there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["Acceptance"]


class Acceptance:
    """Counts over batches.

    Args:
        num_levels: L, levels of the drafts.

    Attributes:
        totals: [4, L] counts that may be added to those of other processes: how often a level
            was reached, how often it was right then, and tokens and passes of such chains.
    """

    def __init__(self, num_levels: int) -> None:
        self.totals = torch.zeros(4, num_levels, dtype=torch.long)

    def add(self, right: Tensor, valid: Tensor) -> None:
        """Count a batch.

        Args:
            right: [B, L, Q] whether the draft's token is the target's.
            valid: [B, L, Q] whether there is a token to guess.
        """
        accepted = right.cumprod(1).bool()
        above = torch.cat([torch.ones_like(accepted[:, :1]), accepted[:, :-1]], dim=1) & valid
        self.totals[0] += above.sum((0, 2)).cpu()
        self.totals[1] += (above & accepted).sum((0, 2)).cpu()
        lengths, counts = accepted.sum(1).tolist(), valid[:, 0].sum(-1).tolist()
        for row, count in zip(lengths, counts, strict=True):
            for index in range(self.totals.shape[1]):
                self.totals[2, index] += count
                self.totals[3, index] += _passes(row[:count], index + 1)

    def by_position(self) -> list[float]:
        """[L] the probability that a level is accepted, given that the levels before were."""
        rates: list[float] = (self.totals[1] / self.totals[0].clamp(min=1)).tolist()
        return rates

    def mean_length(self, num_speculative_tokens: int) -> float:
        """Tokens per pass with chains of this length, bonus token included."""
        tokens, passes = self.totals[2:, num_speculative_tokens - 1].tolist()
        return float(tokens / max(1, passes))


def _passes(accepted: Sequence[int], length: int) -> int:
    """Passes that chains of `length` tokens need; `accepted` is how many are right at each root."""
    at = passes = 0
    while at < len(accepted):
        at += min(accepted[at], length) + 1
        passes += 1
    return passes
