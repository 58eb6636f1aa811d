"""The formulas against simulation, enumeration, brute force, and the paper's own figures.

Simulations have fixed seeds, so they always pass or always fail. `ALARM` bounds the chance that a
right formula fails: a mean of n independent values within [0, w] is off by more than
`w * sqrt(log(2 / ALARM) / (2 n))` with a probability below `ALARM` (Hoeffding).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.enumeration import chains, decisions, random_distributions
from tokenleap import ConfigError
from tokenleap import analysis as theory
from tokenleap.core.acceptance import RULES

ALARM = 1e-9
STEPS = 40_000

alphas = st.floats(0, 1)
gammas = st.integers(0, 40)
costs = st.floats(0, 3)


def tolerance(width: float, samples: int) -> float:
    return width * math.sqrt(math.log(2 / ALARM) / (2 * samples))


def simulated(alpha: float, gamma: int, steps: int = STEPS, seed: int = 0) -> np.ndarray:
    """[steps] accepted tokens of every step: coins are thrown until one falls wrong."""
    coins = np.random.default_rng(seed).random((steps, gamma)) < alpha
    return np.asarray(np.cumprod(coins, axis=1).sum(axis=1))


def random_pair(seed: int, size: int = 7) -> tuple[np.ndarray, np.ndarray]:
    """Two distributions, each with a zero of its own."""
    dice = np.random.default_rng(seed)
    p, q = dice.dirichlet([0.6] * size), dice.dirichlet([0.6] * size)
    p[0] = q[1] = 0
    return p / p.sum(), q / q.sum()


# Equation 1 and what follows from it


@pytest.mark.parametrize(("alpha", "gamma"), [(0.0, 3), (0.3, 1), (0.8, 5), (0.95, 12), (1.0, 4)])
def test_expected_tokens_by_simulation(alpha: float, gamma: int) -> None:
    tokens = simulated(alpha, gamma) + 1
    expected = theory.expected_tokens(alpha, gamma)
    assert tokens.mean() == pytest.approx(expected, abs=tolerance(gamma, STEPS))
    counts = np.bincount(tokens - 1, minlength=gamma + 1) / STEPS
    # gamma + 1 frequencies, each the mean of STEPS zeros and ones.
    assert np.abs(counts - theory.accepted_distribution(alpha, gamma)).max() < tolerance(1, STEPS)


@given(alphas, gammas)
def test_expected_tokens_is_the_mean_of_the_capped_geometric(alpha: float, gamma: int) -> None:
    distribution = theory.accepted_distribution(alpha, gamma)
    assert distribution.sum() == pytest.approx(1)
    assert (distribution * np.arange(1, gamma + 2)).sum() == pytest.approx(
        theory.expected_tokens(alpha, gamma)
    )


@pytest.mark.parametrize("numerator", range(20))
@pytest.mark.parametrize("gamma", [0, 1, 5, 30])
def test_equation_1_in_exact_fractions(numerator: int, gamma: int) -> None:
    alpha = Fraction(numerator, 20)
    exact = (1 - alpha ** (gamma + 1)) / (1 - alpha)
    assert theory.expected_tokens(float(alpha), gamma) == pytest.approx(float(exact), rel=1e-13)


def test_expected_tokens_at_and_near_one() -> None:
    assert theory.expected_tokens(1, 7) == 8
    near = math.nextafter(1, 0)  # the closed form would divide 0 by 1e-16
    assert theory.expected_tokens(near, 7) == pytest.approx(8, rel=1e-12)


@given(alphas, gammas)
def test_memory_accesses_shrink_by_equation_1(alpha: float, gamma: int) -> None:
    assert theory.memory_reduction(alpha, gamma) == theory.expected_tokens(alpha, gamma)


# Wall time


@pytest.mark.parametrize(
    ("alpha", "gamma", "c", "longest"),
    [(0.8, 5, 0.05, 1.0), (0.5, 2, 0.3, 1.0), (0.9, 9, 0.0, 1.0), (0.7, 4, 0.1, 1.6)],
)
def test_improvement_by_simulated_clock(alpha: float, gamma: int, c: float, longest: float) -> None:
    """With `longest`, the cost of the pass over gamma tokens; at 1 it is theorem 3.8."""
    tokens = (simulated(alpha, gamma) + 1).sum()
    seconds = STEPS * (gamma * c + longest)
    expected = theory.improvement_on_curve(alpha, gamma, c, [1.0] * gamma + [longest])
    # Tokens per step vary within gamma; a step costs at least 1.
    assert tokens / seconds == pytest.approx(expected, abs=tolerance(gamma, STEPS))


def test_worked_example() -> None:
    # 1 - 0.8^6 = 0.737856; over 0.2 = 3.68928 tokens; over 5 * 0.05 + 1 = 2.951424.
    assert theory.expected_tokens(0.8, 5) == pytest.approx(3.68928)
    assert theory.improvement(0.8, 5, 0.05) == pytest.approx(2.951424)
    assert theory.operations(0.8, 5, 0.05) == pytest.approx(6.25 / 3.68928)
    # 4.328911 tokens for 1.4 are more than 4.161139 for 1.35 and 4.463129 for 1.45.
    assert theory.best_gamma(0.8, 0.05) == 8


@pytest.mark.parametrize(
    ("alpha", "gamma", "operations", "speed"),
    [
        (0.6, 2, 1.53, 1.96),
        (0.7, 3, 1.58, 2.53),
        (0.8, 2, 1.23, 2.44),
        (0.8, 5, 1.63, 3.69),
        (0.9, 2, 1.11, 2.71),
        (0.9, 10, 1.60, 6.86),
    ],
)
def test_table_1(alpha: float, gamma: int, operations: float, speed: float) -> None:
    """Operations and speed with c = c_hat = 0, as the paper rounds them."""
    assert theory.operations(alpha, gamma, 0) == pytest.approx(operations, abs=0.0051)
    assert theory.improvement(alpha, gamma, 0) == pytest.approx(speed, abs=0.0051)


@pytest.mark.parametrize(
    ("alpha", "gamma", "c", "expected"),
    [(0.75, 7, 0.02, 3.2), (0.8, 7, 0.04, 3.3), (0.82, 7, 0.11, 2.5), (0.62, 7, 0.02, 2.3)],
)
def test_expected_column_of_table_4(alpha: float, gamma: int, c: float, expected: float) -> None:
    """T5 on English to German; alpha and c are themselves rounded in the paper."""
    assert theory.improvement(alpha, gamma, c) == pytest.approx(expected, abs=0.051)


@given(alphas, costs)
def test_drafting_pays_exactly_where_alpha_exceeds_c(alpha: float, c: float) -> None:
    by_search = max(theory.improvement(alpha, gamma, c) for gamma in range(1, 60))
    if theory.pays(alpha, c):
        # At gamma = 1 in exact arithmetic above 1, in floating point perhaps equal.
        assert by_search >= theory.guaranteed_improvement(alpha, c) * (1 - 1e-12)
        assert theory.guaranteed_improvement(alpha, c) >= 1
    else:
        assert by_search <= 1 + 1e-12
        with pytest.raises(ConfigError, match="alpha: must be above c"):
            theory.guaranteed_improvement(alpha, c)


@given(alphas, costs, st.integers(0, 50))
def test_best_gamma_by_brute_force(alpha: float, c: float, longest: int) -> None:
    best = theory.best_gamma(alpha, c, longest)
    reached = [theory.improvement(alpha, gamma, c) for gamma in range(longest + 1)]
    assert 0 <= best <= longest
    assert reached[best] == pytest.approx(max(reached), rel=1e-12)


def test_best_gamma_at_the_ends() -> None:
    assert theory.best_gamma(0, 0.0) == 0
    assert theory.best_gamma(0.3, 0.5) == 0
    assert theory.best_gamma(0.9, 0.0, 31) == 31
    assert theory.best_gamma(1, 0.5, 31) == 31
    assert theory.best_gamma(1, 1.0) == 0


@pytest.mark.parametrize(("alpha", "c"), [(0.8, 0.05), (0.5, 0.3), (0.9, 0.0)])
def test_oracle_by_simulation(alpha: float, c: float) -> None:
    accepted = np.random.default_rng(1).geometric(1 - alpha, size=400_000) - 1
    speed = (accepted + 1).sum() / (accepted * c + 1).sum()
    # Not bounded, so by the standard error of a ratio, seven of them: 3e-12 by the normal
    # distribution.
    error = float(np.std(accepted)) / math.sqrt(len(accepted)) * 7
    assert speed == pytest.approx(theory.oracle_improvement(alpha, c), abs=error)


@given(alphas, st.floats(0, 1))
def test_no_fixed_gamma_beats_the_oracle(alpha: float, c: float) -> None:
    best = theory.improvement(alpha, theory.best_gamma(alpha, c), c)
    assert best <= theory.oracle_improvement(alpha, c) * (1 + 1e-12)


def test_oracle_gains_up_to_60_percent() -> None:
    """Section 3.5: "up to ~60 %" over the best fixed gamma, for typical alpha and c."""
    grid = product(np.arange(0.5, 0.96, 0.05), [0.01, 0.02, 0.05, 0.1])
    gains = [
        theory.oracle_improvement(a, c) / theory.improvement(a, theory.best_gamma(a, c), c)
        for a, c in grid
    ]
    assert 1.5 < max(gains) < 1.65
    assert theory.oracle_improvement(1, 0) == math.inf
    assert theory.oracle_improvement(1, 0.25) == 4


# A pass that costs more the more it verifies


@given(alphas, gammas, costs)
def test_a_flat_curve_is_theorem_3_8(alpha: float, gamma: int, c: float) -> None:
    flat = [1.0] * (gamma + 1)
    assert theory.improvement_on_curve(alpha, gamma, c, flat) == theory.improvement(alpha, gamma, c)


def test_best_gamma_on_a_curve_with_a_step() -> None:
    """Rows are cheap in blocks of 4: the best draft fills a block."""
    curve = [1.0 + 0.5 * (gamma // 4) for gamma in range(17)]
    best = theory.best_gamma_on_curve(0.85, 0.01, curve)
    reached = [theory.improvement_on_curve(0.85, gamma, 0.01, curve) for gamma in range(17)]
    assert best == int(np.argmax(reached))
    assert best % 4 == 3


# Operations, latency


@pytest.mark.parametrize(("alpha", "gamma", "c_hat"), [(0.8, 5, 0.05), (0.4, 3, 0.5)])
def test_operations_by_counting(alpha: float, gamma: int, c_hat: float) -> None:
    tokens = (simulated(alpha, gamma) + 1).sum()
    done = STEPS * (gamma * c_hat + gamma + 1)  # in operations of the target per token
    expected = theory.operations(alpha, gamma, c_hat)
    # By the relative error of the tokens, of which there is at least one per step.
    assert done / tokens == pytest.approx(expected, rel=2 * tolerance(gamma, STEPS))


def test_specdec_latency() -> None:
    # 120 tokens in 40 steps of 3; each drafts for 2 s and verifies for 5 s.
    assert theory.specdec_latency(120, 3, 2, 5) == 40 * 2 + 40 * 5
    assert theory.specdec_latency(0, 1, 2, 5) == 0


@given(st.floats(0.01, 0.99), st.integers(0, 20), st.floats(0, 1))
def test_specdec_latency_agrees_with_theorem_3_8(alpha: float, gamma: int, c: float) -> None:
    plain = theory.specdec_latency(1000, 1, 0, 1)
    drafted = theory.specdec_latency(1000, theory.expected_tokens(alpha, gamma), gamma * c, 1)
    assert plain / drafted == pytest.approx(theory.improvement(alpha, gamma, c))


# p and q


@pytest.mark.parametrize("seed", range(5))
def test_acceptance_probability_by_the_accept_loop(seed: int) -> None:
    """Theorem 3.5, by enumeration of the loop's definition: x from q passes with min(1, p/q)."""
    p, q = random_pair(seed)
    passes = sum(qx * min(1.0, px / qx) for px, qx in zip(p, q, strict=True) if qx > 0)
    assert theory.acceptance_probability(p, q) == pytest.approx(passes)
    assert theory.lk_divergence(p, q) == pytest.approx(1 - passes)


@pytest.mark.parametrize("seed", range(20))
def test_divergence_is_a_distance_within_bounds(seed: int) -> None:
    p, q = random_pair(seed)
    r, _ = random_pair(seed + 100)
    assert theory.lk_divergence(p, p) == 0
    assert theory.lk_divergence(p, q) == pytest.approx(theory.lk_divergence(q, p))
    assert 0 < theory.lk_divergence(p, q) <= 1
    through = theory.lk_divergence(p, r) + theory.lk_divergence(r, q)
    assert theory.lk_divergence(p, q) <= through + 1e-12
    assert theory.lk_divergence([1, 0], [0, 1]) == 1


def test_acceptance_rate_is_the_mean_over_positions() -> None:
    pairs = [random_pair(seed) for seed in range(6)]
    p, q = np.stack([p for p, _ in pairs]), np.stack([q for _, q in pairs])
    expected = np.mean([theory.acceptance_probability(*pair) for pair in pairs])
    assert theory.acceptance_rate(p, q) == pytest.approx(expected)


@pytest.mark.parametrize(("rule", "lenience"), [("rejection", 1.0), ("lenient", 0.3)])
@pytest.mark.parametrize("seed", range(3))
def test_the_decoders_rules_accept_as_predicted(rule: str, lenience: float, seed: int) -> None:
    """Every draft of one token and every decision of the library's own rule, enumerated."""
    p, q = random_distributions(4, seed, zeros=1), random_distributions(4, seed + 50, zeros=1)
    options = {"lenience": lenience} if rule == "lenient" else {}
    judge = RULES[rule](RULES[rule].Options(**options))
    accepted = sum(
        weight * chance
        for draft, weight in chains(q, 1)
        for decision, chance in decisions(judge, draft, p)
        if decision.path
    )
    dense = [distribution(()).dense(4).numpy() for distribution in (p, q)]
    expected = theory.lenient_acceptance_probability(dense[0], dense[1], lenience)
    assert accepted == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("lenience", [1.0, 0.5, 0.3, 0.1])
@pytest.mark.parametrize("seed", range(3))
def test_lenience_by_enumeration(lenience: float, seed: int) -> None:
    """A.5: x from q passes with min(1, p / (l q))."""
    p, q = random_pair(seed)
    passes = sum(qx * min(1.0, px / (lenience * qx)) for px, qx in zip(p, q, strict=True) if qx > 0)
    found = theory.lenient_acceptance_probability(p, q, lenience)
    assert found == pytest.approx(passes)
    assert found >= theory.acceptance_probability(p, q) - 1e-12


# Domains


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: theory.expected_tokens(1.01, 3), "alpha: must be between 0 and 1, got 1.01"),
        (lambda: theory.expected_tokens(math.nan, 3), "alpha: must be between 0 and 1, got nan"),
        (lambda: theory.expected_tokens(0.5, -1), "gamma: must be a whole number of at least 0"),
        (
            lambda: theory.accepted_distribution(0.5, True),
            "gamma: must be a whole number of at least 0",
        ),
        (lambda: theory.improvement(0.5, 3, -0.1), "c: must be a finite number of at least 0"),
        (lambda: theory.improvement(0.5, 3, math.inf), "c: must be a finite number"),
        (lambda: theory.operations(0.5, 3, math.nan), "c_hat: must be a finite number"),
        (lambda: theory.best_gamma(0.5, 0.1, -1), "max_gamma: must be a whole number"),
        (lambda: theory.oracle_improvement(-0.1, 0.1), "alpha: must be between 0 and 1"),
        (lambda: theory.improvement_on_curve(0.5, 2, 0, [1, 1]), "the curve ends at 1, got 2"),
        (lambda: theory.improvement_on_curve(0.5, 0, 0, [0.0]), "verify_cost: must be a list of"),
        (lambda: theory.best_gamma_on_curve(0.5, 0, []), "verify_cost: must be a list of finite"),
        (lambda: theory.specdec_latency(10, 0.5, 1, 1), "tokens_per_step: must be at least 1"),
        (lambda: theory.specdec_latency(-1, 2, 1, 1), "length: must be a whole number"),
        (lambda: theory.lk_divergence([0.5, 0.6], [1, 0]), "p: probabilities must sum to 1"),
        (lambda: theory.lk_divergence([1, 0], [1.5, -0.5]), "q: probabilities must be between"),
        (lambda: theory.lk_divergence([1], [0.5, 0.5]), "p and q: must have one shape"),
        (lambda: theory.lk_divergence(1.0, 1.0), "p: must have at least one probability"),
        (lambda: theory.acceptance_rate([1], [1]), r"must have 2 dimension\(s\), got 1"),
        (lambda: theory.lenient_acceptance_probability([1], [1], 0), "lenience: must be a finite"),
        (lambda: theory.lenient_acceptance_probability([1], [1], 1.1), "at most 1, got 1.1"),
    ],
)
def test_arguments_out_of_range_are_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call()


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
