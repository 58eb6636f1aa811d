"""Trees of most probable tokens, of logits that one pass has computed for all depths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from tokenleap.drafters.transitions import TokenTransitions
from tokenleap.runtime.network import (
    CHAIN_CANDIDATES,
    MOST_ADDED,
    GrownTree,
    GrowthLimit,
    GrowthPlan,
)

__all__ = ["product_chain", "product_tree"]


class _Choices(Protocol):
    """The most probable children of nodes."""

    def children(self, level: int, place: int, width: int) -> tuple[list[int], list[float]]:
        """Children of a node: their places among the candidates of their level, and probabilities.

        Args:
            level: that of the children.
            place: that of their parent in the level above; 0 for those of the root.
            width: their number.
        """
        ...


class _Independent:
    """Children that depend on their level alone."""

    def __init__(self, probabilities: list[list[float]]) -> None:
        self._probabilities = probabilities

    def children(self, level: int, _place: int, width: int) -> tuple[list[int], list[float]]:
        """See `_Choices.children`."""
        return list(range(width)), self._probabilities[level][:width]


class _Dependent:
    """Children that depend on their parent, too.

    Args:
        probabilities: [K, C] of the candidates, without transitions.
        added: [K - 1, C, C], see `TokenTransitions.between`.
        width: most children of a node.
    """

    def __init__(self, probabilities: Tensor, added: Tensor, width: int) -> None:
        weights = probabilities[1:, None] * added.clamp(max=MOST_ADDED).exp()
        # Nothing is added to the other tokens of the vocabulary, so their mass stays.
        others = (1 - probabilities[1:].sum(-1)).clamp(min=0)
        total = weights.sum(-1, keepdim=True) + others[:, None, None]
        best = (weights / total).topk(width)
        self._first: list[float] = probabilities[0].tolist()
        self._places: list[list[list[int]]] = best.indices.tolist()
        self._probabilities: list[list[list[float]]] = best.values.tolist()

    def children(self, level: int, place: int, width: int) -> tuple[list[int], list[float]]:
        """See `_Choices.children`."""
        if level == 0:
            return list(range(width)), self._first[:width]
        above = level - 1
        return self._places[above][place][:width], self._probabilities[above][place][:width]


class _Product:
    """A tree that grows level by level."""

    def __init__(self, limit: GrowthLimit) -> None:
        self._limit = limit
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.probabilities: list[float] = []
        self.places: list[int] = []  # of each node among the candidates of its level
        self._paths: list[float] = []  # the probability of the path down to each node

    def add(
        self, parent: int, tokens: list[int], places: list[int], probabilities: list[float]
    ) -> list[int]:
        """Add children; returns those that may have children themselves.

        Args:
            parent: their parent.
            tokens: the candidates of their level.
            places: which of them they are.
            probabilities: theirs.
        """
        limit, above = self._limit, self._paths[parent] if parent >= 0 else 1.0
        extendable = []
        for place, probability in zip(places, probabilities, strict=True):
            if probability == 0:
                break
            self.tokens.append(tokens[place])
            self.parents.append(parent)
            self.probabilities.append(probability)
            self.places.append(place)
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
    logits: Tensor,
    token_ids: Tensor | None,
    plan: GrowthPlan,
    limit: GrowthLimit,
    transitions: TokenTransitions | None = None,
) -> GrownTree:
    """What `GrowingNetwork.grow` would grow, of logits that do not depend on the drafted tokens.

    Args:
        logits: [K, Vd] of the tokens at depths 1 to K, with K at least `limit.depth`.
        token_ids: [Vd] the tokens that logits stand for; None if these are 0, 1, ...
        plan: how the tree grows.
        limit: where it ends.
        transitions: what a token adds to the logits behind it, among the best tokens of each depth.
    """
    widths = plan.widths[: limit.depth]
    width = min(max(widths), logits.shape[-1])
    count = width if transitions is None else min(max(width, CHAIN_CANDIDATES), logits.shape[-1])
    best = logits[: len(widths)].float().softmax(-1).topk(count)
    choices: _Choices = (
        _Independent(best.values.tolist())
        if transitions is None
        else _Dependent(best.values, transitions.between(best.indices), width)
    )
    tokens = best.indices if token_ids is None else token_ids[best.indices]
    return _grown(tokens.tolist(), choices, plan, limit, width)


def product_chain(
    chain: tuple[Sequence[int], Sequence[float]], token_ids: Tensor | None, limit: GrowthLimit
) -> GrownTree:
    """`product_tree` for one child per node, of what `ChainingNetwork.best_chain` has chosen.

    Args:
        chain: [K] places in the vocabulary of the logits, and [K] their probabilities.
        token_ids: see `product_tree`.
        limit: where it ends.
    """
    tokens, probabilities = chain
    count, path = 0, 1.0
    for probability in probabilities[: limit.nodes]:
        if probability == 0:
            break
        count, path = count + 1, path * probability
        if probability < limit.min_token_prob or path < limit.min_path_prob:
            break
    kept = list(tokens[:count])
    if token_ids is not None:
        kept = token_ids[kept].tolist()
    return GrownTree(kept, list(range(-1, count - 1)), list(probabilities[:count]))


def _grown(
    tokens: list[list[int]], choices: _Choices, plan: GrowthPlan, limit: GrowthLimit, most: int
) -> GrownTree:
    """The tree of the children chosen.

    Args:
        tokens: [K, C] the candidates of each level.
        choices: among them.
        plan: how the tree grows.
        limit: where it ends.
        most: children of a node.
    """
    tree, frontier = _Product(limit), [-1]
    for level, size in enumerate(plan.widths[: limit.depth]):
        found: list[int] = []
        for parent in frontier:
            place = tree.places[parent] if parent >= 0 else 0
            children = choices.children(level, place, min(size, most))
            found += tree.add(parent, tokens[level], *children)
        frontier = tree.best(found, plan.beam)
        if tree.is_full:
            break
    return GrownTree(tree.tokens, tree.parents, tree.probabilities)
