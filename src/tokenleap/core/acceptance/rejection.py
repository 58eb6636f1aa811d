"""Speculative sampling: accept with probability min(1, p/q), else draw from the residual.

Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", algorithm 1. Trees
use the multi-round form of SpecInfer (Miao et al., algorithm 2): siblings are tried in turn, and
each is compared with the residual distribution that the one before it left. By invariant 2 this is
lossless for independent siblings, for siblings drawn without replacement and for deterministic
siblings.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from tokenleap.core.acceptance.base import AcceptanceRule, Accepted, TargetDistributions

if TYPE_CHECKING:
    from tokenleap.core.noise import StepNoise
    from tokenleap.core.tree import Draft

__all__ = ["Rejection", "accept_by_ratio"]


class Rejection(AcceptanceRule):
    """The rule `rejection`: lossless for all drafters and trees; greedy decoding has one-hot p."""

    name: ClassVar[str] = "rejection"
    lossless: ClassVar[bool] = True
    takes_trees: ClassVar[bool] = True
    counts_draws: ClassVar[bool] = True

    def accept(self, draft: Draft, p: TargetDistributions, noise: StepNoise) -> Accepted:
        """See `AcceptanceRule.accept`."""
        return accept_by_ratio(draft, p, noise, lenience=1.0)

    def beta(self, draft: Draft, p: TargetDistributions, noise: StepNoise) -> float:
        """Sum of min(p, q): theorem 3.5; see `AcceptanceRule.beta`."""
        return p[0].overlap(draft.q_of(1))


def accept_by_ratio(
    draft: Draft, p: TargetDistributions, noise: StepNoise, lenience: float
) -> Accepted:
    """Walk down the tree; a drafted x passes if r < p(x) / (lenience * q(x)), r uniform.

    Args:
        draft: the verified draft.
        p: the target's distribution after every node.
        noise: the random decisions.
        lenience: the factor l on q (Leviathan et al., appendix A.5); 1 is speculative sampling.
    """
    node, depth = 0, 0
    path: list[int] = []
    rejected: list[int] = []
    while True:
        distribution = p[node]
        reason = ""
        for trial, (child, q) in enumerate(draft.tries(node)):
            token = draft.tree.tokens[child]
            p_token, q_token = distribution.prob(token), q.prob(token)
            assert q_token > 0, "a drafted token was drawn from its q"
            if noise.accepts(p_token / (lenience * q_token), depth, trial):
                path.append(child)
                break
            if child not in rejected:
                rejected.append(child)
            reason = f"p={p_token:.3g} against q={q_token:.3g}"
            distribution = distribution.residual(q, scale=lenience)
        else:
            return Accepted(tuple(path), noise.draw(distribution, depth), tuple(rejected), reason)
        if path[-1] in rejected:  # another draw of the same token passed
            rejected.remove(path[-1])
        node, depth = path[-1], depth + 1
