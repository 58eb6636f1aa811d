"""The most probable nodes of a tree whose path probabilities are known: greedy expansion.

What `suffix` (Oliaro et al.) and `rest` (He et al.) draft: as no node is more probable than its
parent, taking the most probable node whose parent has been taken gives the most probable ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from heapq import heappop, heappush
from itertools import count
from typing import TypeVar

from foretoken.control import Budget

__all__ = ["best_first"]

Place = TypeVar("Place")


def best_first(
    start: Place,
    successors: Callable[[Place], Iterable[tuple[int, float, Place]]],
    nodes: int,
    budget: Budget,
    least: float = 0.0,
) -> Iterator[tuple[int, int, float, Place]]:
    """The most probable nodes, parents first; of equally probable ones the one that came first.

    Args:
        start: where the root's successors are found.
        successors: token, probability given its parent, and place, of all that follow a place.
        nodes: most nodes.
        budget: says how deep, and at which probabilities, to stop.
        least: smallest path probability.

    Yields:
        Of each node the index of its parent, -1 for the root, its token, its path probability and
        its place.
    """
    order = count()
    frontier: list[tuple[float, int, int, int, int, bool, Place]] = []

    def expand(place: Place, parent: int, depth: int, probability: float) -> None:
        for token, share, child in successors(place):
            path = probability * share
            last = depth >= budget.depth or budget.stops_below(share, path)
            if path >= least:
                heappush(frontier, (-path, next(order), depth, parent, token, last, child))

    expand(start, -1, 1, 1.0)
    for node in range(nodes):
        if not frontier:
            return
        path, _, depth, parent, token, last, place = heappop(frontier)
        yield parent, token, -path, place
        if not last:
            expand(place, node, depth + 1, -path)
