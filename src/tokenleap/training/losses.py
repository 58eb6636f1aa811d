"""Losses between a draft's distribution q and the target's p, of which the top K tokens are known.

    kl:  KL(p || q) = sum_x p(x) (log p(x) - log q(x))
    rkl: KL(q || p) = sum_x q(x) (log q(x) - log p(x))
    jsd: (KL(p || m) + KL(q || m)) / 2 with m = (p + q) / 2
    ce:  -log q(y) of the token y that the target wrote
    tv:  1 - sum_x min(p(x), q(x)), the probability of a rejection (Leviathan et al., theorem 3.5)

p is the target's distribution at temperature 1 over those of the K tokens that are in the draft
vocabulary, normalised. A place whose K tokens are all outside it teaches nothing.

So p is 0 for all other tokens. For kl, ce and tv they have no term. In jsd each has
q(x) log 2 / 2. In rkl they would be infinite: all of them together count as one token whose p is
`REST`, which draws q back to the K tokens and does not tell which of the others are worse.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tokenleap.drafters.online import LossName

__all__ = ["LOSSES", "REST", "Loss", "LossName", "Teacher"]

REST = 1e-3
"""For rkl: p of all tokens together that the target is not known to write."""

_TINY = 1e-9
"""In place of 0 in a logarithm."""


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
        return cls(places[labels], inside, probs / total.clamp(min=_TINY))


Loss = Callable[[Tensor, Teacher], Tensor]
"""Logits [N, Vd] in float32 and what the target knows -> [N] losses; 0 where it knows nothing."""


def _log_q(logits: Tensor, tokens: Tensor) -> Tensor:
    """[N, K] log-probabilities of draft tokens; those of -1 are meaningless."""
    chosen = logits.gather(1, tokens.clamp(min=0))
    return chosen - logits.logsumexp(-1, keepdim=True)


def kl(logits: Tensor, teacher: Teacher) -> Tensor:
    """See the module."""
    p = teacher.probs
    return (p * (p.clamp(min=_TINY).log() - _log_q(logits, teacher.tokens))).sum(-1)


def _of_known(logits: Tensor, teacher: Teacher) -> tuple[Tensor, Tensor]:
    """[N, K] log q and q; where p is 0, q is 0, too."""
    log_q = _log_q(logits, teacher.tokens).masked_fill(teacher.probs == 0, 0)
    return log_q, log_q.exp() * (teacher.probs > 0)


def rkl(logits: Tensor, teacher: Teacher) -> Tensor:
    """See the module."""
    log_q, q = _of_known(logits, teacher)
    known = (q * (log_q - teacher.probs.clamp(min=_TINY).log())).sum(-1)
    rest = (1 - q.sum(-1)).clamp(min=_TINY)
    return (known + rest * (rest / REST).log()) * (teacher.probs.sum(-1) > 0)


def jsd(logits: Tensor, teacher: Teacher) -> Tensor:
    """See the module."""
    p, (log_q, q) = teacher.probs, _of_known(logits, teacher)
    log_m = ((p + q) / 2).clamp(min=_TINY).log()
    of_p = (p * (p.clamp(min=_TINY).log() - log_m)).sum(-1)
    of_q = (q * (log_q - log_m)).sum(-1) + (1 - q.sum(-1)) * math.log(2)
    return (of_p + of_q) / 2 * (p.sum(-1) > 0)


def ce(logits: Tensor, teacher: Teacher) -> Tensor:
    """See the module."""
    known = teacher.labels >= 0
    return -(_log_q(logits, teacher.labels.unsqueeze(-1)).squeeze(-1) * known)


def tv(logits: Tensor, teacher: Teacher) -> Tensor:
    """See the module."""
    q = _log_q(logits, teacher.tokens).exp()
    known = teacher.probs.sum(-1) > 0
    return (1 - torch.minimum(teacher.probs, q).sum(-1)) * known


LOSSES: dict[str, Loss] = {"kl": kl, "rkl": rkl, "jsd": jsd, "ce": ce, "tv": tv}
