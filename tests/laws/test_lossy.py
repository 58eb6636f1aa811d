"""What the lossy rules promise instead of exactness."""

from __future__ import annotations

import math
from typing import Any

import pytest

from foretoken.acceptance import RULES, AcceptanceRule
from foretoken.acceptance.lenient import Lenient
from foretoken.acceptance.top_beta import TopBeta
from foretoken.acceptance.typical import Typical, entropy
from foretoken.law import Law
from foretoken.tree import Draft, TokenTree, chain
from tests.enumeration import (
    Context,
    ScriptedNoise,
    TableLaws,
    chains,
    decisions,
    distance,
    output_law,
    random_laws,
    trees,
    without_replacement,
)

LOSSY = [name for name, rule in RULES.items() if not rule.lossless]
JUDGING_TOKENS = [name for name in LOSSY if name != "lenient"]
"""Rules that judge each token on its own; `lenient` tries siblings in turn, as `rejection` does."""


@pytest.mark.parametrize("lenience", [0.2, 0.5, 0.9])
@pytest.mark.parametrize("seed", range(3))
def test_lenient_makes_no_token_more_probable_than_p_over_l(lenience: float, seed: int) -> None:
    p, q = random_laws(4, seed), random_laws(4, seed + 100)
    rule = Lenient(Lenient.Options(lenience=lenience))
    for drafts in (chains(q, 1), trees(q, without_replacement, 2, 1)):
        outcomes = output_law(rule, drafts, p, length=1)
        assert sum(outcomes.values()) == pytest.approx(1)
        for (token,), probability in outcomes.items():
            assert probability <= p(()).prob(token) / lenience + 1e-9


def test_lenient_with_factor_1_is_rejection() -> None:
    p, q = random_laws(3, 1), random_laws(3, 2)
    rule = Lenient(Lenient.Options(lenience=1.0))
    assert distance(output_law(rule, chains(q, 2), p, 3), p, 3) < 1e-6


def test_lenient_accepts_more() -> None:
    p, q = random_laws(4, 1), random_laws(4, 2)

    def accepted(rule: AcceptanceRule) -> float:
        return sum(
            draft_weight * weight * len(decision.path)
            for draft, draft_weight in chains(q, 2)
            for decision, weight in decisions(rule, draft, p)
        )

    rates = [accepted(Lenient(Lenient.Options(lenience=x))) for x in (1.0, 0.6, 0.3)]
    assert rates == sorted(rates)
    assert rates[0] < rates[-1]


class GreedyLaws(TableLaws):
    """One-hot p, with the likelihoods still to be had."""

    greedy = True

    def __getitem__(self, node: int) -> Law:
        law = super().__getitem__(node)
        return Law.one_hot(int(law.tokens[law.probs.argmax()]))

    def untempered(self, node: int) -> Law:
        return super().__getitem__(node)


@pytest.mark.parametrize("lenience", [0.1, 0.5, 1.0])
def test_greedy_lenient_compares_with_the_best(lenience: float) -> None:
    p = random_laws(5, 3, sharpness=0.7)
    best = float(p(()).probs.max())
    for token in range(5):
        laws = GreedyLaws(p, chain([0, token]))
        decision = Lenient(Lenient.Options(lenience=lenience)).accept(
            Draft.deterministic(chain([0, token])), laws, DrawsTheOnly()
        )
        assert bool(decision.path) == (p(()).prob(token) >= lenience * best)


class DrawsTheOnly(ScriptedNoise):
    """For one-hot laws: there is one answer."""

    def __init__(self) -> None:
        super().__init__([])

    def draw(self, law: Law, depth: int) -> int:
        assert law.certain is not None
        return law.certain


@pytest.mark.parametrize("rule", ["lenient", "top_beta"])
def test_a_sampled_law_of_one_token_is_not_greedy_decoding(rule: str) -> None:
    """Truncation can leave a single token; what it cut off is impossible, not merely unlikely."""
    only = random_laws(5, 3, zeros=4)
    best = only(()).certain
    assert best is not None
    draft = Draft.deterministic(chain([0, (best + 1) % 5]))
    for decision, _ in decisions(RULES[rule](), draft, only):
        assert decision.path == ()
        assert decision.token == best


@pytest.mark.parametrize("token", range(5))
def test_typical_threshold(token: int) -> None:
    law = random_laws(5, 3, sharpness=0.7)(())
    rule = Typical(Typical.Options(posterior_threshold=0.2, posterior_alpha=0.6))
    threshold = min(0.2, 0.6 * math.exp(-entropy(law)))
    ((decision, _), *_) = decisions(rule, Draft.deterministic(chain([0, token])), lambda _: law)
    assert bool(decision.path) == (law.prob(token) > threshold)


def test_typical_is_greedy_where_p_is_one_hot() -> None:
    p = random_laws(5, 3)
    best = int(p(()).probs.argmax())
    for token in range(5):
        draft = Draft.deterministic(chain([0, token]))
        decision = Typical().accept(draft, GreedyLaws(p, draft.tree), DrawsTheOnly())
        assert bool(decision.path) == (token == best)


@pytest.mark.parametrize(("beta", "tau"), [(1, 5.0), (2, 5.0), (3, 0.1), (5, 0.7)])
def test_top_beta_keeps_the_best_within_the_gap(beta: int, tau: float) -> None:
    p = random_laws(5, 3, sharpness=0.7)
    law = p(())
    ranked = sorted(range(5), key=law.prob, reverse=True)
    for token in range(5):
        draft = Draft.deterministic(chain([0, token]))
        decision = TopBeta(TopBeta.Options(beta=beta, tau=tau)).accept(
            draft, GreedyLaws(p, draft.tree), DrawsTheOnly()
        )
        gap = math.log(law.prob(ranked[0])) - math.log(law.prob(token))
        assert bool(decision.path) == (token in ranked[:beta] and gap <= tau)


@pytest.mark.parametrize("rule", JUDGING_TOKENS)
def test_the_longest_passing_path_wins(rule: str) -> None:
    def law_of(context: Context) -> Law:
        return random_laws(3, 1, sharpness=0.01)(context)  # nearly uniform: everything passes

    tree = TokenTree((0, 1, 2, 0, 1), (-1, 0, 0, 2, 3))  # 1 | 2 0 1
    every: dict[str, dict[str, Any]] = {
        "top_beta": {"beta": 3},
        "typical": {"posterior_alpha": 0.5},
    }
    options = every[rule]
    accept = RULES[rule](RULES[rule].Options(**options))
    for decision, _ in decisions(accept, Draft.deterministic(tree), law_of):
        assert decision.path == (2, 3, 4)
