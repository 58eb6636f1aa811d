"""Alpha by lenience against the two models' own logits."""

from __future__ import annotations

import numpy as np
import pytest

from tests.analysis.test_measure import PARAMS, PROMPTS, distributions, laboratory
from tests.tiny import tiny_model
from tokenleap import LLM, ConfigError
from tokenleap.analysis import (
    lenient_acceptance_probability,
    rejection_sampling_probability,
)
from tokenleap.analysis.measure import LENIENCES, alpha_by_lenience


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


def test_nothing_drafted() -> None:
    lab = laboratory(tiny_model(), method="ngram", prompt_lookup_min=60, prompt_lookup_max=60)
    with pytest.raises(ConfigError, match="drafted nothing on these prompts"):
        alpha_by_lenience(lab, PROMPTS, PARAMS)
