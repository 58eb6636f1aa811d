"""Typical acceptance: keep tokens that are not too improbable, given the target's uncertainty.

Cai et al., "Medusa", section 2.3.1: a drafted x passes if
p(x) > min(posterior_threshold, posterior_alpha * exp(-H(p))), with H the entropy of p in nats.
Option names and defaults are vLLM's. The rule is lossy, except at temperature 0.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, ClassVar

from annotated_types import Gt, Le, Lt

from tokenleap.core.acceptance.base import AcceptanceRule, Accepted, TargetDistributions
from tokenleap.core.acceptance.walk import accept_longest
from tokenleap.core.config import Config

if TYPE_CHECKING:
    from tokenleap.core.noise import StepNoise
    from tokenleap.core.tree import Draft

__all__ = ["Typical"]


class Typical(AcceptanceRule):
    """The rule `typical`: lossy when sampling; greedy decoding (entropy 0) accepts the argmax."""

    class Options(Config):
        """Options of `typical`, under vLLM's names.

        Args:
            posterior_threshold: epsilon of the paper.
            posterior_alpha: delta of the paper.
        """

        posterior_threshold: Annotated[float, Gt(0), Le(1)] = 0.09
        posterior_alpha: Annotated[float, Gt(0), Lt(1)] = 0.3

    name: ClassVar[str] = "typical"
    lossless: ClassVar[bool] = False
    takes_trees: ClassVar[bool] = True
    counts_draws: ClassVar[bool] = True

    def accept(self, draft: Draft, p: TargetDistributions, noise: StepNoise) -> Accepted:
        """See `AcceptanceRule.accept`."""
        options = self.options
        assert isinstance(options, self.Options)

        def passes(node: int, token: int) -> bool:
            distribution = p[node]
            threshold = options.posterior_alpha * math.exp(-distribution.entropy())
            return distribution.prob(token) > min(options.posterior_threshold, threshold)

        return accept_longest(draft, p, noise, passes, "p below the typical threshold")
