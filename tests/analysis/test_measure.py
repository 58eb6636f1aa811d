"""Measured alpha against the models' own logits, and predictions against simulated runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from tests.tiny import VOCAB_SIZE, tiny_model
from tokenleap import LLM, CompatibilityError, ConfigError, SamplingParams
from tokenleap.analysis import (
    acceptance_rate,
    accepted_distribution,
    expected_tokens,
    improvement,
    improvement_on_curve,
    lenient_acceptance_probability,
    rejection_sampling_probability,
)
from tokenleap.analysis.compare import Assumptions, StepSample, compare
from tokenleap.analysis.measure import LENIENCES, Laboratory, alpha_by_lenience
from tokenleap.core.distribution import Distribution
from tokenleap.core.sampler import Sampler

PROMPTS = [[1, 2, 3, 4], [7, 7, 8]]
PARAMS = SamplingParams(temperature=0.8, top_k=20, seed=3, max_tokens=24)
ALPHA, C = 0.7, 0.05
CURVE = (1.0, 1.1, 1.15, 1.3, 1.6)
PASS = 0.01


def laboratory(model: PreTrainedModel, /, **config: Any) -> Laboratory:
    return Laboratory(LLM(model, speculative_config={"acceptance": "rejection", **config}))


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return tiny_model(initializer_range=0.12)


@pytest.fixture(scope="module")
def draft() -> PreTrainedModel:
    return tiny_model(initializer_range=0.12, seed=1)


# Alpha


def distributions(
    model: PreTrainedModel, prompt: Sequence[int], output: Sequence[int]
) -> np.ndarray:
    """[N, V] p at every position of a text, from one plain forward pass."""
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([[*prompt, *output]])).logits[0]
    sampler = Sampler(PARAMS, VOCAB_SIZE, prompt)
    rows = [
        sampler.distribution(logits[len(prompt) - 1 + i], output[:i]).dense(VOCAB_SIZE)
        for i in range(len(output))
    ]
    return torch.stack(rows).numpy()


@pytest.mark.parametrize("gamma", [1, 3])
def test_alpha_is_the_mean_overlap_at_every_position_of_the_targets_text(
    target: PreTrainedModel, draft: PreTrainedModel, gamma: int
) -> None:
    found = laboratory(target, model=draft).assumptions(PROMPTS, PARAMS, gamma)
    texts = [out.token_ids for out in LLM(target).generate(PROMPTS, PARAMS)]
    pairs = list(zip(PROMPTS, texts, strict=True))
    p = np.concatenate([distributions(target, *pair) for pair in pairs])
    q = np.concatenate([distributions(draft, *pair) for pair in pairs])
    assert found.alpha == pytest.approx(acceptance_rate(p, q), abs=1e-5)
    assert found.betas == pytest.approx(np.minimum(p, q).sum(1).tolist(), abs=1e-4)
    assert found.draft_lengths == ((gamma,) * 24,) * 2
    assert found.positions == len(p)
    assert found.drafting_share == 1


def test_costs_are_relative_to_a_plain_pass(
    target: PreTrainedModel, draft: PreTrainedModel
) -> None:
    found = laboratory(target, model=draft).assumptions(PROMPTS, PARAMS, 3)
    assert found.verify_cost[0] == 1
    assert len(found.verify_cost) == 4
    assert 0 < found.c < 10  # a model of the same size: about 1, on a machine that may be busy
    assert found.pass_seconds > 0


def test_a_greedy_alpha_counts_agreement(target: PreTrainedModel) -> None:
    greedy = PARAMS.model_copy(update={"temperature": 0.0})
    found = laboratory(target, model=target).assumptions(PROMPTS, greedy, 2)
    assert found.alpha == 1
    assert set(found.betas) == {1.0}


def test_overlap_of_distributions_on_different_supports() -> None:
    p = Distribution(torch.tensor([0.5, 0.5]), torch.tensor([1, 4]))
    q = Distribution(torch.tensor([0.2, 0.3, 0.5]), torch.tensor([0, 4, 5]))
    assert p.overlap(q) == q.overlap(p) == pytest.approx(0.3)
    assert p.overlap(Distribution.one_hot(0)) == 0


def test_nothing_drafted(target: PreTrainedModel) -> None:
    lab = laboratory(target, method="ngram", prompt_lookup_min=60, prompt_lookup_max=60)
    with pytest.raises(ConfigError, match="drafted nothing on these prompts"):
        lab.assumptions(PROMPTS, PARAMS, 2)


def test_steps_of_a_run(target: PreTrainedModel) -> None:
    lab = laboratory(target, model=target)
    plain = lab.run(PROMPTS[0], PARAMS, 0)
    assert [step.committed for step in plain] == [1] * 23  # of 24 tokens, without the first step
    assert all(step.drafted == step.accepted == 0 for step in plain)
    drafted = lab.run(PROMPTS[0], PARAMS, 3)
    assert [step.accepted for step in drafted] == [3] * 5
    assert all(step.seconds >= step.draft_seconds + step.verify_seconds for step in drafted)


# Predictions


def simulated_steps(gamma: int, count: int, seed: int = 0) -> list[StepSample]:
    """Steps for which every assumption holds: geometric acceptance, costs as measured."""
    accepted = np.random.default_rng(seed).choice(
        gamma + 1, count, p=accepted_distribution(ALPHA, gamma)
    )
    draft, verify = gamma * C * PASS, CURVE[gamma] * PASS
    return [StepSample(gamma, int(n), int(n) + 1, draft, verify, draft + verify) for n in accepted]


def assumptions(curve: tuple[float, ...] = CURVE) -> Assumptions:
    return Assumptions(ALPHA, C, curve, ((4,) * 50,), (ALPHA,) * 50, PASS)


@pytest.mark.parametrize("gamma", [1, 2, 4])
def test_a_run_as_assumed_is_as_predicted(gamma: int) -> None:
    rounds = [
        {0: simulated_steps(0, 100), gamma: simulated_steps(gamma, 5_000, seed)}
        for seed in range(2)
    ]
    trial = compare(assumptions(), rounds, gamma)
    assert trial.predicted == improvement(ALPHA, gamma, C)
    # By Hoeffding over 10 000 steps of at most gamma tokens, wrong with a chance below 1e-9.
    error = gamma * math.sqrt(math.log(2e9) / (2 * 10_000))
    assert trial.measured_tokens == pytest.approx(expected_tokens(ALPHA, gamma), abs=error)
    assert trial.measured == pytest.approx(trial.predicted_on_curve, rel=error)
    assert trial.low <= trial.measured <= trial.high
    assert trial.agrees_on_curve
    assert trial.distance < 0.02
    assert trial.factors.product == pytest.approx(trial.measured / trial.predicted)
    assert trial.factors.failing() == ["verification"]
    assert trial.agrees == (gamma < 4)  # a pass for 1.6 is too much for a constant of 1


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("drafting", lambda s: replace(s, draft_seconds=0.02, seconds=s.seconds + 0.018)),
        ("passes", lambda s: replace(s, verify_seconds=0.02, seconds=s.seconds + 0.01)),
        ("overhead", lambda s: replace(s, seconds=s.seconds + 0.01)),
        ("acceptance", lambda s: replace(s, accepted=0, committed=1)),
    ],
)
def test_the_failing_assumption_is_named(name: str, change: Any) -> None:
    flat = assumptions((1.0,) * 5)
    steps = [
        replace(step, verify_seconds=PASS, seconds=step.draft_seconds + PASS)
        for step in simulated_steps(2, 4_000)
    ]
    fair = compare(flat, [{0: simulated_steps(0, 100), 2: steps}], 2)
    assert fair.factors.failing() == []
    assert fair.agrees
    spoilt = [change(step) for step in steps]
    trial = compare(flat, [{0: simulated_steps(0, 100), 2: spoilt}], 2)
    assert trial.factors.failing() == [name]
    assert not trial.agrees
    assert trial.factors.product == pytest.approx(trial.measured / trial.predicted)


def walked(lengths: Sequence[int], texts: int) -> list[StepSample]:
    """Steps of a drafter that has so many guesses at each position, with i.i.d. acceptance."""
    dice, steps = np.random.default_rng(0), []
    for _ in range(texts):
        position = 0
        while position < len(lengths):
            drafted = lengths[position]
            accepted = int(np.cumprod(dice.random(drafted) < ALPHA).sum())
            draft, verify = drafted * C * PASS, CURVE[drafted] * PASS
            steps.append(StepSample(drafted, accepted, accepted + 1, draft, verify, draft + verify))
            position += accepted + 1
    return steps


def test_short_drafts_are_named_and_predicted_where_they_are() -> None:
    """Guesses in one half of the text only: steps are rarer there, for they are longer."""
    lengths = (4,) * 30 + (0,) * 30
    half = replace(assumptions(), draft_lengths=(lengths,), betas=(ALPHA,) * 30)
    assert half.drafting_share == 0.5
    trial = compare(half, [{0: simulated_steps(0, 100), 4: walked(lengths, 500)}], 4)
    assert trial.factors.failing()[0] == "drafts"
    # 60 tokens and more of each of 500 texts; the speed of a text is within [0.5, 3].
    assert trial.measured == pytest.approx(trial.predicted_on_curve, rel=0.02)
    assert trial.mean_drafted < 1.6  # and not half of 4


@pytest.mark.parametrize("gamma", [0, 1, 3, 4])
def test_drafts_of_one_length_are_theorem_3_8_on_the_curve(gamma: int) -> None:
    expected = improvement_on_curve(ALPHA, gamma, C, CURVE)
    assert assumptions().predicted_on_curve(gamma) == pytest.approx(expected, rel=1e-12)


def test_runs_of_one_step_cannot_be_compared() -> None:
    with pytest.raises(ConfigError, match="every output ended in its first step"):
        compare(assumptions(), [{0: [], 2: []}], 2)


def test_trees_are_refused(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    with pytest.raises(CompatibilityError, match="drafts trees"):
        laboratory(target, model=draft, tree=[2, 1])


# On the clock


@pytest.mark.slow
def test_predicted_and_measured_agree() -> None:
    """A deep target whose first layers are the draft model: its passes cost the same up to here.

    Another process may take the core in the midst, so the best of three attempts counts.
    """
    lab = deep_laboratory()
    for _ in range(3):
        found = lab.assumptions(DEEP_PROMPTS, DEEP_PARAMS, 3)
        rounds = [
            {g: [s for p in DEEP_PROMPTS for s in lab.run(p, seeded(r), g)] for g in (0, 1, 3)}
            for r in range(3)
        ]
        trials = [compare(found, rounds, gamma) for gamma in (1, 3)]
        assert max(trial.distance for trial in trials) < 0.1  # acceptance is i.i.d. here
        if all(trial.agrees for trial in trials):
            return
    pytest.fail("\n".join(str(trial.as_dict()) for trial in trials))


DEEP_PROMPTS = [[i, i + 1, i + 2] for i in range(0, 60, 12)]
DEEP_PARAMS = SamplingParams(temperature=1.0, seed=0, max_tokens=64)


def seeded(seed: int) -> SamplingParams:
    return DEEP_PARAMS.model_copy(update={"seed": seed})


def deep_laboratory() -> Laboratory:
    """24 layers of which the last 21 change little, and the first 3 as a draft model."""
    deep = tiny_model(num_hidden_layers=24, hidden_size=128, intermediate_size=512)
    shallow = tiny_model(num_hidden_layers=3, hidden_size=128, intermediate_size=512)
    weights = deep.state_dict()
    for name, weight in weights.items():
        if "o_proj" in name or "down_proj" in name:
            weight.mul_(0.1 if int(name.split(".")[2]) >= 3 else 1.0)
    shallow.load_state_dict({name: weights[name] for name in shallow.state_dict()})
    return laboratory(deep, model=shallow)


def test_alpha_by_lenience_is_that_of_p_and_q() -> None:
    target, draft = (tiny_model(initializer_range=0.12, seed=seed) for seed in (0, 1))
    found = alpha_by_lenience(laboratory(target, model=draft), PROMPTS, PARAMS)
    texts = [out.token_ids for out in LLM(target).generate(PROMPTS, PARAMS)]
    pairs = list(zip(PROMPTS, texts, strict=True))
    p, q = (
        np.concatenate([distributions(model, *pair) for pair in pairs]) for model in (target, draft)
    )
    both = list(zip(p, q, strict=True))
    for lenience, alpha in zip(LENIENCES, found.alphas, strict=True):
        expected = [lenient_acceptance_probability(*pair, lenience) for pair in both]
        assert alpha == pytest.approx(np.mean(expected), abs=1e-4)
    assert list(found.alphas) == sorted(found.alphas)
    assert found.positions == len(both)
    expected = [rejection_sampling_probability(*pair) for pair in both]
    assert found.rejection_sampling == pytest.approx(np.mean(expected), abs=1e-4)


def test_greedy_lenience_compares_with_the_best_token() -> None:
    """A.5: x passes if p(x) >= l max p, at temperature 1; l = 1 keeps the argmax alone."""
    target, draft = (tiny_model(initializer_range=0.12, seed=seed) for seed in (0, 1))
    greedy = PARAMS.model_copy(update={"temperature": 0.0})
    lab = laboratory(target, model=draft)
    found = alpha_by_lenience(lab, PROMPTS, greedy, (1.0, 0.5, 1e-6))
    assert found.alphas[0] == lab.assumptions(PROMPTS, greedy, 1).alpha
    assert found.alphas[0] == found.rejection_sampling  # p is one-hot
    assert found.alphas[0] < found.alphas[1] < found.alphas[2] == 1


def test_nothing_drafted_has_no_alpha_by_lenience() -> None:
    lab = laboratory(tiny_model(), method="ngram", prompt_lookup_min=60, prompt_lookup_max=60)
    with pytest.raises(ConfigError, match="drafted nothing on these prompts"):
        alpha_by_lenience(lab, PROMPTS, PARAMS)
