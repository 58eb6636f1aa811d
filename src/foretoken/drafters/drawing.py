"""How `ModelDrafter` chooses the children of one node: the most probable tokens, or drawn ones.

The native runtime draws the same tokens (`runtime/native/drawing.h`); `grown_draws` reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import TypeAlias

import torch
from torch import Tensor

from foretoken.core.distribution import Distribution, LazyDistribution
from foretoken.core.noise import Noise
from foretoken.core.truncation import Limits
from foretoken.runtime.network import GrownTree

__all__ = [
    "Drawn",
    "clearest",
    "distinct",
    "grown_draws",
    "independent",
    "most_probable",
    "named",
    "truncates",
]

Drawn: TypeAlias = tuple[int, Distribution, float]
"""A drafted token, the q it was drawn from, and its probability."""

_CLARITY = 0.7
"""Of 0.7, 1 and 2, this had the most accepted tokens. `CLARITY` in drawing.h."""


def most_probable(distribution: Distribution, width: int) -> list[Drawn]:
    """The `width` most probable tokens with their q (one-hot) and their probability."""
    best = distribution.probs.topk(min(width, len(distribution.probs)))
    tokens = distribution.tokens[best.indices].tolist()
    return [
        (token, Distribution.one_hot(token), probability)
        for token, probability in zip(tokens, best.values.tolist(), strict=True)
    ]


def distinct(distribution: Distribution, noise: Noise, depth: int, width: int) -> list[Drawn]:
    """`width` draws without replacement: the q of each excludes its earlier siblings."""
    drawn, left = [], distribution
    for token in noise.draw_distinct(distribution, depth, width):
        drawn.append((token, left, distribution.prob(token)))
        if len(drawn) < width:
            left = left.without(token)
    return drawn


def independent(distribution: Distribution, noise: Noise, depth: int, width: int) -> list[Drawn]:
    """`width` independent draws with a shared q, which may be equal."""
    tokens = [noise.draw(distribution, depth, trial) for trial in range(width)]
    return [(token, distribution, distribution.prob(token)) for token in tokens]


def clearest(distribution: Distribution, noise: Noise, depth: int, width: int) -> list[Drawn]:
    """The `width` tokens that the target probably draws with this noise, which is its own.

    They are those with the largest `log q + noise`, like the first `width` of `distinct`. For the
    rule `coupled` alone, which compares tokens and reads no q: there, nodes may be dropped because
    of their tokens. So q is one-hot, and the probability says how clearly the noise decides for a
    token: the share that it has, among these tokens, of the exponentials of `_CLARITY` times the
    scores. Where it is clear, the target draws the same token although its p is another one.
    """
    if distribution.certain is not None:
        return [(distribution.certain, distribution, 1.0)]
    scores = torch.from_numpy(noise.scores(distribution, depth))
    best = scores.topk(min(width, len(scores)))
    tokens = distribution.tokens[best.indices].tolist()
    shares = (best.values * _CLARITY).softmax(-1).tolist()
    return [
        (token, Distribution.one_hot(token), share)
        for token, share in zip(tokens, shares, strict=True)
        if share > 0
    ]


def named(distribution: Distribution, token_ids: Tensor | None) -> Distribution:
    """A distribution over places in `token_ids` as one over the target's tokens."""
    return distribution if token_ids is None else distribution.renamed(token_ids)


def truncates(limits: Limits) -> bool:
    """Whether these limits may exclude tokens."""
    return limits.min_p > 0 or limits.top_k > 0 or limits.top_p < 1


def grown_draws(
    tree: GrownTree, q_of: Callable[[Tensor], Distribution] | None, *, truncated: bool
) -> Iterator[tuple[int, list[Drawn]]]:
    """The siblings of a tree that was grown in one call, parents first.

    No q is computed before it is read: under `coupled`, none ever is.

    Args:
        tree: the tree.
        q_of: makes q of a row of logits; None if no node was drawn from it.
        truncated: whether q is truncated.

    Yields:
        The parent, -1 for the root, and its children.
    """
    nodes = range(len(tree.tokens))
    for parent, siblings in groupby(nodes, tree.parents.__getitem__):
        children = list(siblings)
        if tree.logits is None or q_of is None:
            yield (
                parent,
                [
                    (tree.tokens[i], Distribution.one_hot(tree.tokens[i]), tree.probabilities[i])
                    for i in children
                ],
            )
        else:
            yield parent, _without_replacement(tree, children, q_of, truncated)


def _without_replacement(
    tree: GrownTree,
    siblings: Sequence[int],
    q_of: Callable[[Tensor], Distribution],
    truncated: bool,
) -> list[Drawn]:
    assert tree.logits is not None
    row, first = tree.logits[tree.rows[siblings[0]]], siblings[0]
    shown = None if truncated else (tree.tokens[first], tree.probabilities[first])
    whole: Distribution = LazyDistribution(lambda: q_of(row), shown)
    drawn, left = list[Drawn](), whole
    for node in siblings:
        token = tree.tokens[node]
        probability = whole.prob(token) if truncated else tree.probabilities[node]
        drawn.append((token, left, probability))
        left = _without(left, token)
    return drawn


def _without(distribution: Distribution, token: int) -> Distribution:
    return LazyDistribution(lambda: distribution.without(token))
