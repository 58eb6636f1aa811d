"""Block verification: accept a chain as a whole instead of token by token.

Sun et al., "Block Verification Accelerates Speculative Decoding", algorithm 2. Its mean acceptance
length is never below that of speculative sampling. With w_0 = 1 and
w_i = min(w_{i-1} * p(x_i) / q(x_i), 1), the prefix of length i passes with probability

    h_i = R_i / (R_i + 1 - w_i),   R_i = sum_x max(w_i * p(x | x_1..i) - q(x | x_1..i), 0)

(h_gamma = w_gamma), independently for each i. The longest prefix that passes is accepted. The next
token is drawn from norm(max(w_i * p - q, 0)), or from p after the whole chain.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from tokenleap.core.acceptance.base import AcceptanceRule, Accepted, TargetDistributions

if TYPE_CHECKING:
    from tokenleap.core.noise import StepNoise
    from tokenleap.core.tree import Draft

__all__ = ["Block"]


class Block(AcceptanceRule):
    """The rule `block`: lossless, for chains only."""

    name: ClassVar[str] = "block"
    lossless: ClassVar[bool] = True
    takes_trees: ClassVar[bool] = False

    def accept(self, draft: Draft, p: TargetDistributions, noise: StepNoise) -> Accepted:
        """See `AcceptanceRule.accept`."""
        assert draft.tree.is_chain, "block verification takes chains"
        gamma = draft.tree.num_drafted
        weight, kept, kept_weight = 1.0, 0, 1.0
        for i in range(1, gamma + 1):
            token = draft.tree.tokens[i]
            p_token, q_token = p[i - 1].prob(token), draft.q_of(i).prob(token)
            assert q_token > 0, "a drafted token was drawn from its q"
            weight = min(weight * p_token / q_token, 1.0)
            if weight == 0:  # no longer prefix can pass
                break
            if noise.accepts(_pass_probability(draft, p, i, weight), i - 1):
                kept, kept_weight = i, weight
        path = tuple(range(1, kept + 1))
        if kept == gamma:
            return Accepted(path, noise.draw(p[kept], kept))
        distribution = p[kept].residual(draft.q_of(kept + 1), weight=kept_weight)
        reason = f"prefix of {kept} has weight {kept_weight:.3g}"
        return Accepted(path, noise.draw(distribution, kept), (kept + 1,), reason)

    def beta(self, draft: Draft, p: TargetDistributions, noise: StepNoise) -> float:
        """Sum of min(p, q), as for any draft of one token; see `AcceptanceRule.beta`."""
        return p[0].overlap(draft.q_of(1))


def _pass_probability(draft: Draft, p: TargetDistributions, i: int, weight: float) -> float:
    """h_i: the probability that the prefix of length i passes; `weight` is w_i."""
    if i == draft.tree.num_drafted:
        return weight
    excess = float(p[i].excess(draft.q_of(i + 1), weight=weight).sum())  # R_i
    total = excess + 1 - weight
    return excess / total if total > 0 else 1.0
