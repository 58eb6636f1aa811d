"""Distance-based acceptance: keep tokens whose ids are close to the target's best one.

Stern et al., "Blockwise Parallel Decoding for Deep Autoregressive Models", section 5.2: where the
vocabulary is ordered, as for pixel values, a drafted x passes if |x - argmax p| <= epsilon. The
rule is lossy for epsilon > 0. `minimum_block` is section 5.3 of the paper.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar

from annotated_types import Ge

from tokenleap.core.acceptance.base import AcceptanceRule, Accepted, TargetDistributions
from tokenleap.core.acceptance.walk import BlockOptions, accept_longest, likelihoods

if TYPE_CHECKING:
    from tokenleap.core.noise import StepNoise
    from tokenleap.core.tree import Draft

__all__ = ["Distance"]


class Distance(AcceptanceRule):
    """The rule `distance`: lossy, and of use only where similar tokens have similar ids."""

    class Options(BlockOptions):
        """Options of `distance`; see `BlockOptions` for `minimum_block`.

        Args:
            epsilon: largest difference between the ids of a drafted token and of the target's most
                probable one.
        """

        epsilon: Annotated[int, Ge(0)] = 2

    name: ClassVar[str] = "distance"
    lossless: ClassVar[bool] = False
    takes_trees: ClassVar[bool] = True
    counts_draws: ClassVar[bool] = True

    def accept(self, draft: Draft, p: TargetDistributions, noise: StepNoise) -> Accepted:
        """See `AcceptanceRule.accept`."""
        options = self.options
        assert isinstance(options, self.Options)

        def passes(node: int, token: int) -> bool:
            distribution = likelihoods(p, node)
            best = p[node].certain if p.greedy else None  # of equal ones, p knows the target's
            if best is None:
                best = int(distribution.tokens[distribution.probs.argmax()])
            return distribution.prob(token) > 0 and abs(token - best) <= options.epsilon

        reason = f"more than {options.epsilon} from the best"
        return accept_longest(draft, p, noise, passes, reason, options.minimum_block - 1)
