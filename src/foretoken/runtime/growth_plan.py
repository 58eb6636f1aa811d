"""`GrowthPlan`: how the native runtime grows trees (`Passes.grow`)."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["GrowthPlan"]


@dataclass(frozen=True)
class GrowthPlan:
    """How trees of most probable tokens grow, level by level.

    Args:
        widths: children of each node that gets any, at depths 0 (the root), 1, ...
        beam: nodes of a level that get children: those with the highest path probabilities. None
            means all of them.
    """

    widths: tuple[int, ...]
    beam: int | None = None

    @property
    def frontiers(self) -> list[int]:
        """Most nodes that get children, at depths 0 (the root), 1, ..."""
        sizes = [1]
        for width in self.widths[:-1]:
            level = sizes[-1] * width
            sizes.append(level if self.beam is None else min(level, self.beam))
        return sizes
