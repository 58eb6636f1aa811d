"""Losses between a draft's distribution q and the target's p, of which the top K tokens are known.

    kl:  KL(p || q) = sum_x p(x) (log p(x) - log q(x))
    ce:  -log q(y) of the token y that the target wrote
    tv:  1 - sum_x min(p(x), q(x)), the probability of a rejection (Leviathan et al., theorem 3.5)

p is the target's distribution at temperature 1 over those of the K tokens that are in the draft
vocabulary, normalised. A place whose K tokens are all outside it teaches nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["LOSSES", "Loss", "Teacher"]


@dataclass(frozen=True)
class Teacher:
    """What the target knows about N places, in ids of the draft vocabulary.

    Args:
        labels: [N] the token it wrote; -1 outside the draft vocabulary.
        tokens: [N, K] its most probable tokens; -1 outside the draft vocabulary.
        probs: [N, K] p, normalised; 0 for tokens outside.
    """

    labels: Tensor
    tokens: Tensor
    probs: Tensor

    @classmethod
    def of(cls, labels: Tensor, tokens: Tensor, logprobs: Tensor, places: Tensor) -> Teacher:
        """In ids of the draft vocabulary.

        Args:
            labels: [N] ids of the target.
            tokens: [N, K] ids of the target.
            logprobs: [N, K].
            places: [V] the target's id -> id in the draft vocabulary, or -1.
        """
        inside = places[tokens]
        probs = logprobs.exp().masked_fill(inside < 0, 0)
        total = probs.sum(-1, keepdim=True)
        return cls(places[labels], inside, probs / total.clamp(min=1e-9))


Loss = Callable[[Tensor, Teacher], Tensor]
"""Logits [N, Vd] in float32 and what the target knows -> [N] losses; 0 where it knows nothing."""


def _log_q(logits: Tensor, tokens: Tensor) -> Tensor:
    """[N, K] log-probabilities of draft tokens; those of -1 are meaningless."""
    chosen = logits.gather(1, tokens.clamp(min=0))
    return chosen - logits.logsumexp(-1, keepdim=True)


def kl(logits: Tensor, teacher: Teacher) -> Tensor:
    """See the module."""
    p = teacher.probs
    return (p * (p.clamp(min=1e-9).log() - _log_q(logits, teacher.tokens))).sum(-1)


def ce(logits: Tensor, teacher: Teacher) -> Tensor:
    """See the module."""
    known = teacher.labels >= 0
    return -(_log_q(logits, teacher.labels.unsqueeze(-1)).squeeze(-1) * known)


def tv(logits: Tensor, teacher: Teacher) -> Tensor:
    """See the module."""
    q = _log_q(logits, teacher.tokens).exp()
    known = teacher.probs.sum(-1) > 0
    return (1 - torch.minimum(teacher.probs, q).sum(-1)) * known


LOSSES: dict[str, Loss] = {"kl": kl, "ce": ce, "tv": tv}
