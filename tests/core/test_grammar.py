"""Structured outputs: only outputs of the form, exactly p among them, with any drafter."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import pytest
import torch

from tests.matrix import LOSSLESS, SPECULATIVE, fits, speculative_config
from tests.tiny import VOCAB_SIZE, tiny_model, tiny_tokenizer
from tokenleap import LLM, ConfigError, RequestError, SamplingParams, StructuredOutputsParams
from tokenleap.core.grammar import Grammar, Grammars

EOS = 95
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["ada", "bob"]}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORMS: dict[str, dict[str, Any]] = {
    "json": {"json": SCHEMA, "disable_any_whitespace": True},
    "regex": {"regex": "(ab|ac){4,6}[0-9]{3}"},
    "choice": {"choice": ["yes", "yesterday", "no"]},
    "grammar": {"grammar": 'start: "(" start ")" | "x"'},
}


def matches(form: str, text: str) -> bool:
    match form:
        case "json":
            value = json.loads(text)
            return value["name"] in ("ada", "bob") and value["age"] <= 99 and len(value) == 2
        case "regex":
            return re.fullmatch(FORMS["regex"]["regex"], text) is not None
        case "choice":
            return text in FORMS["choice"]["choice"]
        case _:
            depth = text.count("(")
            return text == "(" * depth + "x" + ")" * depth


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model(eos_token_id=EOS)


def llm_of(model: Any, method: str = "none", rule: str = "coupled", gamma: int = 6) -> LLM:
    config = speculative_config(method, rule, gamma)
    return LLM(model, tokenizer=tiny_tokenizer(), speculative_config=config)


def params(
    form: str, temperature: float = 0, seed: int = 0, max_tokens: int = 120
) -> SamplingParams:
    return SamplingParams(
        temperature=temperature, seed=seed, max_tokens=max_tokens, structured_outputs=FORMS[form]
    )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("temperature", [0, 1.0, 3.0])
def test_outputs_have_the_form(model: Any, form: str, temperature: float) -> None:
    llm = llm_of(model, "ngram_table")
    finished = 0
    for seed in range(6):
        (output,) = llm.generate("some prompt", params(form, temperature, seed))
        if output.finish_reason == "stop":
            finished += 1
            assert output.token_ids[-1] == EOS
            assert matches(form, output.text), output.text
    assert finished, "a greedy output may count up forever, all of them should not"


PROMPTS = ["one prompt", "another, much longer prompt {}", "x"]
MOST = 48


@pytest.fixture(scope="module")
def plain(model: Any) -> dict[tuple[str, float], list[tuple[int, ...]]]:
    """Outputs of `none`, by form and temperature."""
    found = {
        (form, temperature): llm_of(model).generate(PROMPTS, params(form, temperature, 5, MOST))
        for form in ("json", "regex")
        for temperature in (0, 1.0)
    }
    for form in ("json", "regex"):
        results = (*found[form, 0], *found[form, 1.0])
        assert "stop" in {result.outputs[0].finish_reason for result in results}, form
    return {key: [result.token_ids for result in results] for key, results in found.items()}


@pytest.mark.parametrize("method", SPECULATIVE)
@pytest.mark.parametrize(
    ("form", "temperature"),
    [
        ("json", 1.0),
        ("regex", 0),
        pytest.param("json", 0, marks=pytest.mark.slow),
        pytest.param("regex", 1.0, marks=pytest.mark.slow),
    ],
)
def test_every_drafter_gives_the_output_of_none(
    model: Any,
    plain: dict[tuple[str, float], list[tuple[int, ...]]],
    form: str,
    temperature: float,
    method: str,
) -> None:
    outputs = llm_of(model, method).generate(PROMPTS, params(form, temperature, 5, MOST))
    assert [output.token_ids for output in outputs] == plain[form, temperature]


@pytest.mark.parametrize("rule", LOSSLESS)
def test_every_lossless_rule_stays_in_the_form(model: Any, rule: str) -> None:
    method = "draft_model" if fits("draft_model", rule) else "ngram"
    llm = llm_of(model, method, rule)
    for seed in range(3):
        (output,) = llm.generate("{", params("regex", 1.0, seed))
        assert matches("regex", output.text)


def test_the_distribution_is_p_restricted_to_what_is_allowed() -> None:
    outputs = StructuredOutputsParams(regex="[a-c]x")
    grammar = Grammars(tiny_tokenizer(), VOCAB_SIZE, [EOS]).compile(outputs)
    allowed = grammar.allowed([])
    assert allowed is not None
    assert allowed.nonzero()[:, 0].tolist() == [65, 66, 67]  # a, b, c
    from tokenleap.core.sampler import Sampler

    fields = SamplingParams(temperature=0.7, structured_outputs=outputs)
    sampler = Sampler(fields, VOCAB_SIZE, [1], [EOS], grammar)
    logits = torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    distribution = sampler.distribution(logits, [])
    expected = (logits[65:68] / 0.7).softmax(-1)
    assert distribution.tokens.tolist() == [65, 66, 67]
    assert torch.allclose(distribution.probs, expected)


def test_a_grammar_goes_to_wherever_it_is_asked() -> None:
    grammars = Grammars(tiny_tokenizer(), VOCAB_SIZE, [EOS])
    outputs = StructuredOutputsParams(regex="(ab|ac)*d")
    walking = grammars.compile(outputs)
    a, b, c, d = 65, 66, 67, 68
    for path in ([a, b], [a, c, a], [], [d], [a, b, a, b, d], [a, b], [b], [a, b, d, EOS], [a]):
        expected = grammars.compile(outputs).allowed(path)
        found = walking.allowed(path)
        assert (expected is None) == (found is None)
        if expected is not None and found is not None:
            assert torch.equal(expected, found)
    assert walking.allowed([b]) is None
    assert walking.forced([b]) == []


def test_forced_tokens_are_drafted_and_accepted(model: Any) -> None:
    (output,) = llm_of(model, "regex", gamma=16).generate("x", params("json", 1.0, seed=1))
    metrics = output.metrics
    assert metrics.acceptance_rate == 1.0
    forced = len('{"name":"') + len('","age":')
    assert metrics.num_accepted_tokens >= forced
    assert metrics.target_passes <= len(output.token_ids) - forced


def test_an_expected_form_is_only_a_guess(model: Any) -> None:
    form = {"regex": "(abc){50}"}
    config = {"method": "regex", "expected": form, "controller": "fixed"}
    llm = LLM(model, tokenizer=tiny_tokenizer(), speculative_config=config)
    free = SamplingParams(temperature=0, max_tokens=30)
    (output,) = llm.generate("abcabc", free)
    assert output.token_ids == llm_of(model).generate("abcabc", free)[0].token_ids
    assert output.metrics.num_draft_tokens > 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"regex": "(a"}, r"structured_outputs: regex: not valid: .*unclosed group"),
        ({"json": {"type": "obj"}}, "json: not valid: Invalid type: obj"),
        ({"json": "{nope"}, "json: the schema is not valid JSON"),
        ({"json": "[1]"}, r"a schema is a JSON object"),
        ({"grammar": "start: foo"}, "grammar: not valid: .*unknown name"),
        ({"choice": []}, "choice: .*at least 1 item"),
        ({}, "give one of json, regex.*got none of them"),
        ({"regex": "a", "choice": ["b"]}, "got regex and choice"),
        ({"regx": "a"}, "did you mean 'regex'"),
        ({"regex": "a", "disable_any_whitespace": True}, "is for json, not for regex"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        SamplingParams(structured_outputs=fields)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "field", [{"min_tokens": 3}, {"ignore_eos": True}, {"allowed_token_ids": [1]}]
)
def test_contradictions(field: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="contradicts structured_outputs"):
        SamplingParams(structured_outputs={"regex": "a"}, **field)


def test_models_that_cannot(model: Any) -> None:
    asked = SamplingParams(structured_outputs={"regex": "a"})
    with pytest.raises(ConfigError, match="end-of-sequence token"):
        LLM(tiny_model(), tokenizer=tiny_tokenizer()).generate("a", asked)
    with pytest.raises(ConfigError, match="fast tokenizer"):
        LLM(model).generate([1, 2], asked)


def test_the_library_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ConfigError, match="pip install 'llguidance<"):
        SamplingParams(structured_outputs={"regex": "a"})


def grammars() -> Grammars:
    return Grammars(tiny_tokenizer(), VOCAB_SIZE, [EOS])


def test_many_choices_are_kept_to(model: Any) -> None:
    choices = [f"w{number}" for number in range(3000)]
    wanted = SamplingParams(
        temperature=1, seed=3, max_tokens=20, structured_outputs={"choice": choices}
    )
    (output,) = llm_of(model).generate("hello", wanted)
    assert output.finish_reason == "stop"
    assert output.text in choices


def test_a_form_that_is_too_complex_is_refused() -> None:
    names = {f"name{number}": {"type": "integer"} for number in range(2000)}
    with pytest.raises(ConfigError, match=r"json: too complex: .*items"):
        StructuredOutputsParams(json={"properties": names, "additionalProperties": False})


AMBIGUOUS: dict[str, Any] = {"grammar": 'start: s\ns: s s s | s s | "a"'}


@pytest.fixture
def few_items(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenleap.core.trial.MAX_ITEMS", 200)


@pytest.mark.usefixtures("few_items")
def test_a_limit_reached_later_is_an_error_and_not_the_end_of_the_form() -> None:
    grammar = grammars().compile(StructuredOutputsParams(**AMBIGUOUS))
    (a,) = tiny_tokenizer().encode("a", add_special_tokens=False)
    with pytest.raises(RequestError, match=r"structured_outputs: .*items"):
        grammar.allowed([a] * 60)
    allowed = grammar.allowed([a])  # the long one may have been a draft that was rejected
    assert allowed is not None
    assert allowed.nonzero().flatten().tolist() == sorted({a, EOS})


def test_the_work_for_a_mask_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial ends before the expression becomes expensive."""
    monkeypatch.setattr("tokenleap.core.trial.MAX_FUEL", 200)
    grammar = grammars().compile(StructuredOutputsParams(regex="a{70}(.*a.{40}b.{40})*"))
    (a,) = tiny_tokenizer().encode("a", add_special_tokens=False)
    assert grammar.allowed([a] * 60) is not None

    def grow() -> None:
        for length in range(60, 80):
            grammar.allowed([a] * length)

    with pytest.raises(RequestError, match=r"structured_outputs: .*expressions"):
        grow()


@pytest.mark.usefixtures("few_items")
@pytest.mark.parametrize("method", ["none", "ngram", "regex"])
def test_a_request_that_reaches_a_limit_ends_with_an_error(model: Any, method: str) -> None:
    endless = SamplingParams(
        temperature=0, max_tokens=60, logit_bias={EOS: -1e9}, structured_outputs=AMBIGUOUS
    )
    with pytest.raises(RequestError, match=r"structured_outputs: .*items") as failed:
        llm_of(model, method).generate("hello", endless)
    (output,) = failed.value.outputs
    assert output.finish_reason == "error"
    assert set(output.text) == {"a"}


class Stubborn:
    """A matcher that fails once it has consumed a five."""

    made = 0

    def __init__(self) -> None:
        type(self).made += 1
        self.consumed = list[int]()

    def try_consume_tokens(self, tokens: list[int]) -> int:
        self.consumed += tokens
        return len(tokens)

    def rollback(self, count: int) -> None:
        del self.consumed[len(self.consumed) - count :]

    def is_error(self) -> bool:
        return 5 in self.consumed

    def get_error(self) -> str:
        return "too many items"

    def compute_bitmask(self) -> bytes:
        return b"\xff"


def test_an_output_that_the_matcher_fails_for_is_not_tried_again() -> None:
    Stubborn.made = 0
    grammar = Grammar(Stubborn, 8)
    for output in ([1, 5], [1, 5], [1, 5, 2]):
        with pytest.raises(RequestError, match="structured_outputs: too many items"):
            grammar.allowed(output)
    assert Stubborn.made == 2
    assert grammar.allowed([1, 2]) is not None  # it was a draft


def test_a_grammar_that_takes_long_ends_its_output(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = 0.0

    def now() -> float:
        nonlocal seconds
        seconds += 0.3
        return seconds

    monkeypatch.setattr("time.thread_time", now)
    grammar = Grammar(Stubborn, 8)
    assert grammar.allowed([1]) is not None  # 0.6 seconds
    for _ in range(2):
        with pytest.raises(RequestError, match="finding what may come next takes too long"):
            grammar.allowed([1, 2])
    assert seconds == pytest.approx(8 * 0.3)  # and nothing is asked again
