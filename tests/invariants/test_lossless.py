"""Invariants 2 and 3: the output of a lossless rule has exactly the target's distribution.

By enumeration of every draft and every outcome on tiny vocabularies; nothing is sampled here.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest

from tests.enumeration import (
    DistributionOf,
    Siblings,
    chains,
    decisions,
    distance,
    independent,
    most_likely,
    output_distribution,
    random_distributions,
    trees,
    without_replacement,
)
from tokenleap.core.acceptance import PLUGINS, RULES, rule_class
from tokenleap.core.config import plugin_names
from tokenleap.core.distribution import Distribution, truncated

REGISTERED = {name: rule_class(name) for name in (*RULES, *plugin_names(PLUGINS))}
"""Every rule that a configuration can name, those of other packages included."""
LOSSLESS = [name for name, rule in REGISTERED.items() if rule.lossless]
LOSSY = [name for name in REGISTERED if name not in LOSSLESS]
SIBLINGS = (independent, without_replacement, most_likely)


def takes(rule: str, siblings: Siblings) -> bool:
    """Whether the rule takes trees whose siblings are chosen so."""
    kind = REGISTERED[rule]
    if kind.needs_independent_siblings and siblings is not independent:
        return False
    return kind.takes_trees


ON_TREES = [(name, siblings) for name in LOSSLESS for siblings in SIBLINGS if takes(name, siblings)]
TOLERANCE = 1e-6


@pytest.mark.parametrize("rule", LOSSLESS)
@pytest.mark.parametrize("gamma", [0, 1, 2, 3])
@pytest.mark.parametrize("seed", range(3))
def test_chains(rule: str, gamma: int, seed: int) -> None:
    p, q = random_distributions(3, seed), random_distributions(3, seed + 100)
    outcomes = output_distribution(REGISTERED[rule](), chains(q, gamma), p, length=gamma + 1)
    assert sum(outcomes.values()) == pytest.approx(1)
    assert distance(outcomes, p, gamma + 1) < TOLERANCE


@pytest.mark.parametrize("rule", LOSSLESS)
@pytest.mark.parametrize(("p_zeros", "q_zeros"), [(2, 0), (0, 2), (2, 2), (3, 3)])
def test_chains_with_disjoint_supports(rule: str, p_zeros: int, q_zeros: int) -> None:
    p, q = random_distributions(4, 7, zeros=p_zeros), random_distributions(4, 9, zeros=q_zeros)
    outcomes = output_distribution(REGISTERED[rule](), chains(q, 2), p, length=3)
    assert distance(outcomes, p, 3) < TOLERANCE


@pytest.mark.parametrize("rule", LOSSLESS)
def test_a_perfect_drafter_is_always_accepted(rule: str) -> None:
    p = random_distributions(3, 5)
    outcomes = output_distribution(REGISTERED[rule](), chains(p, 2), p, length=3)
    assert distance(outcomes, p, 3) < TOLERANCE


@pytest.mark.parametrize(("rule", "siblings"), ON_TREES)
@pytest.mark.parametrize(
    ("width", "depth", "seed"),
    [
        *((2, 1, 0), (2, 1, 1), (3, 1, 0), (3, 1, 1), (2, 2, 0)),
        pytest.param(2, 2, 1, marks=pytest.mark.slow),
    ],
)
def test_trees(rule: str, siblings: Siblings, width: int, depth: int, seed: int) -> None:
    p, q = random_distributions(3, seed), random_distributions(3, seed + 100)
    outcomes = output_distribution(
        REGISTERED[rule](), trees(q, siblings, width, depth), p, length=depth + 1
    )
    assert distance(outcomes, p, depth + 1) < TOLERANCE


@pytest.mark.parametrize(("rule", "siblings"), ON_TREES)
def test_trees_with_impossible_tokens(rule: str, siblings: Siblings) -> None:
    p, q = random_distributions(5, 3, zeros=3), random_distributions(5, 8, zeros=2)
    outcomes = output_distribution(REGISTERED[rule](), trees(q, siblings, 2, 1), p, length=2)
    assert distance(outcomes, p, 2) < TOLERANCE


def truncated_q(seed: int, top_k: int, top_p: float) -> DistributionOf:
    """A random q, of which only the most probable tokens are left."""
    whole = random_distributions(5, seed)
    return cache(lambda context: truncated(whole(context), top_k, top_p))


@pytest.mark.parametrize(("top_k", "top_p"), [(2, 1.0), (0, 0.7), (4, 0.8), (1, 1.0)])
@pytest.mark.parametrize("rule", LOSSLESS)
def test_a_truncated_q(rule: str, top_k: int, top_p: float) -> None:
    """`draft_top_k` and `draft_top_p`: chains, and trees with and without replacement."""
    p, q = random_distributions(5, 2, zeros=1), truncated_q(102, top_k, top_p)
    outcomes = output_distribution(REGISTERED[rule](), chains(q, 2), p, length=3)
    assert distance(outcomes, p, 3) < TOLERANCE
    for siblings in (independent, without_replacement):
        if takes(rule, siblings) and top_k != 1:  # else there is no second sibling
            depth = 2 if (rule, top_k) == ("rejection", 2) else 1
            drafts = trees(q, siblings, 2, depth)
            outcomes = output_distribution(REGISTERED[rule](), drafts, p, depth + 1)
            assert distance(outcomes, p, depth + 1) < TOLERANCE


@pytest.mark.parametrize("rule", list(REGISTERED))
def test_every_rule_gives_a_distribution(rule: str) -> None:
    """The probabilities of all outcomes sum to 1, on chains and on every tree that it takes."""
    p, q = random_distributions(3, 1, zeros=1), random_distributions(3, 101)
    drafts = [chains(q, 2)]
    drafts += [trees(q, siblings, 2, 1) for siblings in SIBLINGS if takes(rule, siblings)]
    for every in drafts:
        outcomes = output_distribution(REGISTERED[rule](), every, p, length=3)
        assert sum(outcomes.values()) == pytest.approx(1)
        assert all(p(()).prob(tokens[0]) > 0 or rule in LOSSY for tokens in outcomes)


@pytest.mark.parametrize("rule", LOSSY)
def test_rules_that_say_they_are_lossy_are(rule: str) -> None:
    """On some drafts; a rule that is exact on all of them should say so."""
    found = 0.0
    for seed in range(4):
        p, q = random_distributions(4, seed), random_distributions(4, seed + 100)
        drafts = chains(q, 2)
        found = max(found, distance(output_distribution(REGISTERED[rule](), drafts, p, 3), p, 3))
    assert found > 0.01


def test_a_dropped_node_would_be_noticed() -> None:
    """The drafting invariant is needed: not proposing improbable tokens biases the output."""
    p, q = random_distributions(3, 1), random_distributions(3, 101)

    kept = [
        (draft, weight)
        for draft, weight in chains(q, 1)
        if draft.q_of(1).prob(draft.tree.tokens[1]) > 0.3
    ]
    total = sum(weight for _, weight in kept)
    biased = ((draft, weight / total) for draft, weight in kept)
    outcomes = output_distribution(REGISTERED["rejection"](), biased, p, length=1)
    assert distance(outcomes, p, 1) > 0.01


def test_a_wrong_q_would_be_noticed() -> None:
    """Siblings without replacement whose q forgets the earlier siblings are not lossless."""

    def forgetful(
        q: Distribution, width: int
    ) -> Iterator[tuple[tuple[int, ...], tuple[Distribution, ...], float]]:
        for tokens, distributions, weight in without_replacement(q, width):
            yield tokens, (distributions[0],) * width, weight

    p, q = random_distributions(6, 2), random_distributions(6, 102)
    outcomes = output_distribution(
        REGISTERED["rejection"](), trees(q, forgetful, 2, 1), p, length=1
    )
    assert distance(outcomes, p, 1) > 0.01


@pytest.mark.parametrize("gamma", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", range(4))
def test_block_accepts_at_least_as_much_as_rejection(gamma: int, seed: int) -> None:
    p, q = random_distributions(3, seed), random_distributions(3, seed + 50)

    def accepted(rule: str) -> float:
        return sum(
            draft_weight * weight * len(decision.path)
            for draft, draft_weight in chains(q, gamma)
            for decision, weight in decisions(REGISTERED[rule](), draft, p)
        )

    assert accepted("block") >= accepted("rejection") - 1e-12
