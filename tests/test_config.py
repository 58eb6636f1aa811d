"""Parameters out of range name the field and the range, in one line."""

from __future__ import annotations

from typing import Any

import pytest

from foretoken import ConfigError, SamplingParams, SpeculativeConfig


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": -0.1}, "temperature: input should be greater than or equal to 0"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_p": 0}, "top_p: input should be greater than 0, got 0."),
        ({"top_p": 1.1}, "top_p: input should be less than or equal to 1"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 2.5}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"max_tokens": 0}, "max_tokens: input should be greater than or equal to 1, got 0."),
        ({"min_tokens": -1}, "min_tokens"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"n": 0}, "n: input should be greater than or equal to 1"),
        ({"logprobs": -1}, "logprobs"),
        ({"allowed_token_ids": []}, "allowed_token_ids: at least one token must be allowed"),
        ({"stop": ["a", ""]}, "stop: a stop string cannot be empty"),
        ({"stop": 3}, "stop"),
        ({"max_token": 3}, "no field 'max_token': did you mean 'max_tokens'?"),
        ({"min_tokens": 9, "max_tokens": 3}, "min_tokens (9) is larger than max_tokens (3)."),
        ({"temperature": 0, "n": 2}, "n=2 with temperature 0"),
    ],
)
def test_out_of_range(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SamplingParams(**fields)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, ValueError)


def test_one_stop_string_is_a_list_of_one() -> None:
    assert SamplingParams(stop="x").stop == ("x",)
    assert SamplingParams(stop=None).stop == ()


def test_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        SamplingParams().top_k = 3


def test_parse() -> None:
    assert SpeculativeConfig.parse(None).method == "none"
    config = SpeculativeConfig.parse({"method": "ngram", "prompt_lookup_max": 6})
    assert SpeculativeConfig.parse(config) is config
    assert config.gamma == 16
    assert config.options.model_dump() == {"prompt_lookup_max": 6, "prompt_lookup_min": 1}


def test_a_model_implies_the_method() -> None:
    assert SpeculativeConfig(model="some/folder").method == "draft_model"


def test_as_dict_shows_every_field_that_takes_effect() -> None:
    config = SpeculativeConfig.parse(
        {"method": "ngram_table", "acceptance": {"rule": "lenient", "lenience": 0.3}}
    )
    assert config.as_dict() == {
        "method": "ngram_table",
        "num_speculative_tokens": 4,
        "model": None,
        "acceptance": {"rule": "lenient", "lenience": 0.3},
        "controller": {"rule": "fixed"},
        "window": 512,
        "draft_temperature": None,
    }


DRAFTERS = [{"method": "ngram"}, {"method": "ngram_table"}]


@pytest.mark.parametrize(
    ("fields", "controller"),
    [
        ({"method": "ngram"}, "cost_model"),
        ({"model": "some/folder", "tree": [2, 1]}, "cost_model"),
        ({"method": "ensemble", "drafters": DRAFTERS}, "cost_model"),
        ({"method": "horizontal_cascade", "drafters": DRAFTERS, "tokens": [2, 2]}, "cost_model"),
        ({"method": "ngram", "controller": "heuristic"}, "heuristic"),
        ({"method": "ngram", "controller": {"rule": "fixed"}}, "fixed"),
        ({"method": "none"}, "fixed"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "fixed"),
        ({"method": "ngram", "acceptance": "rejection"}, "fixed"),
        ({"method": "ngram", "acceptance": "typical"}, "fixed"),
        ({"method": "recycle"}, "cost_model"),
        ({"method": "lookahead"}, "fixed"),
        ({"method": "pad"}, "fixed"),
        ({"method": "ensemble", "drafters": [*DRAFTERS, {"method": "lookahead"}]}, "fixed"),
        ({"method": "lookahead", "controller": "cost_model"}, "cost_model"),
    ],
)
def test_the_controller_of_those_who_name_none(fields: dict[str, Any], controller: str) -> None:
    """Draft lengths follow what is timed where the tokens do not depend on them."""
    config = SpeculativeConfig.parse(fields)
    assert config.controller_name == controller
    assert config.as_dict()["controller"]["rule"] == controller


def test_a_requests_controller_goes_by_the_rule_it_runs_under() -> None:
    config = SpeculativeConfig.parse({"method": "ngram"})
    assert config.controller_under("coupled") == "cost_model"
    assert config.controller_under("rejection") == "fixed"
