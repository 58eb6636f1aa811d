"""Spec-Verification: keep tokens that are among the target's best and close to the very best.

Xia et al., "Speculative Decoding: Exploiting Speculative Execution for Accelerating Seq2seq
Generation", equations 8 and 9: a drafted x passes if log p(x) >= log p(the beta-th best) and
log p(best) - log p(x) <= tau. With beta = 1 this is greedy verification. At temperature 0 the rule
compares the probabilities at temperature 1. It is lossy for beta > 1.

With a tau that excludes nothing, it is the top-k criterion of Stern et al., "Blockwise Parallel
Decoding for Deep Autoregressive Models", section 5.1; `minimum_block` is their section 5.3.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, ClassVar

from annotated_types import Ge
from pydantic import FiniteFloat

from tokenleap.core.acceptance.base import AcceptanceRule, Accepted, TargetDistributions
from tokenleap.core.acceptance.walk import BlockOptions, accept_longest, likelihoods

if TYPE_CHECKING:
    from tokenleap.core.noise import StepNoise
    from tokenleap.core.tree import Draft

__all__ = ["TopBeta"]


class TopBeta(AcceptanceRule):
    """The rule `top_beta`: lossy; the defaults are those of SpecDec."""

    class Options(BlockOptions):
        """Options of `top_beta`; see `BlockOptions` for `minimum_block`.

        Args:
            beta: a drafted token must be among this many most probable tokens.
            tau: largest log-likelihood gap to the most probable token, in nats.
        """

        beta: Annotated[int, Ge(1)] = 3
        tau: Annotated[FiniteFloat, Ge(0)] = 1.0

    name: ClassVar[str] = "top_beta"
    lossless: ClassVar[bool] = False
    takes_trees: ClassVar[bool] = True
    counts_draws: ClassVar[bool] = True

    def accept(self, draft: Draft, p: TargetDistributions, noise: StepNoise) -> Accepted:
        """See `AcceptanceRule.accept`."""
        options = self.options
        assert isinstance(options, self.Options)

        def passes(node: int, token: int) -> bool:
            if p.greedy and options.beta == 1:  # which of several best tokens it is, only p knows
                return p[node].certain == token
            distribution = likelihoods(p, node)
            probability, probs = distribution.prob(token), distribution.probs
            if probability == 0:
                return False
            best = float(probs.max())
            if math.log(best) - math.log(probability) > options.tau:
                return False
            # Counting takes less time than sorting.
            return probability == best or int((probs > probability).sum()) < options.beta

        reason = "outside the target's top candidates"
        return accept_longest(draft, p, noise, passes, reason, options.minimum_block - 1)
