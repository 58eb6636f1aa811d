"""K-sequential selection: one scale rho for all siblings, which are independent draws from one q.

Sun et al., "SpecTr: Fast Speculative Decoding via Optimal Transport" (K-SEQ). The k siblings are
tried in turn. A sibling x passes with probability min(1, p(x) / (rho * q(x))); averaged over x,
this is beta = sum_x min(q(x), p(x) / rho). On average n = (1 - (1 - beta)^k) / beta siblings are
tried. If none passes, the token is drawn from the residual distribution

    norm(p(x) - n * min(q(x), p(x) / rho))

which is a distribution if n <= rho. The smallest such rho in [1, k] has the highest acceptance
rate. One sibling has rho = 1, which is plain speculative sampling. In a tree, each level is
selected separately.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from tokenleap.core.acceptance.base import AcceptanceRule, Accepted, TargetDistributions

if TYPE_CHECKING:
    from torch import Tensor

    from tokenleap.core.distribution import Distribution
    from tokenleap.core.noise import StepNoise
    from tokenleap.core.tree import Draft

__all__ = ["KSequential", "Selection"]

PRECISION = 1e-12
"""How far rho may lie above its optimum. A larger rho accepts less and is still lossless."""


class KSequential(AcceptanceRule):
    """The rule `k_sequential`: lossless, for chains and for trees with independent siblings."""

    name: ClassVar[str] = "k_sequential"
    lossless: ClassVar[bool] = True
    takes_trees: ClassVar[bool] = True
    counts_draws: ClassVar[bool] = True
    needs_independent_siblings: ClassVar[bool] = True

    def accept(self, draft: Draft, p: TargetDistributions, noise: StepNoise) -> Accepted:
        """See `AcceptanceRule.accept`."""
        node, depth = 0, 0
        path: list[int] = []
        rejected: list[int] = []
        while tries := list(draft.tries(node)):
            q = tries[0][1]
            assert all(other is q for _, other in tries), "siblings share their distribution"
            selection = Selection.of(p[node], q, len(tries))
            for trial, (child, _) in enumerate(tries):
                if noise.accepts(selection.ratio(draft.tree.tokens[child]), depth, trial):
                    path.append(child)
                    break
                if child not in rejected:
                    rejected.append(child)
            else:
                reason = f"none of {len(tries)} passed at scale {selection.rho:.3g}"
                token = noise.draw(selection.residual(), depth)
                return Accepted(tuple(path), token, tuple(rejected), reason)
            if path[-1] in rejected:  # another draw of the same token passed
                rejected.remove(path[-1])
            node, depth = path[-1], depth + 1
        return Accepted(tuple(path), noise.draw(p[node], depth), tuple(rejected))

    def beta(self, draft: Draft, p: TargetDistributions, noise: StepNoise) -> float:
        """Sum of min(p, q), as for any draft of one token; see `AcceptanceRule.beta`."""
        return p[0].overlap(draft.q_of(1))


@dataclass(frozen=True)
class Selection:
    """The selection of one of k siblings.

    Args:
        p: the target's distribution, in float64.
        q: the distribution of every sibling, in float64.
        siblings: k, the number of siblings.
        rho: the scale on q: the smallest for which the residual is a distribution.
    """

    p: Distribution
    q: Distribution
    siblings: int
    rho: float

    @staticmethod
    def of(p: Distribution, q: Distribution, siblings: int) -> Selection:
        """The selection with the optimal rho; arguments as in the class, of any precision."""
        p, q = p.in_float64(), q.in_float64()
        q_probs = q.at(p.tokens).to(p.probs)  # [S]
        return Selection(p, q, siblings, _smallest_scale(p.probs, q_probs, siblings))

    def ratio(self, token: int) -> float:
        """The ratio p(x) / (rho * q(x)); the token passes with this probability, or 1 if larger."""
        q_token = self.q.prob(token)
        assert q_token > 0, "a drafted token was drawn from its q"
        return self.p.prob(token) / (self.rho * q_token)

    def residual(self) -> Distribution:
        """The distribution of the token if no sibling passed; p if rounding leaves no mass."""
        q_probs = self.q.at(self.p.tokens).to(self.p.probs)  # [S]
        passing = q_probs.minimum(self.p.probs / self.rho)  # [S]
        tried = _mean_trials(passing, self.siblings)
        excess = (self.p.probs - tried * passing).clamp(min=0)  # below 0 only by rounding
        total = excess.sum()
        return self.p.normalised(excess / total) if float(total) > 0 else self.p


def _smallest_scale(p: Tensor, q: Tensor, siblings: int) -> float:
    """The smallest rho with n <= rho, for probabilities p, q [S].

    If a scale satisfies n <= rho, every larger one does: rho * beta = sum of min(rho * q, p) grows
    with rho, and the probability that one of k siblings passes shrinks. The search therefore
    brackets the smallest one. It uses false position for speed (the Illinois method), and every
    third step bisects, which guarantees convergence.
    """

    def slack(rho: float) -> float:
        return rho - _mean_trials(q.minimum(p / rho), siblings)

    low, high = 1.0, float(siblings)
    below, above = slack(low), slack(high)
    if below >= 0:
        return low
    step, last = 0, 0.0
    while above > 0 and high - low > PRECISION:
        step += 1
        split = 0.5 if step % 3 == 0 else below / (below - above)
        middle = low + split * (high - low)
        found = slack(middle)
        if found < 0:
            low, below, above = middle, found, above / 2 if last < 0 else above
        else:
            high, above, below = middle, found, below / 2 if last > 0 else below
        last = found
    return high


def _mean_trials(passing: Tensor, siblings: int) -> float:
    """Mean trials n = (1 - (1 - beta)^k) / beta, with beta the sum of `passing` [S].

    It is summed as a geometric series, which also holds for beta = 0 (n = k).
    """
    fails = max(0.0, 1 - float(passing.sum()))
    return sum(fails**trial for trial in range(siblings))
