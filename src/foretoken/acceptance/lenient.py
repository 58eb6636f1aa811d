"""Lenient speculative sampling: a factor l on q buys acceptance and gives up exactness.

Leviathan et al., appendix A.5. Sampling compares r with p / (l * q); no token becomes more
probable than p / l. At temperature 0 a drafted x passes if p(x) >= l * max p, with p taken at
temperature 1. Lossy for l < 1.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from annotated_types import Gt, Le

from foretoken.acceptance.base import AcceptanceRule, Accepted, TargetLaws
from foretoken.acceptance.rejection import accept_by_ratio
from foretoken.acceptance.walk import accept_longest
from foretoken.config import Config
from foretoken.noise import StepNoise
from foretoken.tree import Draft

__all__ = ["Lenient"]


class Lenient(AcceptanceRule):
    """Lossy: the output law may exceed p by the factor 1 / lenience."""

    class Options(Config):
        """Options of `lenient`: the factor l."""

        lenience: Annotated[float, Gt(0), Le(1)] = 0.5

    name: ClassVar[str] = "lenient"
    lossless: ClassVar[bool] = False
    takes_branches: ClassVar[bool] = True

    def accept(self, draft: Draft, p: TargetLaws, noise: StepNoise) -> Accepted:
        """See `AcceptanceRule.accept`."""
        assert isinstance(self.options, self.Options)
        lenience = self.options.lenience
        if not p.greedy:
            return accept_by_ratio(draft, p, noise, lenience)

        def passes(node: int, token: int) -> bool:
            law = p.untempered(node)
            return law.prob(token) >= lenience * float(law.probs.max())

        return accept_longest(draft, p, noise, passes, f"p below {lenience:g} of the best")
