"""The coupled rule: seeded sampling that does not depend on the drafter (invariant 7).

The target's token at position t is `argmax(log p + noise)`, with noise that is a function of
(seed, t) alone; a drafted token is accepted when it is that token. Every committed token is thus
the one plain decoding would have drawn, so that changing the drafter, the draft length or the
batch changes no bit. For a one-hot q the acceptance rate is that of speculative sampling; for a
sampled q it is a little lower (Gumbel coupling against the maximal one: at least
(1 - D) / (1 + D) where speculative sampling has 1 - D, D the total variation distance of p and q;
Daliri et al., "Coupling without Communication and Drafter-Invariant Speculative Decoding").
"""

from __future__ import annotations

from typing import ClassVar

from foretoken.core.acceptance.base import AcceptanceRule, Accepted, TargetDistributions
from foretoken.core.noise import StepNoise
from foretoken.core.tree import Draft

__all__ = ["Coupled"]


class Coupled(AcceptanceRule):
    """Lossless, for any draft from any source; the default."""

    name: ClassVar[str] = "coupled"
    lossless: ClassVar[bool] = True
    takes_trees: ClassVar[bool] = True
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
