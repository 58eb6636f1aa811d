"""A batch may mix acceptance rules: each request has the output of an `LLM` with its rule."""

from __future__ import annotations

from functools import cache
from itertools import combinations, pairwise
from typing import Any

import pytest
from transformers import PreTrainedModel

from tests.tiny import tiny_model
from tokenleap import LLM, CompatibilityError, ConfigError, SamplingParams
from tokenleap.core.acceptance import PLUGINS, RULES, rule_class
from tokenleap.core.config import plugin_names

REGISTERED = {name: rule_class(name) for name in (*RULES, *plugin_names(PLUGINS))}
PROMPTS = [[1, 2, 3, 1, 2, 3, 1], [7, 7, 8]]
SEEDS = range(6)
OPTIONS: dict[str, dict[str, Any]] = {
    "lenient": {"lenience": 0.3},
    "typical": {"posterior_threshold": 0.05},
    "top_beta": {"beta": 40, "tau": 2.0},
}


@cache
def model(seed: int = 0) -> PreTrainedModel:
    return tiny_model(seed=seed, initializer_range=0.1)


def config_of(rule: str | None, **fields: Any) -> dict[str, Any]:
    """A draft model that samples, near enough to the target that some of its tokens pass."""
    config = {"model": model(1), "controller": "fixed", "num_speculative_tokens": 3, **fields}
    return config if rule is None else {**config, "acceptance": {"rule": rule, **options_of(rule)}}


def options_of(rule: str) -> dict[str, Any]:
    return OPTIONS.get(rule, {})


def params(seed: int, temperature: float = 1.0) -> SamplingParams:
    return SamplingParams(temperature=temperature, seed=seed, max_tokens=10, logprobs=1)


@cache
def alone(rule: str, prompt: int, seed: int, temperature: float) -> Any:
    """The output of an LLM with this rule, one request at a time."""
    (output,) = _with_rule(rule).generate([PROMPTS[prompt]], params(seed, temperature))
    return output.token_ids, output.logprobs, output.metrics.num_accepted_tokens


@cache
def _with_rule(rule: str) -> LLM:
    return LLM(model(), speculative_config=config_of(rule), enable_prefix_caching=False)


@cache
def _plain() -> LLM:
    return LLM(model())


def in_one_batch(llm: LLM, rules: list[str | None], temperature: float) -> list[Any]:
    """Outputs of requests that bring these rules, for all seeds together."""
    configs = [None if rule is None else config_of(rule) for rule in rules for _ in SEEDS]
    prompts = [PROMPTS[index % 2] for index in range(len(rules)) for _ in SEEDS]
    every = [params(seed, temperature) for _ in rules for seed in SEEDS]
    outputs = llm.generate(prompts, every, speculative_config=configs)
    return [(o.token_ids, o.logprobs, o.metrics.num_accepted_tokens) for o in outputs]


NEIGHBOURS = list(pairwise(REGISTERED))
"""Every rule with one or two others; `test_all_rules_in_one_batch_whatever_the_default` has all."""


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(*pair, marks=() if pair in NEIGHBOURS else pytest.mark.slow)
        for pair in combinations(REGISTERED, 2)
    ],
)
def test_two_rules_in_one_batch(first: str, second: str) -> None:
    found = in_one_batch(_plain(), [first, second], 1.0)
    expected = [
        alone(rule, index, seed, 1.0)
        for index, rule in enumerate((first, second))
        for seed in SEEDS
    ]
    assert found == expected


@pytest.mark.parametrize(
    ("default", "temperature"),
    [
        ("coupled", 0.0),
        *(
            # A default is seen by requests without a rule alone.
            pytest.param(rule, 0.8, marks=() if rule in ("coupled", "block") else pytest.mark.slow)
            for rule in REGISTERED
        ),
    ],
)
def test_all_rules_in_one_batch_whatever_the_default(default: str, temperature: float) -> None:
    llm = LLM(model(), speculative_config=config_of(default), max_num_seqs=64)
    rules = [None, *REGISTERED]
    expected = [
        alone(rule or default, index % 2, seed, temperature)
        for index, rule in enumerate(rules)
        for seed in SEEDS
    ]
    assert in_one_batch(llm, rules, temperature) == expected


def test_the_rules_differ() -> None:
    """Otherwise the tests above would say little."""
    every = {rule: tuple(alone(rule, 0, seed, 1.0)[0] for seed in SEEDS) for rule in REGISTERED}
    # Of chains `k_sequential` makes what `rejection` does.
    same = {("rejection", "k_sequential")}
    pairs = [pair for pair in combinations(REGISTERED, 2) if every[pair[0]] == every[pair[1]]]
    assert set(pairs) <= same
    assert sum(alone(rule, 0, seed, 1.0)[2] for rule in REGISTERED for seed in SEEDS) > 50


def test_a_request_without_a_rule_has_the_llms() -> None:
    llm = LLM(model(), speculative_config={"method": "none", "acceptance": "rejection"})
    outputs = [
        llm.generate([PROMPTS[0]], params(seed), speculative_config=config_of(None))[0]
        for seed in SEEDS
    ]
    assert [(o.token_ids, o.logprobs, o.metrics.num_accepted_tokens) for o in outputs] == [
        alone("rejection", 0, seed, 1.0) for seed in SEEDS
    ]


def test_a_rule_that_does_not_fit_the_requests_drafter() -> None:
    config = config_of("block", num_speculative_tokens=None, tree=[2, 1])
    with pytest.raises(CompatibilityError, match="'block' takes chains only"):
        _plain().generate([PROMPTS[0]], speculative_config=config)
    wrong = {**config_of(None), "acceptance": "blok"}
    with pytest.raises(ConfigError, match="did you mean 'block'"):
        _plain().generate([PROMPTS[0]], speculative_config=wrong)
    (output,) = _plain().generate([PROMPTS[0]], params(0))
    assert len(output.token_ids) == 10
