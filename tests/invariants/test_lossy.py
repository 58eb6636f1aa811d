"""Promises of the lossy rules, in place of exactness."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch

from tests.enumeration import (
    Context,
    DistributionOf,
    ScriptedNoise,
    TableDistributions,
    chains,
    decisions,
    distance,
    output_distribution,
    random_distributions,
    trees,
    without_replacement,
)
from tests.matrix import tiny_llm
from tests.tiny import tiny_model
from tokenleap import CompatibilityError, ConfigError, SamplingParams
from tokenleap.core.acceptance import RULES, AcceptanceRule
from tokenleap.core.acceptance.rules import (
    Distance,
    Lenient,
    Rejection,
    Synthetic,
    TopBeta,
    Typical,
)
from tokenleap.core.distribution import Distribution
from tokenleap.core.sampler import Sampler, TreeDistributions
from tokenleap.core.tree import Draft, TokenTree, chain

LOSSY = [name for name, rule in RULES.items() if not rule.lossless]
JUDGING_TOKENS = [name for name in LOSSY if name not in ("lenient", "synthetic")]
"""Rules that judge each token on its own; `lenient` tries siblings in turn, as `rejection` does."""


@pytest.mark.parametrize("lenience", [0.2, 0.5, 0.9])
@pytest.mark.parametrize("seed", range(3))
def test_lenient_makes_no_token_more_probable_than_p_over_l(lenience: float, seed: int) -> None:
    p, q = random_distributions(4, seed), random_distributions(4, seed + 100)
    rule = Lenient(Lenient.Options(lenience=lenience))
    for drafts in (chains(q, 1), trees(q, without_replacement, 2, 1)):
        outcomes = output_distribution(rule, drafts, p, length=1)
        assert sum(outcomes.values()) == pytest.approx(1)
        for (token,), probability in outcomes.items():
            assert probability <= p(()).prob(token) / lenience + 1e-9


def test_lenient_with_factor_1_is_rejection() -> None:
    p, q = random_distributions(3, 1), random_distributions(3, 2)
    rule = Lenient(Lenient.Options(lenience=1.0))
    assert distance(output_distribution(rule, chains(q, 2), p, 3), p, 3) < 1e-6


def test_lenient_accepts_more() -> None:
    p, q = random_distributions(4, 1), random_distributions(4, 2)

    def accepted(rule: AcceptanceRule) -> float:
        return sum(
            draft_weight * weight * len(decision.path)
            for draft, draft_weight in chains(q, 2)
            for decision, weight in decisions(rule, draft, p)
        )

    rates = [accepted(Lenient(Lenient.Options(lenience=x))) for x in (1.0, 0.6, 0.3)]
    assert rates == sorted(rates)
    assert rates[0] < rates[-1]


class GreedyDistributions(TableDistributions):
    """One-hot p, with the likelihoods still to be had."""

    greedy = True

    def __getitem__(self, node: int) -> Distribution:
        distribution = super().__getitem__(node)
        return Distribution.one_hot(int(distribution.tokens[distribution.probs.argmax()]))

    def untempered(self, node: int) -> Distribution:
        return super().__getitem__(node)


def greedy_tokens(rule: AcceptanceRule, p: DistributionOf) -> list[int]:
    """The drafted tokens that a rule accepts where decoding is greedy."""
    drafts = [Draft.deterministic(chain([0, token])) for token in range(5)]
    return [
        token
        for token, draft in enumerate(drafts)
        if rule.accept(draft, GreedyDistributions(p, draft.tree), DrawsTheOnly()).path
    ]


@pytest.mark.parametrize("lenience", [0.1, 0.5, 1.0])
def test_greedy_lenient_compares_with_the_best(lenience: float) -> None:
    p = random_distributions(5, 3, sharpness=0.7)
    least = lenience * float(p(()).probs.max())
    accepted = greedy_tokens(Lenient(Lenient.Options(lenience=lenience)), p)
    assert accepted == [token for token in range(5) if p(()).prob(token) >= least]


class DrawsTheOnly(ScriptedNoise):
    """For one-hot distributions: there is one answer."""

    def __init__(self) -> None:
        super().__init__([])

    def draw(self, distribution: Distribution, depth: int) -> int:
        assert distribution.certain is not None
        return distribution.certain


@pytest.mark.parametrize("rule", ["lenient", "top_beta", "distance"])
def test_a_sampled_distribution_of_one_token_is_not_greedy_decoding(rule: str) -> None:
    """Truncation can leave a single token; what it cut off is impossible, not merely unlikely."""
    only = random_distributions(5, 3, zeros=4)
    best = only(()).certain
    assert best is not None
    draft = Draft.deterministic(chain([0, (best + 1) % 5]))
    for decision, _ in decisions(RULES[rule](), draft, only):
        assert decision.path == ()
        assert decision.token == best


@pytest.mark.parametrize("token", range(5))
def test_typical_threshold(token: int) -> None:
    distribution = random_distributions(5, 3, sharpness=0.7)(())
    rule = Typical(Typical.Options(posterior_threshold=0.2, posterior_alpha=0.6))
    threshold = min(0.2, 0.6 * math.exp(-distribution.entropy()))
    ((decision, _), *_) = decisions(
        rule, Draft.deterministic(chain([0, token])), lambda _: distribution
    )
    assert bool(decision.path) == (distribution.prob(token) > threshold)


def test_typical_is_greedy_where_p_is_one_hot() -> None:
    p = random_distributions(5, 3)
    assert greedy_tokens(Typical(), p) == [int(p(()).probs.argmax())]


@pytest.mark.parametrize(("beta", "tau"), [(1, 5.0), (2, 5.0), (3, 0.1), (5, 0.7)])
def test_top_beta_keeps_the_best_within_the_gap(beta: int, tau: float) -> None:
    p = random_distributions(5, 3, sharpness=0.7)
    distribution = p(())
    ranked = sorted(range(5), key=distribution.prob, reverse=True)[:beta]
    least = distribution.prob(ranked[0]) * math.exp(-tau)
    accepted = greedy_tokens(TopBeta(TopBeta.Options(beta=beta, tau=tau)), p)
    assert accepted == sorted(token for token in ranked if distribution.prob(token) >= least)


@pytest.mark.parametrize("epsilon", [0, 1, 3])
def test_distance_is_that_of_token_ids(epsilon: int) -> None:
    p = random_distributions(5, 3, sharpness=0.7)
    best = int(p(()).probs.argmax())
    accepted = greedy_tokens(Distance(Distance.Options(epsilon=epsilon)), p)
    assert accepted == [token for token in range(5) if abs(token - best) <= epsilon]


def test_distance_0_is_greedy_verification() -> None:
    """Only the draft that the target would have written remains."""
    p = random_distributions(4, 2)
    rule = Distance(Distance.Options(epsilon=0))
    for draft, _ in trees(random_distributions(4, 102), without_replacement, 2, 2):
        ours = rule.accept(draft, GreedyDistributions(p, draft.tree), DrawsTheOnly())
        exact = Rejection().accept(draft, GreedyDistributions(p, draft.tree), AcceptsTheCertain())
        assert (ours.path, ours.token) == (exact.path, exact.token)


@pytest.mark.parametrize(
    "rule",
    [
        Lenient(Lenient.Options(lenience=1.0)),
        TopBeta(TopBeta.Options(beta=1)),
        Distance(Distance.Options(epsilon=0)),
    ],
    ids=lambda rule: str(rule.name),
)
def test_the_strictest_options_are_greedy_on_ties(rule: AcceptanceRule) -> None:
    """Of logits that are equal, or whose probabilities round to the same, only the target's."""
    sampler = Sampler(SamplingParams(temperature=0), 6, [1])
    ties = ([0.0, 2.0, 1.0, 2.0, 2.0, -1.0], [3.0, 0.0, 0.0, 3.0 + 2**-22, 0.0, 3.0])
    for values in ties:
        logits = torch.tensor([values, values])
        best = int(logits[0].argmax())
        for token in range(6):
            draft = Draft.deterministic(chain([0, token]))
            p = TreeDistributions(logits, draft.tree, sampler, [])
            decision = rule.accept(draft, p, DrawsTheOnly())
            assert bool(decision.path) == (token == best)
            assert decision.token == best


class AcceptsTheCertain(DrawsTheOnly):
    """For rules that compare one-hot distributions: a ratio is 0 or at least 1."""

    def accepts(self, ratio: float, depth: int, trial: int = 0) -> bool:
        assert ratio == 0 or ratio >= 1
        return ratio >= 1


@pytest.mark.parametrize("rule", [Distance, TopBeta])
@pytest.mark.parametrize("minimum", [1, 2, 3, 9])
def test_a_minimum_block_is_committed(rule: type[Distance | TopBeta], minimum: int) -> None:
    """The longest path that passes, then what was drafted first below it."""
    p = random_distributions(4, 3)
    best = int(p(()).probs.argmax())
    other = (best + 2) % 4
    tree = TokenTree((0, other, best, other, best, other), (-1, 0, 0, 1, 1, 2))
    wide = {"epsilon": 0} if rule is Distance else {"beta": 1}
    decide = rule(rule.Options(minimum_block=minimum, **wide))
    draft = Draft.deterministic(tree)
    decision = decide.accept(draft, GreedyDistributions(p, tree), DrawsTheOnly())
    passing = [2, 5]
    after = int(p((best,)).probs.argmax())
    longest = 2 if after == other else 1
    assert decision.path == tuple(passing[: max(longest, min(2, minimum - 1))])


@pytest.mark.parametrize("rule", [Distance, TopBeta])
def test_a_minimum_block_has_no_impossible_tokens(rule: type[Distance | TopBeta]) -> None:
    """Tokens that a mask excludes are not committed, however short the block."""
    p = random_distributions(5, 3, zeros=4)
    best = p(()).certain
    assert best is not None
    draft = Draft.deterministic(chain([0, (best + 1) % 5, best]))
    decide = rule(rule.Options(minimum_block=3))
    for decision, _ in decisions(decide, draft, p):
        assert (decision.path, decision.token) == ((), best)


@pytest.mark.parametrize("rule", JUDGING_TOKENS)
def test_the_longest_passing_path_wins(rule: str) -> None:
    def distribution_of(context: Context) -> Distribution:
        return random_distributions(3, 1, sharpness=0.01)(
            context
        )  # nearly uniform: everything passes

    tree = TokenTree((0, 1, 2, 0, 1), (-1, 0, 0, 2, 3))  # 1 | 2 0 1
    every: dict[str, dict[str, Any]] = {
        "top_beta": {"beta": 3},
        "typical": {"posterior_alpha": 0.5},
        "distance": {"epsilon": 2},
    }
    options = every[rule]
    accept = RULES[rule](RULES[rule].Options(**options))
    for decision, _ in decisions(accept, Draft.deterministic(tree), distribution_of):
        assert decision.path == (2, 3, 4)


# `synthetic`: promises a mean acceptance length, and nothing of the text.


def kept(options: dict[str, Any], gamma: int) -> list[float]:
    """The probability of each number of accepted tokens of a chain of gamma."""
    rule = Synthetic(Synthetic.Options(**options))
    draft = Draft.deterministic(chain([0, *[1] * gamma]))
    shares = [0.0] * (gamma + 1)
    for decision, weight in decisions(rule, draft, random_distributions(3, 1)):
        shares[len(decision.path)] += weight
        assert bool(decision.rejected) == (len(decision.path) < gamma)
    return shares


@pytest.mark.parametrize("gamma", [0, 1, 5])
@pytest.mark.parametrize("rate", [0.0, 0.3, 0.8])
def test_synthetic_acceptance_has_the_mean_length_of_its_rate(rate: float, gamma: int) -> None:
    mean = 1 + sum(n * share for n, share in enumerate(kept({"acceptance_rate": rate}, gamma)))
    assert mean == pytest.approx((1 - rate ** (gamma + 1)) / (1 - rate))


def test_synthetic_acceptance_takes_vllms_rates_and_length() -> None:
    """Rates include the tokens before; a length varies as little as it can."""
    rates = {"acceptance_rates": (0.7, 0.5, 0.5)}
    assert kept(rates, 5) == pytest.approx([0.3, 0.2, 0.0, 0.5, 0.0, 0.0])
    assert kept({"acceptance_rates": (0.5, 0.0, 0.0)}, 3) == pytest.approx([0.5, 0.5, 0, 0])
    assert kept({"acceptance_length": 3.5}, 5) == pytest.approx([0, 0, 0.5, 0.5, 0, 0])
    assert kept({"acceptance_length": 1}, 2) == pytest.approx([1, 0, 0])


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"acceptance_rate": 0.5, "acceptance_length": 2}, "give one of them"),
        ({"acceptance_rates": (0.5, 0.6)}, "none grows"),
        ({"acceptance_rate": 1.1}, "acceptance_rate"),
    ],
)
def test_contradictory_synthetic_acceptance_is_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        Synthetic.Options(**options)


@pytest.mark.parametrize("method", ["random", "draft_model"])
def test_generation_has_the_synthetic_acceptance(
    method: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever drafts. It is warned of, and takes no forms, which it could not keep.

    By Hoeffding's inequality, the share of n first tokens that are kept is farther than 0.15 from
    the rate with a probability below 2 exp(-0.045 n), 5e-8 for n = 390.
    """
    acceptance = {"rule": "synthetic", "acceptance_rate": 0.8}
    with caplog.at_level(logging.WARNING, "tokenleap"):
        llm = tiny_llm(tiny_model(), method, gamma=3, acceptance=acceptance)
    assert "the text is NOT the model's" in caplog.text
    params = SamplingParams(temperature=0, max_tokens=300, seed=1, ignore_eos=True)
    outputs = llm.generate([[1, 2, 3], [4, 5], [6, 7], [8], [9]], params)
    drafts = sum(output.metrics.num_drafts for output in outputs)
    first = sum(output.metrics.accepted_per_position[0] for output in outputs)
    assert drafts >= 390
    assert first / drafts == pytest.approx(0.8, abs=0.15)
    with pytest.raises(ConfigError, match="keeps to no form"):
        llm.generate([1], SamplingParams(structured_outputs={"choice": ["a"]}))
    with pytest.raises(CompatibilityError, match="takes chains only"):
        llm.generate([1], speculative_config={"method": "recycle", "acceptance": acceptance})
