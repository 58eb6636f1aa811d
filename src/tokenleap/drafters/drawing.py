"""How `ModelDrafter` chooses the children of one node: the most probable tokens, or drawn ones.

The native runtime draws the same tokens (`runtime/native/drawing.h`); `grown_draws` reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import TypeAlias

import torch
from torch import Tensor

from tokenleap.core.distribution import Distribution, LazyDistribution
from tokenleap.core.noise import Noise
from tokenleap.core.truncation import Limits
from tokenleap.runtime.network import GrownTree, GrowthDraw

__all__ = [
    "Drawn",
    "clearest",
    "coupled_draws",
    "distinct",
    "excludes_all",
    "grown_draws",
    "independent",
    "most_probable",
    "most_probable_below",
    "named",
    "spread",
    "truncates",
]

Drawn: TypeAlias = tuple[int, Distribution, float]
"""A drafted token, the q it was drawn from, and its probability."""

_CLARITY = 0.7
"""Of 0.7, 1 and 2, this had the most accepted tokens. `CLARITY` in drawing.h."""

_RIVALS = 4
"""`RIVALS` in drawing.h."""


def most_probable(distribution: Distribution, width: int) -> list[Drawn]:
    """The `width` most probable tokens with their q (one-hot) and their probability."""
    best = distribution.probs.topk(min(width, len(distribution.probs)))
    tokens = distribution.tokens[best.indices].tolist()
    return [
        (token, Distribution.one_hot(token), probability)
        for token, probability in zip(tokens, best.values.tolist(), strict=True)
    ]


def most_probable_below(
    logits: Tensor, widths: Sequence[int], token_ids: Tensor | None
) -> list[list[Drawn]] | None:
    """What `most_probable` returns for the distributions of many nodes, at once.

    Args:
        logits: [n, V] of the nodes, or [n, Vd] of `token_ids`.
        widths: [n] the number of children of each.
        token_ids: [Vd] the tokens that logits stand for; None if these are all tokens.

    Returns:
        [n] the children; None if there are NaNs among them, which are no probabilities.
    """
    best = logits.float().softmax(-1).topk(min(max(widths), logits.shape[-1]))
    if best.values.isnan().any():
        return None
    tokens = best.indices if token_ids is None else token_ids[best.indices]
    return [
        [
            (token, Distribution.one_hot(token), probability)
            for token, probability in zip(of_node[:width], values[:width], strict=True)
            if probability > 0
        ]
        for of_node, values, width in zip(
            tokens.tolist(), best.values.tolist(), widths, strict=True
        )
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


def coupled_draws(distribution: Distribution, noise: Noise, depth: int, width: int) -> list[Drawn]:
    """The same draws as `distinct` with the target's own noise; their probability is `clarity`."""
    tokens, shares = _with_clarity(distribution, noise, depth, width)
    drawn, left = list[Drawn](), distribution
    for token, share in zip(tokens, shares, strict=True):
        drawn.append((token, left, share))
        if len(drawn) < len(tokens):
            left = left.without(token)
    return drawn


def clearest(distribution: Distribution, noise: Noise, depth: int, width: int) -> list[Drawn]:
    """The same for trees whose nodes are dropped because of their tokens.

    The rule `coupled` alone allows that: it compares tokens and reads no q. So q is one-hot here.
    """
    drawn = zip(*_with_clarity(distribution, noise, depth, width), strict=True)
    return [(token, Distribution.one_hot(token), share) for token, share in drawn if share > 0]


def _with_clarity(
    distribution: Distribution, noise: Noise, depth: int, width: int
) -> tuple[list[int], list[float]]:
    """The tokens of `distinct`, and how clearly the noise decides for each if it is the target's.

    The target draws the token with the largest `log p + noise`, and log p is near log q. So the
    token with the largest `log q + noise` is probably drawn if the others are far behind, however
    small its q is. The measure, `clarity`, is a share: that of the exponential of `_CLARITY` times
    its score in the sum over the best `width` tokens, or the best `_RIVALS`.
    """
    if distribution.certain is not None:
        return [distribution.certain], [1.0]
    scores = torch.from_numpy(noise.scores(distribution, depth))
    best = scores.topk(min(max(width, _RIVALS), len(scores)))
    places = best.indices[:width].to(distribution.probs.device)
    shares: list[float] = (best.values * _CLARITY).softmax(-1).tolist()
    return distribution.tokens[places].tolist(), shares[:width]


def named(distribution: Distribution, token_ids: Tensor | None) -> Distribution:
    """A distribution over places in `token_ids` as one over the target's tokens."""
    return distribution if token_ids is None else distribution.renamed(token_ids)


def spread(logits: Tensor, token_ids: Tensor, vocab_size: int) -> Tensor:
    """[V] logits from those [Vd] of `token_ids`; -inf for all others."""
    of_all = logits.new_full((vocab_size,), -torch.inf)
    of_all[token_ids] = logits
    return of_all


def excludes_all(logits: Tensor) -> bool:
    """Whether logits [V] allow no token at all, so that there is no q."""
    return bool(logits.max() == -torch.inf)


def truncates(limits: Limits) -> bool:
    """Whether these limits may exclude tokens."""
    return limits.min_p > 0 or limits.top_k > 0 or limits.top_p < 1


def grown_draws(
    tree: GrownTree, draw: GrowthDraw | None, q_of: Callable[[Tensor], Distribution]
) -> Iterator[tuple[int, list[Drawn]]]:
    """The siblings of a tree that was grown in one call, parents first.

    No q is computed before it is read. Under `coupled`, only `trace=True` reads any.

    Args:
        tree: the tree.
        draw: how its tokens were drawn; None if they are the most probable ones.
        q_of: makes q of a row of logits.

    Yields:
        The parent, -1 for the root, and its children.
    """
    nodes = range(len(tree.tokens))
    for parent, siblings in groupby(nodes, tree.parents.__getitem__):
        children = list(siblings)
        if draw is None or tree.logits is None:
            yield (
                parent,
                [
                    (tree.tokens[i], Distribution.one_hot(tree.tokens[i]), tree.probabilities[i])
                    for i in children
                ],
            )
        else:
            yield parent, _without_replacement(tree, children, draw, q_of)


def _without_replacement(
    tree: GrownTree,
    siblings: Sequence[int],
    draw: GrowthDraw,
    q_of: Callable[[Tensor], Distribution],
) -> list[Drawn]:
    assert tree.logits is not None
    truncated = truncates(draw.limits)
    reads_q = truncated and not draw.coupled
    row, first = tree.logits[tree.rows[siblings[0]]], siblings[0]
    known = None if truncated else (tree.tokens[first], tree.shown[first])
    whole: Distribution = LazyDistribution(lambda: q_of(row), known)
    drawn, left = list[Drawn](), whole
    for node in siblings:
        token = tree.tokens[node]
        probability = whole.prob(token) if reads_q else tree.probabilities[node]
        drawn.append((token, left, probability))
        left = _without(left, token)
    return drawn


def _without(distribution: Distribution, token: int) -> Distribution:
    return LazyDistribution(lambda: distribution.without(token))
