"""`GrowthPlan` and `GrowthDraw`: how the native runtime grows trees (`Passes.grow`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenleap.core.distribution import Limits
    from tokenleap.core.noise import Noise


@dataclass(frozen=True)
class GrowthPlan:
    """How trees of most probable or of drawn tokens grow, level by level."""

    widths: tuple[int, ...]  # children of each node that gets any, at depths 0 (the root), 1, ...
    beam: int | None = None  # most nodes of a level that get children: the most probable paths

    @property
    def frontiers(self) -> list[int]:
        """Most nodes that get children, at depths 0 (the root), 1, ..."""
        sizes = [1]
        for width in self.widths[:-1]:
            level = sizes[-1] * width
            sizes.append(level if self.beam is None else min(level, self.beam))
        return sizes


@dataclass(frozen=True)
class GrowthDraw:
    """How a tree draws its tokens.

    Siblings are drawn without replacement, as by `Noise.draw_distinct`. With `GrowthPlan.beam`,
    rounding errors may exchange tokens with nearly equal scores.

    Args:
        noise: of the request, with depths counted from the root; its token stream is drawn from.
        coupled: whether the noise is the target's own. The probabilities of tokens are then
            their clarity (`drafters.growth`).
    """

    noise: Noise  # of the request, with depths counted from the root
    temperature: float
    limits: Limits
    coupled: bool  # the noise is the target's: probabilities are clarities (`drafters.drawing`)
