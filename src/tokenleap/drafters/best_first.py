"""Best-first expansion: the most probable nodes of a tree whose path probabilities are known.

`suffix`, `rest` and `recycle` draft with it (the greedy expansion of Oliaro et al.,
"SuffixDecoding"). No node is more probable than its parent. Repeatedly taking the most probable
node whose parent was taken therefore gives the most probable nodes of the whole tree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from heapq import heappop, heappush
from itertools import count
from typing import TypeVar

from tokenleap.control import Budget

__all__ = ["best_first_nodes"]

Place = TypeVar("Place")


def best_first_nodes(
    start: Place,
    successors: Callable[[Place], Iterable[tuple[int, float, Place]]],
    max_nodes: int,
    budget: Budget,
    min_path_prob: float = 0.0,
) -> Iterator[tuple[int, int, float, Place]]:
    """Yield the most probable nodes, parents first.

    Of equally probable nodes, the one that `successors` gave first comes first.

    Args:
        start: the root's place: what `successors` needs to find the root's children.
        successors: maps a node's place to its children: token, probability given the parent, and
            place of each.
        max_nodes: most nodes.
        budget: limits the depth, and stops below improbable nodes (`Budget.stops_below`).
        min_path_prob: nodes with a smaller path probability are left out.

    Yields:
        For each node: the index of its parent (-1 for the root), its token, its path probability
        and its place.
    """
    order = count()
    frontier: list[tuple[float, int, int, int, int, bool, Place]] = []

    def expand(place: Place, parent: int, depth: int, parent_path_prob: float) -> None:
        for token, token_prob, child in successors(place):
            path_prob = parent_path_prob * token_prob
            is_leaf = depth >= budget.depth or budget.stops_below(token_prob, path_prob)
            if path_prob >= min_path_prob:
                heappush(frontier, (-path_prob, next(order), depth, parent, token, is_leaf, child))

    expand(start, -1, 1, 1.0)
    for node in range(max_nodes):
        if not frontier:
            return
        negative_prob, _, depth, parent, token, is_leaf, place = heappop(frontier)
        yield parent, token, -negative_prob, place
        if not is_leaf:
            expand(place, node, depth + 1, -negative_prob)
