"""The coupled rule: seeded sampling that does not depend on the drafter (invariant 7).

The target's token at position t is `argmax(log p + noise)`, and the noise is a function of seed and
t alone. A drafted token is accepted if it is that token. Every committed token is therefore the
token that plain decoding draws. Another drafter, draft length or batch does not change the output.

The acceptance rate for a one-hot q is that of speculative sampling. For a sampled q it is slightly
lower: with D the total variation distance of p and q, the Gumbel coupling accepts with probability
at least (1 - D) / (1 + D), and speculative sampling with 1 - D. Daliri et al., "Coupling without
Communication and Drafter-Invariant Speculative Decoding".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from tokenleap.core.acceptance.base import AcceptanceRule, Accepted, TargetDistributions

if TYPE_CHECKING:
    from tokenleap.core.noise import StepNoise
    from tokenleap.core.tree import Draft

__all__ = ["Coupled"]


class Coupled(AcceptanceRule):
    """The rule `coupled`, the default: lossless, for chains and trees of any drafter."""

    name: ClassVar[str] = "coupled"
    lossless: ClassVar[bool] = True
    takes_trees: ClassVar[bool] = True
    counts_draws: ClassVar[bool] = True
    couples_draft: ClassVar[bool] = True
    ignores_draft_lengths: ClassVar[bool] = True

    def accept(self, draft: Draft, p: TargetDistributions, noise: StepNoise) -> Accepted:
        """See `AcceptanceRule.accept`."""
        node, depth = 0, 0
        path: list[int] = []
        while True:
            token = noise.draw(p[node], depth)
            children = draft.tree.children[node]
            match = next((c for c in children if draft.tree.tokens[c] == token), None)
            if match is None:
                reason = "the target drew another token" if children else ""
                return Accepted(tuple(path), token, children, reason)
            path.append(match)
            node, depth = match, depth + 1

    def beta(self, draft: Draft, p: TargetDistributions, noise: StepNoise) -> float:
        """Sum of min(p, q) if p or q is one-hot; else the decision; see `AcceptanceRule.beta`."""
        q = draft.q_of(1)
        if p[0].certain is None and q.certain is None:
            return super().beta(draft, p, noise)
        return p[0].overlap(q)
