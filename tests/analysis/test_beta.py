"""A rule's beta: the share of drafted tokens that it accepts, whatever the rule."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest

from tests.enumeration import (
    Context,
    DistributionOf,
    TableDistributions,
    answers,
    chains,
    decisions,
    random_distributions,
)
from tests.tiny import tiny_model
from tokenleap import LLM, SamplingParams
from tokenleap.analysis.measure import Laboratory
from tokenleap.core.acceptance import RULES
from tokenleap.core.distribution import Distribution

ALARM = 1e-6


def one_hot(_: Context) -> Distribution:
    return Distribution.one_hot(2)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("q_of", [random_distributions(4, 50, zeros=1), one_hot])
@pytest.mark.parametrize("seed", range(2))
def test_the_mean_of_beta_is_the_share_of_accepted_tokens(
    name: str, q_of: DistributionOf, seed: int
) -> None:
    """Every draft of one token, every decision and every beta, enumerated."""
    rule, p_of = RULES[name](), random_distributions(4, seed)
    accepted = mean = 0.0
    for draft, weight in chains(q_of, 1):
        p = TableDistributions(p_of, draft.tree)
        accepted += weight * sum(w for kept, w in decisions(rule, draft, p_of) if kept.path)
        betas = answers(partial(rule.beta, draft, p))
        mean += weight * sum(beta * w for beta, w in betas)
    assert mean == pytest.approx(accepted, rel=1e-5)


PROMPTS = [[number, 3, number + 1] for number in range(6)]
PARAMS = SamplingParams(temperature=1.2, seed=3, max_tokens=48)


@pytest.mark.parametrize("acceptance", [{"rule": "lenient", "lenience": 0.1}, "typical"])
def test_alpha_is_what_runs_under_the_rule_accept(acceptance: Any) -> None:
    """Two samples of one rate: right code fails with a chance below 2 * ALARM (Hoeffding)."""
    target, draft = (tiny_model(initializer_range=0.12, seed=seed) for seed in (0, 1))
    config = {"model": draft, "acceptance": acceptance, "controller": "fixed"}
    llm = LLM(target, speculative_config={**config, "num_speculative_tokens": 4})
    found = Laboratory(llm).assumptions(PROMPTS, PARAMS, 1)
    metrics = [out.metrics for out in llm.generate(PROMPTS, PARAMS)]
    kept = sum(each.num_accepted_tokens for each in metrics)
    tried = kept + sum(each.num_rejected_tokens for each in metrics)
    counts = (len(found.betas), tried)
    error = sum(math.sqrt(math.log(2 / ALARM) / (2 * count)) for count in counts)
    assert found.alpha == pytest.approx(kept / tried, abs=error)
    if acceptance != "typical":  # far from the strict alpha, which is 0.58 here
        assert kept / tried - 0.58 > error
