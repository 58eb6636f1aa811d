"""Figures in the sources that do not follow from the sources' own formulas (docs/theory.md)."""

from __future__ import annotations

import pytest

from tokenleap import analysis as theory

SAMPLED = [(0.62, 2.5), (0.71, 3.1), (0.76, 3.6), (0.84, 5.0)]
"""Leviathan et al., appendix A.5: alpha of table 5 for T5-small (lenience 1, 0.5, 0.3 and 0.1), and
the improvement factors that the text gives for c = 0.015."""

GREEDY = [(0.75, 3.3), (0.8, 3.9), (0.87, 4.9)]
"""The same for argmax sampling, with gamma = 8."""

ROUNDING = 0.005
"""An alpha printed with two decimals may have been larger by this much."""


@pytest.mark.parametrize(("alpha", "printed"), [(0.7, 2.05), (0.9, 3.28)])
def test_accepted_tokens_of_the_ngram_chapter(alpha: float, printed: float) -> None:
    """Of four drafted tokens alpha + ... + alpha^4 are accepted: 1.77 and 3.10, not more."""
    formula = sum(alpha**n for n in range(1, 5))
    by_equation_1 = theory.expected_tokens(alpha, 4) - 1
    by_distribution = theory.accepted_distribution(alpha, 4) @ range(5)
    assert by_equation_1 == pytest.approx(formula)
    assert by_distribution == pytest.approx(formula)
    assert round(formula, 2) == {0.7: 1.77, 0.9: 3.10}[alpha]
    assert sum(n * alpha**n * (1 - alpha) for n in range(1, 4)) + 4 * alpha**4 == pytest.approx(
        formula
    )
    assert printed - theory.expected_tokens(alpha + ROUNDING, 4) + 1 > 0.1


@pytest.mark.parametrize(("alpha", "found"), [(0.5, 1.06), (0.7, 2.06), (0.9, 3.36)])
def test_a_sum_that_counts_four_accepted_tokens_twice(alpha: float, found: float) -> None:
    """They have the probability alpha^4, which is no term n alpha^n (1 - alpha)."""
    twice = sum(n * alpha**n * (1 - alpha) for n in range(1, 5)) + 4 * alpha**4
    assert round(twice, 2) == found
    accepted = theory.accepted_distribution(alpha, 4)
    assert accepted[4] == pytest.approx(alpha**4)
    assert accepted[1:4] == pytest.approx([alpha**n * (1 - alpha) for n in range(1, 4)])


@pytest.mark.parametrize(("alpha", "printed"), SAMPLED)
def test_sampling_factors_of_leviathan_a5(alpha: float, printed: float) -> None:
    """No draft length reaches the printed factor, not even if alpha and it have been rounded."""
    best = theory.best_gamma(alpha + ROUNDING, 0.015)
    reached = theory.improvement(alpha + ROUNDING, best, 0.015)
    assert reached < printed - 0.05


def test_what_theorem_3_8_gives_for_a5() -> None:
    """The figures in docs/theory.md."""
    best = [(theory.best_gamma(alpha, 0.015), alpha) for alpha, _ in SAMPLED]
    assert [gamma for gamma, _ in best] == [7, 9, 10, 15]
    assert [round(theory.improvement(a, g, 0.015), 2) for g, a in best] == [2.33, 2.94, 3.45, 4.79]


@pytest.mark.parametrize(("alpha", "printed"), GREEDY)
def test_argmax_factors_of_leviathan_a5_do_follow(alpha: float, printed: float) -> None:
    assert theory.improvement(alpha, 8, 0.015) == pytest.approx(printed, abs=0.051)
