"""Trees of most probable tokens whose logits depend on the depth alone."""

from __future__ import annotations

from torch import Tensor

from foretoken.runtime.network import GrownTree, GrowthLimit, GrowthPlan

__all__ = ["product_tree"]


class _Product:
    """A tree that grows level by level."""

    def __init__(self, limit: GrowthLimit) -> None:
        self._limit = limit
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.probabilities: list[float] = []
        self._paths: list[float] = []  # the probability of the path down to each node

    def add(self, parent: int, tokens: list[int], probabilities: list[float]) -> list[int]:
        """Add children; returns those that may have children themselves."""
        limit, above = self._limit, self._paths[parent] if parent >= 0 else 1.0
        extendable = []
        for token, probability in zip(tokens, probabilities, strict=True):
            if probability == 0:
                break
            self.tokens.append(token)
            self.parents.append(parent)
            self.probabilities.append(probability)
            self._paths.append(above * probability)
            if probability >= limit.min_token_prob and self._paths[-1] >= limit.min_path_prob:
                extendable.append(len(self.tokens) - 1)
        return extendable

    def best(self, level: list[int], count: int | None) -> list[int]:
        """The nodes of a level with the highest path probabilities; all of them with None."""
        return level if count is None else sorted(level, key=lambda n: -self._paths[n])[:count]

    @property
    def is_full(self) -> bool:
        """Whether no level is added any more."""
        return self._limit.nodes is not None and len(self.tokens) >= self._limit.nodes


def product_tree(
    logits: Tensor, token_ids: Tensor, plan: GrowthPlan, limit: GrowthLimit
) -> GrownTree:
    """What `GrowingNetwork.grow` would grow if the logits did not depend on the drafted tokens.

    Args:
        logits: [K, Vd] of the tokens at depths 1 to K, with K at least `limit.depth`.
        token_ids: [Vd] the tokens that logits stand for.
        plan: how the tree grows.
        limit: where it ends.
    """
    widths = plan.widths[: limit.depth]
    best = logits[: len(widths)].float().softmax(-1).topk(min(max(widths), logits.shape[-1]))
    tokens, probabilities = token_ids[best.indices].tolist(), best.values.tolist()
    tree, frontier = _Product(limit), [-1]
    for level, width in enumerate(widths):
        found: list[int] = []
        for parent in frontier:
            found += tree.add(parent, tokens[level][:width], probabilities[level][:width])
        frontier = tree.best(found, plan.beam)
        if tree.is_full:
            break
    return GrownTree(tree.tokens, tree.parents, tree.probabilities)
