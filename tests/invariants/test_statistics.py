"""The output distribution measured end to end: drafters, target, cache, noise and rules together.

A tiny model with a tiny vocabulary generates two tokens for thousands of seeds; a chi-square test
compares the counts of all outcomes with the exact distribution, computed from the model's own
logits.

Chance of failing by accident: each of the C cases fails with probability `ALARM / C` if the
distribution holds, so that the whole module fails with probability below `ALARM`, 1e-6. The seeds
are fixed, so it either always fails or never does. The other direction is tested too: a wrong
distribution is caught.
"""

from __future__ import annotations

from collections import Counter
from functools import cache
from itertools import product
from math import prod
from typing import Any

import pytest
import torch
from scipy.stats import chi2
from transformers import PreTrainedModel

from tests.heads import tiny_head
from tests.matrix import SPECULATIVE, WITH_TOKENIZER, fits, speculative_config
from tests.tiny import tiny_model
from tokenleap import LLM, SamplingParams
from tokenleap.core.distribution import Distribution
from tokenleap.core.noise import Noise
from tokenleap.core.sampler import Sampler
from tokenleap.drafters.registry import METHODS

VOCAB = 6
PROMPT = [1, 2, 3, 1, 2, 3, 1, 2]
SAMPLES = 400
LENGTH = 2
TEMPERATURES = {"coupled": (1.0, 0.6), "rejection": (1.0,), "block": (0.6,)}
"""On chains, k_sequential does what rejection does; a separate test has its trees."""
CASES = [
    (method, rule, temperature)
    for method in ("none", *SPECULATIVE)
    for rule, temperatures in TEMPERATURES.items()
    for temperature in temperatures
    if fits(method, rule) and method not in WITH_TOKENIZER
]
"""Methods that know tokens by their text would need more than this vocabulary."""
QUICK = {
    "coupled": {"none"},
    "rejection": {
        "draft_model",
        "hybrid",
        "parallel",
        "cascade",
    },
    "block": {"draft_model", "ngram"},
}
"""Cases that differ in what they run. Under `coupled` outputs are those of `none` to the bit
(`test_bits.py`), one-hot drafts take one path through a rule, whatever proposed them, `hybrid`
drafts with `eagle`, and `test_drafters.py` has the q of every method: the other cases are for
`make test-slow`."""
ALARM = 1e-6


def params(seed: int, temperature: float) -> SamplingParams:
    return SamplingParams(
        temperature=temperature, top_k=5, seed=seed, max_tokens=LENGTH + 1, presence_penalty=0.5
    )


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model(vocab_size=VOCAB, initializer_range=0.12)


@cache
def next_token(model: PreTrainedModel, temperature: float, output: tuple[int, ...]) -> Distribution:
    """The distribution of the token after an output."""
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([[*PROMPT, *output]])).logits[0, -1]
    return Sampler(params(0, temperature), VOCAB, PROMPT).distribution(logits, output)


def exact_distribution(model: PreTrainedModel, temperature: float) -> dict[tuple[int, ...], float]:
    """Probability of every output of `LENGTH` tokens."""
    return {
        output: prod(
            next_token(model, temperature, output[:i]).prob(token) for i, token in enumerate(output)
        )
        for output in product(range(VOCAB), repeat=LENGTH)
    }


def p_value(counts: Counter[tuple[int, ...]], distribution: dict[tuple[int, ...], float]) -> float:
    """Chi-square goodness of fit; outcomes expected less than 5 times are pooled."""
    total = sum(counts.values())
    big = [o for o, probability in distribution.items() if probability * total >= 5]
    cells = [(counts[o], distribution[o] * total) for o in big]
    rest = 1 - sum(distribution[o] for o in big)
    cells.append((total - sum(counts[o] for o in big), rest * total))
    if rest * total < 5:
        observed, expected = cells.pop()
        cells[-1] = (cells[-1][0] + observed, cells[-1][1] + expected)
    statistic = sum((observed - expected) ** 2 / expected for observed, expected in cells)
    return float(chi2.sf(statistic, len(cells) - 1))


def sample(llm: LLM, temperature: float) -> Counter[tuple[int, ...]]:
    outputs = llm.generate([PROMPT] * SAMPLES, [params(s, temperature) for s in range(SAMPLES)])
    return Counter(output.token_ids[:LENGTH] for output in outputs)


def fitting_llm(model: PreTrainedModel, config: dict[str, Any], temperature: float = 1.0) -> LLM:
    """An LLM whose samples have the exact distribution."""
    llm = LLM(model, speculative_config=config, max_num_seqs=64)
    counts = sample(llm, temperature)
    assert p_value(counts, exact_distribution(model, temperature)) > ALARM / len(CASES)
    return llm


@pytest.mark.parametrize(
    ("method", "rule", "temperature"),
    [
        pytest.param(*case, marks=[] if case[0] in QUICK[case[1]] else pytest.mark.slow)
        for case in CASES
    ],
)
def test_output_distribution(
    model: PreTrainedModel, method: str, rule: str, temperature: float
) -> None:
    fields: dict[str, Any] = {}
    if METHODS[method].takes_model:
        fields["model"] = tiny_model(seed=1, vocab_size=VOCAB)
    if METHODS[method].takes_head:
        fields["model"] = tiny_head(method, VOCAB)
    fitting_llm(model, speculative_config(method, rule, 2, **fields), temperature)


SAMPLERS: list[dict[str, Any]] = [
    {"method": "random"},
    {"method": "random"},
    {"method": "ngram_table"},
]


@pytest.mark.parametrize("rule", ["rejection", "coupled"])
def test_an_ensemble_of_sampling_drafters(model: PreTrainedModel, rule: str) -> None:
    """Siblings from different drafters have to be independent of each other."""
    config = speculative_config("ensemble", rule, 6, drafters=SAMPLERS)
    llm = fitting_llm(model, config)
    drafts = llm.generate([PROMPT], SamplingParams(seed=1, max_tokens=200))[0].trace
    twins = [step.drafted[:2] for step in drafts if step.parents[:2] == (-1, -1)]
    assert len(twins) > 20
    if rule == "rejection":
        assert any(a != b for a, b in twins)


def test_trees_of_independent_siblings(model: PreTrainedModel) -> None:
    """Where the younger siblings are accepted too, and tokens are drafted twice."""
    fields = {"tree": [3, 1], "expansion": "sample_with_replacement"}
    config = speculative_config(
        "draft_model", "k_sequential", None, model=tiny_model(seed=1, vocab_size=VOCAB), **fields
    )
    llm = fitting_llm(model, config)
    steps = llm.generate([PROMPT], SamplingParams(seed=1, max_tokens=200))[0].trace.steps
    assert any(step.parents.count(-1) < 3 for step in steps if step.drafted)
    assert any(step.accepted[:1] in ((1,), (2,)) for step in steps)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        {"draft_temperature": 1.5, "draft_top_p": 0.7},
        {"draft_top_k": 3, "tree": [2, 1], "expansion": "sample"},
    ],
)
def test_a_q_with_parameters_of_its_own(model: PreTrainedModel, fields: dict[str, Any]) -> None:
    draft_model = tiny_model(seed=1, vocab_size=VOCAB)
    config = speculative_config("draft_model", "rejection", None, model=draft_model, **fields)
    fitting_llm(model, config)


def test_a_wrong_distribution_is_caught(model: PreTrainedModel) -> None:
    """The same samples against the distribution of another temperature."""
    counts = sample(LLM(model, max_num_seqs=64), 1.0)
    assert p_value(counts, exact_distribution(model, 0.6)) < ALARM / len(CASES)


def test_the_noise_is_uniform_and_its_streams_are_independent() -> None:
    distribution = Distribution.of(torch.full((VOCAB,), 1 / VOCAB))
    target, draft = Noise(1), Noise(1).drafting(coupled=False)
    pairs: Counter[tuple[int, ...]] = Counter(
        (target.draw(distribution, t), draft.draw(distribution, t)) for t in range(6000)
    )
    uniform = dict.fromkeys(product(range(VOCAB), repeat=2), 1 / VOCAB**2)
    assert p_value(pairs, uniform) > ALARM
    coupled = Noise(1).drafting(coupled=True)
    assert all(target.draw(distribution, t) == coupled.draw(distribution, t) for t in range(50))
    rate = sum(target.accepts(0.3, t) for t in range(6000))
    assert p_value(Counter({(1,): rate, (0,): 6000 - rate}), {(1,): 0.3, (0,): 0.7}) > ALARM
