"""`DraftSizes`: how many nodes drafts have by the depth of their budgets, for `cost_model`.

Trees may be smaller than their shape, and chains may end early. So each level has a ratio: its
nodes over those of the level above. It is learnt from the drafts that had nodes above and whose
budgets had the level. A level that no budget had keeps the ratio that was expected. So however
early drafts end, deeper ones do not seem larger than they would be, and may be tried again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from operator import mul
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenleap.core.tree import TokenTree

__all__ = ["DraftSizes"]

_MEMORY, _PRIOR_WEIGHT = 0.9, 1.0
"""Weight of the past after each draft, and of what was expected, in nodes of the level above."""

_LEAST_NODES = 0.01
"""A level is taken to add at least this many nodes, even if noisy averages say less."""


class DraftSizes:
    """Mean numbers of nodes.

    Args:
        expected: of each level, if no draft ends early.

    Attributes:
        of_levels: mean number of nodes of each level, if the budget has it.
    """

    def __init__(self, expected: Sequence[int]) -> None:
        self._expected = [below / above for above, below in pairwise((1, *expected))]
        # Of each level: its nodes, and those above it, in the drafts whose budgets had the level.
        self._here, self._above = [0.0] * len(expected), [0.0] * len(expected)
        self.of_levels = [float(nodes) for nodes in expected]

    def learn(self, tree: TokenTree, allowed: int) -> None:
        """Learn from a draft whose budget had this depth."""
        levels = len(self._expected)
        nodes = [1, *[0] * levels]
        for depth in tree.depths[1:]:
            nodes[min(depth, levels)] += 1
        for level in range(min(allowed, levels)):
            if not nodes[level]:
                break
            self._here[level] = _MEMORY * self._here[level] + nodes[level + 1]
            self._above[level] = _MEMORY * self._above[level] + nodes[level]
        self.of_levels = [max(_LEAST_NODES, nodes) for nodes in accumulate(self._learnt(), mul)]

    def _learnt(self) -> Iterator[float]:
        """The ratio of each level."""
        for here, above, expected in zip(self._here, self._above, self._expected, strict=True):
            yield (here + _PRIOR_WEIGHT * expected) / (above + _PRIOR_WEIGHT)
