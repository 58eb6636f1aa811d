"""The head that comes with the package is the default of its model, and of no other."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny import tiny_model
from tokenleap import LLM, ConfigError, SamplingParams
from tokenleap.bench.contestants import methods
from tokenleap.cli.options import SpeculationOptions
from tokenleap.config import SpeculativeConfig
from tokenleap.drafters.heads.layouts import EagleFolder
from tokenleap.drafters.heads.shipped import shipped_config, shipped_head

ALIAS = "smollm2-135m"
LARGEST = 16_000_000
"""Bytes that a head may add to the package."""


def test_it_is_complete_and_small() -> None:
    head = shipped_head(ALIAS)
    assert head is not None
    assert EagleFolder.read(head, "eagle").verifier.name_or_path == ALIAS
    assert sum(file.stat().st_size for file in head.iterdir()) <= LARGEST


@pytest.mark.parametrize(
    "name", ["unknown", "", ".", "..", "../pretrained/smollm2-135m", "a\0b", None, 3, Path(ALIAS)]
)
def test_other_models_have_none(name: object) -> None:
    assert shipped_head(name) is None
    assert shipped_config(name, trees=True) is None


def test_a_model_without_a_head_does_not_speculate() -> None:
    assert LLM(tiny_model()).speculative_config.method_name == "none"


@pytest.mark.model
def test_it_is_the_default_of_its_model() -> None:
    llm = LLM(ALIAS)
    assert llm.speculative_config.method_name == "hybrid"
    always = {**llm.speculative_config.as_dict(), "controller": "fixed"}
    messages = [{"role": "user", "content": "Write a few sentences about rain."}]
    for params in (
        SamplingParams(temperature=0, max_tokens=12),
        SamplingParams(temperature=1, seed=3, max_tokens=12),
    ):
        (plain,) = llm.chat([messages], params, speculative_config={"method": "none"})
        for config in ({"method": "hybrid"}, {"method": "eagle"}, None, always):
            (drafted,) = llm.chat([messages], params, speculative_config=config)
            assert drafted.token_ids == plain.token_ids
            assert drafted.metrics.drafter_failure is None
        assert drafted.metrics.num_accepted_tokens > 0 or params.temperature
    given = LLM(ALIAS, speculative_config={"method": "hybrid"}).speculative_config
    assert given == llm.speculative_config


def test_the_command_line_takes_it_if_nothing_is_chosen() -> None:
    assert SpeculationOptions().config_for(ALIAS) is None  # the default of `LLM`
    shorter = SpeculationOptions(num_speculative_tokens=4).config_for(ALIAS)
    assert shorter is not None
    assert (shorter.method_name, shorter.gamma) == ("hybrid", 4)
    chosen = SpeculationOptions(method="ngram").config_for(ALIAS)
    assert chosen is not None
    assert chosen.method_name == "ngram"
    other = SpeculationOptions().config_for("another")
    assert other is not None
    assert other.method_name == "ngram"


def test_hybrid_takes_it_and_default_is_what_runs_otherwise() -> None:
    head = str(shipped_head(ALIAS))
    named = SpeculationOptions(method="hybrid").config_for(ALIAS)
    assert named is not None
    assert named.as_dict() == SpeculativeConfig.parse(shipped_config(ALIAS, trees=True)).as_dict()
    with pytest.raises(ConfigError, match="needs a trained head"):
        SpeculationOptions(method="hybrid").config_for("another")
    assert SpeculationOptions(method="default").config_for(ALIAS) is None
    assert SpeculationOptions(method="default").config("another").method_name == "ngram"
    _, of_bench = methods(["hybrid"], None, None, target=ALIAS)
    assert (of_bench.label, of_bench.config["model"]) == ("hybrid", head)
    _, other = methods(["hybrid"], head, None, target="another")
    assert other.config == {"method": "hybrid", "model": head}
    _, alone = methods(["eagle"], None, None, target=ALIAS)
    assert alone.config["model"] == head
    _, shaped = methods(['{"method": "eagle", "tree": [2, 1]}'], None, None, target=ALIAS)
    assert shaped.config == {"method": "eagle", "model": head, "tree": [2, 1]}
    with pytest.raises(ConfigError, match="needs a trained head"):
        methods(["medusa"], None, None, target=ALIAS)
