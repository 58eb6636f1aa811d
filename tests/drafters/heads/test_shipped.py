"""The head that comes with the package is the default of its model, and of no other."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny import tiny_model
from tokenleap import LLM, SamplingParams
from tokenleap.cli.options import SpeculationOptions
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
        for config in (None, always):
            (drafted,) = llm.chat([messages], params, speculative_config=config)
            assert drafted.token_ids == plain.token_ids
            assert drafted.metrics.drafter_failure is None
        assert drafted.metrics.num_accepted_tokens > 0 or params.temperature


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
