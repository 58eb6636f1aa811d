"""Truncation of a distribution by min-p, top-k and top-p, called by `sampler.Sampler`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from tokenleap.core.distribution import Distribution
from tokenleap.core.params import SamplingParams

__all__ = ["Limits", "Truncation", "truncate", "truncated"]

_NUCLEUS_CANDIDATES = 1024
"""Number of most probable tokens that `nucleus` tries before it sorts the whole vocabulary."""


@dataclass(frozen=True)
class Truncation:
    """How a draft's q is truncated; the fields are those of `SamplingParams`."""

    min_p: float = 0.0
    top_k: int = 0
    top_p: float = 1.0


Limits: TypeAlias = SamplingParams | Truncation
"""What has min_p, top_k and top_p."""


def truncate(logits: Tensor, limits: Limits) -> Distribution:
    """The distribution after min-p, top-k and top-p, in this order, as in vLLM.

    Args:
        logits: [V] logits, already divided by the temperature.
        limits: only min_p, top_k and top_p are read.
    """
    if limits.min_p > 0:
        probs = logits.softmax(-1)
        logits = logits.masked_fill(probs < limits.min_p * probs.max(), -torch.inf)
    if 1 <= limits.top_k < len(logits):
        # Tokens that tie with the k-th stay, as in Transformers.
        logits = logits.masked_fill(logits < logits.topk(limits.top_k).values[-1], -torch.inf)
    distribution = Distribution.of(logits.softmax(-1))
    return distribution if limits.top_p == 1 else nucleus(distribution, limits.top_p)


def truncated(distribution: Distribution, top_k: int, top_p: float) -> Distribution:
    """The same for a distribution that was not made from logits.

    Args:
        distribution: what to truncate.
        top_k: see `SamplingParams`.
        top_p: see `SamplingParams`.
    """
    probs = distribution.probs
    if 1 <= top_k < len(probs):
        kept = torch.where(probs < probs.topk(top_k).values[-1], 0.0, probs)
        distribution = distribution.normalised(kept / kept.sum())
    return distribution if top_p == 1 else nucleus(distribution, top_p)


def nucleus(distribution: Distribution, top_p: float) -> Distribution:
    """The distribution on the smallest set of most probable tokens whose mass reaches `top_p`.

    Sorting a whole vocabulary takes milliseconds, and the set is usually small. The search
    therefore tries the most probable tokens first.

    Args:
        distribution: the distribution to truncate.
        top_p: the mass to reach, above 0 and at most 1.
    """
    size = len(distribution.probs)
    for count in (_NUCLEUS_CANDIDATES, size):
        probs, order = distribution.probs.topk(min(count, size))  # [k] descending
        before = probs.cumsum(-1) - probs  # [k] mass of the more probable tokens
        if count >= size or float(before[-1]) >= top_p:
            break
    keep = before < top_p
    keep[0] = True  # a very small top_p may be 0 in float32
    kept = order[keep].sort().values
    probs = distribution.probs[kept]
    return Distribution(probs / probs.sum(), distribution.tokens[kept])
