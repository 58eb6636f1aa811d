"""K-sequential selection: exact on every level, and as good as SpecTr says it is."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import pytest
import torch

from tests.enumeration import (
    Context,
    DistributionOf,
    chains,
    decisions,
    distance,
    independent,
    output_distribution,
    random_distributions,
    trees,
)
from tokenleap.core.acceptance import RULES
from tokenleap.core.acceptance.rules import KSequential, Selection
from tokenleap.core.distribution import Distribution
from tokenleap.core.tree import Draft, TokenTree

TOLERANCE = 1e-6


def acceptance(rule: str, p: DistributionOf, q: DistributionOf, width: int) -> float:
    """Probability that one of `width` siblings drawn from q is accepted, by enumeration."""
    return sum(
        draft_weight * weight
        for draft, draft_weight in trees(q, independent, width, 1)
        for decision, weight in decisions(RULES[rule](), draft, p)
        if decision.path
    )


def by_formula(p: DistributionOf, q: DistributionOf, width: int) -> float:
    """1 - (1 - beta)^k."""
    selection = Selection.of(p(()), q(()), width)
    passing = torch.minimum(selection.q.at(selection.p.tokens), selection.p.probs / selection.rho)
    return 1 - (1 - float(passing.sum())) ** width


def optimum(p: DistributionOf, q: DistributionOf, width: int, size: int) -> float:
    """The most that any rule can accept: the largest flow from sets of siblings to their tokens.

    By its smallest cut: over all sets H of tokens, p(H) and the siblings that do not all lie in H.
    """
    p_probs, q_probs = p(()).dense(size), q(()).dense(size)
    return min(
        float(p_probs[list(chosen)].sum() + 1 - q_probs[list(chosen)].sum() ** width)
        for count in range(size + 1)
        for chosen in combinations(range(size), count)
    )


def vocab_size(width: int, seed: int) -> int:
    """Of four siblings, three tokens have a third of the drafts that four have."""
    return 3 if width == 4 and seed else 4


@pytest.mark.parametrize("width", [1, 2, 3, 4])
@pytest.mark.parametrize(("p_zeros", "q_zeros"), [(0, 0), (2, 0), (0, 2), (2, 2), (3, 3)])
@pytest.mark.parametrize("seed", range(2))
def test_one_level_is_exact(width: int, p_zeros: int, q_zeros: int, seed: int) -> None:
    """Zeros included; with the most of each the supports may be disjoint, and beta 0."""
    size = vocab_size(width, seed)
    p = random_distributions(size, seed, zeros=min(p_zeros, size - 1))
    q = random_distributions(size, seed + 100, zeros=min(q_zeros, size - 1))
    outcomes = output_distribution(KSequential(), trees(q, independent, width, 1), p, length=2)
    assert sum(outcomes.values()) == pytest.approx(1)
    assert distance(outcomes, p, 2) < TOLERANCE


def one_family_below(
    q_of: DistributionOf, width: int, parent: int
) -> Iterator[tuple[Draft, float]]:
    """`width` siblings below the root, and as many below the `parent`-th of them."""
    for draft, weight in trees(q_of, independent, width, 1):
        tree = draft.tree
        q = q_of(tuple(tree.path_tokens(parent)))
        for tokens, distributions, rest in independent(q, width):
            parents = (*tree.parents, *(parent for _ in tokens))
            grown = TokenTree((*tree.tokens, *tokens), parents)
            yield Draft(grown, (*draft.q, *distributions)), weight * rest


@pytest.mark.parametrize(
    ("width", "parent"),
    [
        pytest.param(w, sibling, marks=pytest.mark.slow if w == 4 else ())
        for w in (1, 2, 3, 4)
        for sibling in range(1, w + 1)
    ],
)
def test_two_levels_are_exact(width: int, parent: int) -> None:
    p, q = random_distributions(3, 4, zeros=1), random_distributions(3, 104, zeros=1)
    outcomes = output_distribution(KSequential(), one_family_below(q, width, parent), p, length=3)
    assert sum(outcomes.values()) == pytest.approx(1)
    assert distance(outcomes, p, 3) < TOLERANCE


@pytest.mark.parametrize("width", [1, 2, 3, 4])
@pytest.mark.parametrize("depth", [1, 2])
def test_greedy_drafts_are_identical_siblings(width: int, depth: int) -> None:
    """At temperature 0 all siblings are the argmax: q is one-hot, p is anything."""
    p = random_distributions(3, 6)

    def argmax(context: Context) -> Distribution:
        return Distribution.one_hot(int(random_distributions(3, 7)(context).probs.argmax()))

    outcomes = output_distribution(
        KSequential(), trees(argmax, independent, width, depth), p, depth + 1
    )
    assert distance(outcomes, p, depth + 1) < TOLERANCE
    best = argmax(()).certain
    assert best is not None
    assert acceptance("k_sequential", p, argmax, width) == pytest.approx(p(()).prob(best))


@pytest.mark.parametrize("width", [1, 2, 4])
def test_a_greedy_target_takes_its_token_where_a_sibling_has_it(width: int) -> None:
    q = random_distributions(3, 8)

    def p(_: Context) -> Distribution:
        return Distribution.one_hot(1)

    outcomes = output_distribution(KSequential(), trees(q, independent, width, 1), p, length=1)
    assert outcomes == {(1,): pytest.approx(1)}
    missing = (1 - q(()).prob(1)) ** width
    assert acceptance("k_sequential", p, q, width) == pytest.approx(1 - missing)


def test_nothing_in_common_is_never_accepted() -> None:
    def p(_: Context) -> Distribution:
        return Distribution(torch.tensor([0.3, 0.7]), torch.tensor([0, 2]))

    def q(_: Context) -> Distribution:
        return Distribution(torch.tensor([0.6, 0.4]), torch.tensor([1, 3]))

    assert acceptance("k_sequential", p, q, 3) == 0
    outcomes = output_distribution(KSequential(), trees(q, independent, 3, 1), p, length=1)
    assert distance(outcomes, p, 1) < TOLERANCE


@pytest.mark.parametrize("seed", range(3))
def test_a_single_sibling_is_plain_speculative_sampling(seed: int) -> None:
    p, q = random_distributions(4, seed, zeros=1), random_distributions(4, seed + 100, zeros=1)
    for draft, _ in chains(q, 2):
        own = {(d.path, d.token): weight for d, weight in decisions(KSequential(), draft, p)}
        plain = {
            (d.path, d.token): weight for d, weight in decisions(RULES["rejection"](), draft, p)
        }
        assert own == pytest.approx(plain, abs=TOLERANCE)


@pytest.mark.parametrize("width", [1, 2, 5, 16, 64])
@pytest.mark.parametrize("seed", range(20))
def test_rho_is_the_smallest_scale_that_leaves_a_residual(width: int, seed: int) -> None:
    """1 - (1 - beta)^k = rho * beta, from the side where nothing of the residual is negative."""
    selection = Selection.of(
        random_distributions(9, seed)(()), random_distributions(9, seed + 100)(()), width
    )
    assert 1 <= selection.rho <= width
    q = selection.q.at(selection.p.tokens)

    def trials(rho: float) -> float:
        beta = float(torch.minimum(q, selection.p.probs / rho).sum())
        return (1 - (1 - beta) ** width) / beta

    assert trials(selection.rho) <= selection.rho + 1e-12
    if width > 1:
        assert trials(selection.rho - 1e-9) > selection.rho - 1e-9
    assert trials(selection.rho) == pytest.approx(selection.rho, abs=1e-9)


def test_a_perfect_draft_is_always_accepted() -> None:
    p = random_distributions(9, 1)
    for width in (1, 2, 4):
        assert Selection.of(p(()), p(()), width).rho == 1
        assert by_formula(p, p, width) == pytest.approx(1)


@pytest.mark.parametrize("width", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", range(6))
def test_acceptance_is_near_the_best_possible(width: int, seed: int) -> None:
    """SpecTr's theorem: at least 1 - (1 - 1/k)^k, hence 1 - 1/e, of what any rule can accept."""
    size = vocab_size(width, seed)
    p, q = (random_distributions(size, each, zeros=seed % 3) for each in (seed, seed + 100))
    accepted = acceptance("k_sequential", p, q, width)
    assert accepted == pytest.approx(by_formula(p, q, width), abs=1e-9)
    best = optimum(p, q, width, size)
    assert (1 - (1 - 1 / width) ** width) * best - 1e-9 <= accepted <= best + 1e-9
    # No theorem: so it was for each of 27,600 random pairs of distributions.
    assert acceptance("rejection", p, q, width) <= accepted + TOLERANCE
