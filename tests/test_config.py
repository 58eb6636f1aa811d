"""Parameters out of range name the field and the range, in one line."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tokenleap import ConfigError, SamplingParams, SpeculativeConfig
from tokenleap.core.acceptance import RULES

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": -0.1}, "temperature: input should be greater than or equal to 0"),
        ({"temperature": INF}, "temperature: "),
        ({"top_p": 0}, "top_p: input should be greater than 0, got 0."),
        ({"top_p": 1.1}, "top_p: input should be less than or equal to 1"),
        ({"top_k": -2}, "top_k: "),
        ({"top_k": 2.5}, "top_k: "),
        ({"min_p": 2}, "min_p: "),
        ({"repetition_penalty": 0}, "repetition_penalty: "),
        ({"presence_penalty": 2.5}, "presence_penalty: "),
        ({"frequency_penalty": -3}, "frequency_penalty: "),
        ({"max_tokens": -1}, "max_tokens: input should be greater than or equal to 0, got -1."),
        ({"min_tokens": -1}, "min_tokens: "),
        ({"seed": -1}, "seed: "),
        ({"seed": 2**63}, "seed: "),
        ({"n": 0}, "n: input should be greater than or equal to 1"),
        ({"logprobs": -2}, "logprobs: "),
        ({"allowed_token_ids": []}, "allowed_token_ids: at least one token must be allowed"),
        ({"stop": ["a", ""]}, "stop: a stop string cannot be empty"),
        ({"stop": 3}, "stop"),
        ({"max_token": 3}, "SamplingParams has no field 'max_token': did you mean 'max_tokens'?"),
        ({"min_tokens": 9, "max_tokens": 3}, "min_tokens (9) is larger than max_tokens (3)."),
        ({"temperature": 0, "n": 2}, "n=2 with temperature 0"),
        # Distributions are computed in float32: these would become infinite, or 0.
        *(
            ({name: value}, f"{name}: ")
            for name, value in (
                ("temperature", 1e39),
                ("temperature", NAN),
                *(("logit_bias", {3: bias}) for bias in (1e39, -1e39, NAN, -INF)),
                ("repetition_penalty", 1e-46),
                ("repetition_penalty", 1e39),
                *((f"{kind}_penalty", NAN) for kind in ("presence", "frequency")),
                ("min_p", NAN),
                ("top_p", NAN),
            )
        ),
        # What beam search has no use for.
        *(
            ({"temperature": 0.0, "beam_width": 2, **fields}, message)
            for fields, message in (
                ({"temperature": 1.0}, "beam_width=2 searches and does not sample: set temper"),
                ({"top_k": 5}, "top_k is not possible in beam search"),
                ({"stop": "."}, "stop is not possible in beam search"),
                ({"logprobs": 0}, "logprobs is not possible in beam search"),
                ({"presence_penalty": 0.5}, "presence_penalty is not possible in beam search"),
                ({"structured_outputs": {"regex": "a"}}, "structured_outputs is not possible in"),
                ({"beam_width": 1, "length_penalty": 2.0}, "length_penalty is for beam search"),
                ({"beam_width": 1, "early_stopping": "never"}, "early_stopping is for beam sea"),
                ({"early_stopping": "soon"}, "early_stopping: "),
                ({"length_penalty": 6.0}, "length_penalty: "),
                ({"beam_width": 65}, "beam_width: "),
            )
        ),
        # Names of other libraries.
        *(
            ({name: 3}, f"SamplingParams has no field '{name}': use {advice}")
            for name, advice in (
                ("max_new_tokens", "'max_tokens'"),
                ("max_length", "'max_tokens'"),
                ("do_sample", "'temperature', where 0 is greedy"),
                ("num_beams", "'beam_width' with temperature 0"),
                ("num_return_sequences", "'n'"),
                ("best_of", "'n'"),
                ("guided_decoding", "structured_outputs"),
                ("guided_json", "structured_outputs={'json': ...}"),
                ("guided_regex", "structured_outputs={'regex': ...}"),
                ("guided_choice", "structured_outputs={'choice': ...}"),
                ("guided_grammar", "structured_outputs={'grammar': ...}"),
            )
        ),
    ],
    ids=str,
)
def test_what_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SamplingParams(**fields)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 200
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("method", ["none", "ngram", "lookahead"])
@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("assistant_model", "use 'model'."),
        ("prompt_lookup_num_tokens", "use method 'ngram' with 'num_speculative_tokens'."),
        ("num_assistant_tokens", "use 'num_speculative_tokens'."),
    ],
)
def test_names_of_other_libraries_for_speculation(name: str, advice: str, method: str) -> None:
    message = f"speculative_config for method '{method}' has no field '{name}': {advice}"
    for make in (SpeculativeConfig.parse, lambda fields: SpeculativeConfig(**fields)):
        with pytest.raises(ConfigError) as caught:
            make({"method": method, name: 3})
        assert str(caught.value) == message


def test_advice_names_fields_that_exist() -> None:
    for kind in (SamplingParams, SpeculativeConfig):
        for name, advice in kind.foreign_names.items():
            assert name not in kind.field_names()
            for word in re.findall(r"use '(\w+)'", advice):
                assert word in kind.field_names()


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
        "draft_temperature": None,
        "draft_top_k": None,
        "draft_top_p": None,
        "window": None,
    }


DRAFTERS = [{"method": "ngram"}, {"method": "ngram_table"}]


@pytest.mark.parametrize(
    ("fields", "controller"),
    [
        ({"method": "ngram"}, "cost_model"),
        ({"model": "some/folder", "tree": [2, 1]}, "cost_model"),
        ({"method": "ensemble", "drafters": DRAFTERS}, "cost_model"),
        ({"method": "horizontal_cascade", "drafters": DRAFTERS, "tokens": [2, 2]}, "cost_model"),
        ({"method": "hybrid", "model": "some/folder"}, "cost_model"),
        ({"method": "hybrid", "model": "some/folder", "acceptance": "rejection"}, "fixed"),
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
        ({"method": "prediction", "drafter": {"method": "lookahead"}}, "fixed"),
        ({"method": "hybrid", "drafter": {"method": "pass"}, "model": "some/folder"}, "fixed"),
        ({"method": "cascade", "drafter": {"method": "pad"}, "model": "some/folder"}, "cost_model"),
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
    assert config.controller_under(RULES["coupled"]()) == "cost_model"
    assert config.controller_under(RULES["rejection"]()) == "fixed"


def test_nested_configurations_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    nested: dict[str, Any] = {"method": "ngram"}
    for _ in range(12):
        nested = {"method": "ensemble", "drafters": [nested, {"method": "ngram"}]}
    parsed: list[Any] = []
    parse = SpeculativeConfig.parse

    def counted(given: Any) -> SpeculativeConfig:
        parsed.append(given)
        return parse(given)

    monkeypatch.setattr(SpeculativeConfig, "parse", counted)
    SpeculativeConfig.parse(nested)
    assert len(parsed) == 1 + 2 * 12
