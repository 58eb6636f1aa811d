"""The acceptance rules: a class for each, lossless ones first."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, ClassVar, Self, TypeAlias

from annotated_types import Ge, Gt, Le, Lt
from pydantic import FiniteFloat, model_validator

from tokenleap.core.acceptance.base import AcceptanceRule, Accepted, TargetDistributions
from tokenleap.core.config import Config

if TYPE_CHECKING:
    from torch import Tensor

    from tokenleap.core.distribution import Distribution
    from tokenleap.core.noise import StepNoise
    from tokenleap.core.tree import Draft


class Coupled(AcceptanceRule):
    """Seeded sampling that does not depend on the drafter: lossless, for all chains and trees.

    The target's token at position t is `argmax(log p + noise)`, and the noise is a function of seed
    and t alone. A drafted token is accepted if it is that token. Every committed token is therefore
    the token that plain decoding draws. Another drafter, draft length or batch does not change the
    output.

    The acceptance rate for a one-hot q is that of speculative sampling. For a sampled q it is
    slightly lower: with D the total variation distance of p and q, the Gumbel coupling accepts with
    probability at least (1 - D) / (1 + D), and speculative sampling with 1 - D. Daliri et al.,
    "Coupling without Communication and Drafter-Invariant Speculative Decoding".
    """

    name: ClassVar[str] = "coupled"
    lossless: ClassVar[bool] = True
    takes_trees: ClassVar[bool] = True
    counts_draws: ClassVar[bool] = True
    couples_draft: ClassVar[bool] = True
    ignores_draft_lengths: ClassVar[bool] = True

    def accept(self, draft: Draft, p: TargetDistributions, noise: StepNoise) -> Accepted:
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


class _Exact(AcceptanceRule):
    lossless: ClassVar[bool] = True

    def beta(self, draft: Draft, p: TargetDistributions, noise: StepNoise) -> float:
        """Sum of min(p, q), as for any draft of one token (Leviathan et al., theorem 3.5)."""
        return p[0].overlap(draft.q_of(1))


class Rejection(_Exact):
    """Speculative sampling: accept with probability min(1, p/q), else draw from the residual.

    Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", algorithm 1.
    Trees use the multi-round form of SpecInfer (Miao et al., algorithm 2): siblings are tried in
    turn, and each is compared with the residual distribution that the one before it left. By
    invariant 2 this is lossless for independent siblings, for siblings drawn without replacement
    and for deterministic siblings.
    """

    name: ClassVar[str] = "rejection"
    takes_trees: ClassVar[bool] = True
    counts_draws: ClassVar[bool] = True

    def accept(self, draft: Draft, p: TargetDistributions, noise: StepNoise) -> Accepted:
        return accept_by_ratio(draft, p, noise, lenience=1.0)


def accept_by_ratio(
    draft: Draft, p: TargetDistributions, noise: StepNoise, lenience: float
) -> Accepted:
    """Walk down the tree; a drafted x passes if r < p(x) / (lenience * q(x)), r uniform."""
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


class Block(_Exact):
    """Accept a chain as a whole instead of token by token: lossless.

    Sun et al., "Block Verification Accelerates Speculative Decoding", algorithm 2. Its mean
    acceptance length is never below that of speculative sampling. With w_0 = 1 and w_i =
    min(w_{i-1} * p(x_i) / q(x_i), 1), the prefix of length i passes with probability

        h_i = R_i / (R_i + 1 - w_i),   R_i = sum_x max(w_i * p(x | x_1..i) - q(x | x_1..i), 0)

    (h_gamma = w_gamma), independently for each i. The longest prefix that passes is accepted. The
    next token is drawn from norm(max(w_i * p - q, 0)), or from p after the whole chain.
    """

    name: ClassVar[str] = "block"
    takes_trees: ClassVar[bool] = False

    def accept(self, draft: Draft, p: TargetDistributions, noise: StepNoise) -> Accepted:
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


def _pass_probability(draft: Draft, p: TargetDistributions, i: int, weight: float) -> float:
    """h_i: the probability that the prefix of length i passes; `weight` is w_i."""
    if i == draft.tree.num_drafted:
        return weight
    excess = float(p[i].excess(draft.q_of(i + 1), weight=weight).sum())  # R_i
    total = excess + 1 - weight
    return excess / total if total > 0 else 1.0


PRECISION = 1e-12
"""How far rho may lie above its optimum. A larger rho accepts less and is still lossless."""


class KSequential(_Exact):
    """One scale rho for all siblings, which are independent draws from one q: lossless.

    Sun et al., "SpecTr: Fast Speculative Decoding via Optimal Transport" (K-SEQ). The k siblings
    are tried in turn. A sibling x passes with probability min(1, p(x) / (rho * q(x))); averaged
    over x, this is beta = sum_x min(q(x), p(x) / rho). On average n = (1 - (1 - beta)^k) / beta
    siblings are tried. If none passes, the token is drawn from the residual distribution

        norm(p(x) - n * min(q(x), p(x) / rho))

    which is a distribution if n <= rho. The smallest such rho in [1, k] has the highest acceptance
    rate. One sibling has rho = 1, which is plain speculative sampling. In a tree, each level is
    selected separately.
    """

    name: ClassVar[str] = "k_sequential"
    takes_trees: ClassVar[bool] = True
    counts_draws: ClassVar[bool] = True
    needs_independent_siblings: ClassVar[bool] = True

    def accept(self, draft: Draft, p: TargetDistributions, noise: StepNoise) -> Accepted:
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


@dataclass(frozen=True)
class Selection:
    """The selection of one of k siblings.

    Args:
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


# `typical`, `top_beta`, `lenient` and `distance` judge each drafted token on its own: the longest
# path of tokens that pass wins.


class _ByToken(AcceptanceRule):
    lossless: ClassVar[bool] = False
    takes_trees: ClassVar[bool] = True
    counts_draws: ClassVar[bool] = True


class BlockOptions(Config):
    """Options of rules that may accept more than what passes.

    Args:
        minimum_block: fewest tokens of a step, including the one after the accepted ones. Drafted
            tokens are kept untested until there are so many.
    """

    minimum_block: Annotated[int, Ge(1)] = 1


def likelihoods(p: TargetDistributions, node: int) -> Distribution:
    """The distribution after a node, in greedy decoding that at temperature 1.

    Its tokens with probability 0 are impossible: a mask or a truncation excludes them.
    """
    return p.untempered(node) if p.greedy else p[node]


def accept_longest(
    draft: Draft,
    p: TargetDistributions,
    noise: StepNoise,
    passes: Callable[[int, int], bool],
    reason: str,
    least: int = 0,
) -> Accepted:
    """Accept the longest path on which every token passes; on a tie the path drafted first.

    Args:
        least: fewest tokens to accept. If the path is shorter, it goes on with what was drafted
            first, as long as that is possible.
    """
    tree = draft.tree
    passed = {0}
    for node in range(1, len(tree)):
        parent = tree.parents[node]
        if parent in passed and passes(parent, tree.tokens[node]):
            passed.add(node)
    last = max(sorted(passed), key=lambda node: tree.depths[node])
    while tree.depths[last] < least and tree.children[last]:
        first = tree.children[last][0]
        if likelihoods(p, last).prob(tree.tokens[first]) == 0:
            break
        last = first
        passed.add(last)
    rejected = tuple(child for child in tree.children[last] if child not in passed)
    token = noise.draw(p[last], tree.depths[last])
    return Accepted(tree.path(last), token, rejected, reason if rejected else "")


class Typical(_ByToken):
    """Keep tokens that are not too improbable, given the target's uncertainty: lossy.

    Cai et al., "Medusa", section 2.3.1: a drafted x passes if p(x) > min(posterior_threshold,
    posterior_alpha * exp(-H(p))), with H the entropy of p in nats. Option names and defaults are
    vLLM's. The rule is lossy, except at temperature 0.
    """

    class Options(Config):
        """Options of `typical`, under vLLM's names.

        Args:
            posterior_threshold: a drafted token with a larger p is always kept.
            posterior_alpha: a drafted token is also kept if its p is above this times exp(-H), with
                H the entropy of p in nats.
        """

        posterior_threshold: Annotated[float, Gt(0), Le(1)] = 0.09
        posterior_alpha: Annotated[float, Gt(0), Lt(1)] = 0.3

    name: ClassVar[str] = "typical"

    def accept(self, draft: Draft, p: TargetDistributions, noise: StepNoise) -> Accepted:
        options = self.options
        assert isinstance(options, self.Options)

        def passes(node: int, token: int) -> bool:
            distribution = p[node]
            threshold = options.posterior_alpha * math.exp(-distribution.entropy())
            return distribution.prob(token) > min(options.posterior_threshold, threshold)

        return accept_longest(draft, p, noise, passes, "p below the typical threshold")


class TopBeta(_ByToken):
    """Spec-Verification: keep tokens near the target's best ones, as SpecDec does: lossy.

    Xia et al., "Speculative Decoding: Exploiting Speculative Execution for Accelerating Seq2seq
    Generation", equations 8 and 9: a drafted x passes if log p(x) >= log p(the beta-th best) and
    log p(best) - log p(x) <= tau. With beta = 1 this is greedy verification. At temperature 0 the
    rule compares the probabilities at temperature 1. It is lossy for beta > 1.

    With a tau that excludes nothing, it is the top-k criterion of Stern et al., "Blockwise Parallel
    Decoding for Deep Autoregressive Models", section 5.1; `minimum_block` is their section 5.3.
    """

    class Options(BlockOptions):
        """Options of `top_beta`, besides those of `BlockOptions`.

        Args:
            beta: a drafted token must be among this many most probable tokens.
            tau: largest log-likelihood gap to the most probable token, in nats.
        """

        beta: Annotated[int, Ge(1)] = 3
        tau: Annotated[FiniteFloat, Ge(0)] = 1.0

    name: ClassVar[str] = "top_beta"

    def accept(self, draft: Draft, p: TargetDistributions, noise: StepNoise) -> Accepted:
        options = self.options
        assert isinstance(options, self.Options)

        def passes(node: int, token: int) -> bool:
            best = p.greedy and p[node].certain == token
            if best or (p.greedy and options.beta == 1):  # of several best ones only p knows which
                return best
            distribution = likelihoods(p, node)
            probability, probs = distribution.prob(token), distribution.probs
            if probability == 0:
                return False
            most = float(probs.max())
            if math.log(most) - math.log(probability) > options.tau:
                return False
            # Counting takes less time than sorting.
            return probability == most or int((probs > probability).sum()) < options.beta

        reason = "outside the target's top candidates"
        return accept_longest(draft, p, noise, passes, reason, options.minimum_block - 1)


class Lenient(_ByToken):
    """Lenient speculative sampling: the output may exceed p by the factor 1 / l: lossy.

    Leviathan et al., appendix A.5. Sampling compares r with p / (l * q). No token becomes more
    probable than p / l. At temperature 0 a drafted x passes if p(x) >= l * max p, with p at
    temperature 1. The rule is lossy for l < 1.
    """

    class Options(Config):
        """Options of `lenient`.

        Args:
            lenience: the factor l on q; 1 is lossless. No token becomes more probable than p / l.
        """

        lenience: Annotated[float, Gt(0), Le(1)] = 0.5

    name: ClassVar[str] = "lenient"

    def accept(self, draft: Draft, p: TargetDistributions, noise: StepNoise) -> Accepted:
        assert isinstance(self.options, self.Options)
        lenience = self.options.lenience
        if not p.greedy:
            return accept_by_ratio(draft, p, noise, lenience)

        def passes(node: int, token: int) -> bool:
            best = p[node].certain == token
            if best or lenience == 1:  # of several best ones only p knows which
                return best
            distribution = p.untempered(node)
            return distribution.prob(token) >= lenience * float(distribution.probs.max())

        return accept_longest(draft, p, noise, passes, f"p below {lenience:g} of the best")

    def beta(self, draft: Draft, p: TargetDistributions, noise: StepNoise) -> float:
        """Sum of min(p / l, q) if sampled (A.5), else the decision; see `AcceptanceRule.beta`."""
        assert isinstance(self.options, self.Options)
        if p.greedy:
            return super().beta(draft, p, noise)
        return p[0].overlap(draft.q_of(1), self.options.lenience) / self.options.lenience


class Distance(_ByToken):
    """Keep tokens whose ids are close to the target's best one's: lossy.

    Stern et al., "Blockwise Parallel Decoding for Deep Autoregressive Models", section 5.2: where
    the vocabulary is ordered, as for pixel values, a drafted x passes if |x - argmax p| <= epsilon.
    The rule is lossy for epsilon > 0. `minimum_block` is section 5.3 of the paper.
    """

    class Options(BlockOptions):
        """Options of `distance`, besides those of `BlockOptions`.

        Args:
            epsilon: largest difference between the ids of a drafted token and of the target's most
                probable one.
        """

        epsilon: Annotated[int, Ge(0)] = 2

    name: ClassVar[str] = "distance"

    def accept(self, draft: Draft, p: TargetDistributions, noise: StepNoise) -> Accepted:
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


_Rate: TypeAlias = Annotated[float, Ge(0), Le(1)]


class Synthetic(AcceptanceRule):
    """Keep drafted tokens by chance, to measure speed at a given acceptance: the text is worthless.

    The acceptance depends on nothing but the options, so prompts and drafters may be any. It is
    vLLM's `rejection_sample_method="synthetic"` and llama.cpp's `--spec-synthetic-acceptance-rates`
    and `-length`. Tokens that masks or a truncation exclude are kept, too.
    """

    class Options(Config):
        """Options of `synthetic`: one of these.

        Args:
            acceptance_rate: the probability that a drafted token is kept if those before it are. A
                chain of k then gives (1 - a^(k + 1)) / (1 - a) tokens a pass on average (Leviathan
                et al., equation 1).
            acceptance_rates: by position, the probability that the token and all before it are
                kept: vLLM's `synthetic_acceptance_rates`. They do not increase, and are 0 after
                the last.
            acceptance_length: mean tokens of a pass, the one after the accepted ones included:
                vLLM's `synthetic_acceptance_length`. As there, the number of accepted tokens varies
                as little as possible. Drafts must be as long.
        """

        acceptance_rate: _Rate = 0.8
        acceptance_rates: tuple[_Rate, ...] | None = None
        acceptance_length: Annotated[FiniteFloat, Ge(1), Le(257)] | None = None

        @model_validator(mode="after")
        def _one(self) -> Self:
            if len(self.model_fields_set) > 1:
                raise ValueError(
                    f"{' and '.join(sorted(self.model_fields_set))}: give one of them."
                )
            rates = self.acceptance_rates or ()
            if any(after > before for before, after in pairwise(rates)):
                raise ValueError(
                    "acceptance_rates: each includes all tokens before, so none grows."
                )
            return self

        def conditional(self, depth: int) -> float:
            """The probability that a token is kept whose parent, of this depth, is."""
            if self.acceptance_length is not None:
                return max(0.0, min(1.0, self.acceptance_length - 1 - depth))
            rates = self.acceptance_rates
            if rates is None:
                return self.acceptance_rate
            before = rates[depth - 1] if 0 < depth < len(rates) else 1.0
            return rates[depth] / before if before and depth < len(rates) else 0.0

    name: ClassVar[str] = "synthetic"
    lossless: ClassVar[bool] = False
    takes_trees: ClassVar[bool] = False
    by_chance: ClassVar[bool] = True

    def accept(self, draft: Draft, p: TargetDistributions, noise: StepNoise) -> Accepted:
        assert isinstance(self.options, self.Options)
        assert draft.tree.is_chain, "synthetic acceptance takes chains"
        drafted, kept = draft.tree.num_drafted, 0
        while kept < drafted and noise.accepts(self.options.conditional(kept), kept):
            kept += 1
        path, token = tuple(range(1, kept + 1)), noise.draw(p[kept], kept)
        if kept == drafted:
            return Accepted(path, token)
        return Accepted(path, token, (kept + 1,), "by chance")

    def beta(self, draft: Draft, p: TargetDistributions, noise: StepNoise) -> float:
        """The rate of the first token."""
        assert isinstance(self.options, self.Options)
        return self.options.conditional(0)
