"""Lenient speculative sampling: a factor l on q raises the acceptance rate and is not exact.

Leviathan et al., appendix A.5. Sampling compares r with p / (l * q). No token becomes more probable
than p / l. At temperature 0 a drafted x passes if p(x) >= l * max p, with p at temperature 1. The
rule is lossy for l < 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar

from annotated_types import Gt, Le

from tokenleap.core.acceptance.base import AcceptanceRule, Accepted, TargetDistributions
from tokenleap.core.acceptance.rejection import accept_by_ratio
from tokenleap.core.acceptance.walk import accept_longest
from tokenleap.core.config import Config

if TYPE_CHECKING:
    from tokenleap.core.noise import StepNoise
    from tokenleap.core.tree import Draft

__all__ = ["Lenient"]


class Lenient(AcceptanceRule):
    """The rule `lenient`: lossy; the output distribution may exceed p by the factor 1 / l."""

    class Options(Config):
        """Options of `lenient`.

        Args:
            lenience: the factor l; 1 is lossless.
        """

        lenience: Annotated[float, Gt(0), Le(1)] = 0.5

    name: ClassVar[str] = "lenient"
    lossless: ClassVar[bool] = False
    takes_trees: ClassVar[bool] = True
    counts_draws: ClassVar[bool] = True

    def accept(self, draft: Draft, p: TargetDistributions, noise: StepNoise) -> Accepted:
        """See `AcceptanceRule.accept`."""
        assert isinstance(self.options, self.Options)
        lenience = self.options.lenience
        if not p.greedy:
            return accept_by_ratio(draft, p, noise, lenience)

        def passes(node: int, token: int) -> bool:
            if lenience == 1:  # which of several best tokens is the target's, only p knows
                return p[node].certain == token
            distribution = p.untempered(node)
            return distribution.prob(token) >= lenience * float(distribution.probs.max())

        return accept_longest(draft, p, noise, passes, f"p below {lenience:g} of the best")

    def beta(self, draft: Draft, p: TargetDistributions, noise: StepNoise) -> float:
        """Sum of min(p / l, q) if sampled (A.5), else the decision; see `AcceptanceRule.beta`."""
        assert isinstance(self.options, self.Options)
        if p.greedy:
            return super().beta(draft, p, noise)
        return p[0].overlap(draft.q_of(1), self.options.lenience) / self.options.lenience
