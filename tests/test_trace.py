"""Traces survive JSON, and what is not a trace is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.matrix import PROMPTS, tiny_llm
from tests.tiny import tiny_model
from tests.traces import step as made_step
from tokenleap import SamplingParams, TokenleapError, Trace
from tokenleap.trace import PASS_SIZES


def some_trace() -> Trace:
    llm = tiny_llm(tiny_model(), "ngram")
    return llm.generate([PROMPTS[0]], SamplingParams(seed=1, max_tokens=12), trace=True)[0].trace


def test_round_trip(tmp_path: Path) -> None:
    trace = some_trace()
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(trace.as_dict()))
    assert Trace.load(path) == trace
    assert len(trace) == len(list(trace)) > 1
    assert any(step.sources for step in trace)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_candidates_are_the_most_likely_tokens_of_every_position(temperature: float) -> None:
    """Their probabilities are those that the step has of the drafted tokens among them."""
    llm = tiny_llm(tiny_model(), "draft_model", controller="fixed")
    params = SamplingParams(temperature=temperature, seed=1, max_tokens=60)
    (output,) = llm.generate([PROMPTS[0]], params, trace=True)
    shared = 0
    for step in output.trace:
        assert len(step.candidates) == len(step.drafted) + 1
        assert step.recording_seconds > 0
        for place in step.candidates:
            models = [each.model for each in place]
            assert models == sorted(models, reverse=True)
            assert sum(models) <= 1 + 1e-5
            if temperature == 0:
                assert [each.p for each in place] == [1, 0, 0, 0, 0]
            else:  # neither temperature nor truncation changes the model's own distribution
                assert [each.p for each in place] == pytest.approx(models, abs=2e-6)
        for node, (parent, token) in enumerate(zip(step.parents, step.drafted, strict=True)):
            for each in step.candidates[parent + 1]:
                if each.token == token:
                    assert (each.p, each.q) == pytest.approx((step.p[node], step.q[node]), abs=1e-6)
                    shared += 1
        assert all(each.q is None for each in step.candidates[-1])  # after the chain
    assert shared > 3
    (untraced,) = llm.generate([PROMPTS[0]], params)
    assert untraced.token_ids == output.token_ids
    for step in untraced.trace:
        assert (step.sources, step.candidates, step.recording_seconds) == ((), (), 0)


def test_pass_costs_are_there_if_they_are_measured() -> None:
    """With the default controller, and only in traces that were asked for."""
    params = SamplingParams(temperature=0, max_tokens=4)
    measured = tiny_llm(tiny_model(), "ngram", controller="cost_model")
    (output,) = measured.generate([PROMPTS[0]], params, trace=True)
    sizes, seconds = zip(*output.trace.pass_seconds.items(), strict=True)
    assert sizes == PASS_SIZES
    assert 0 < seconds[0] < seconds[-1]
    assert Trace.from_dict(output.trace.as_dict()) == output.trace
    assert measured.generate([PROMPTS[0]], params)[0].trace.pass_seconds == {}
    fixed = tiny_llm(tiny_model(), "ngram", controller="fixed")
    assert fixed.generate([PROMPTS[0]], params, trace=True)[0].trace.pass_seconds == {}


def test_sources_tell_lookups_from_drafters_with_a_model() -> None:
    found: dict[str, set[str]] = {}
    for method in ("ngram", "draft_model", "hybrid"):
        llm = tiny_llm(tiny_model(), method, controller="fixed")
        params = SamplingParams(temperature=0, max_tokens=24)
        (output,) = llm.generate([PROMPTS[3]], params, trace=True)
        found[method] = {source for step in output.trace for source in step.sources}
    assert found["ngram"] == {"lookup"}
    assert found["draft_model"] == {"model"}
    assert found["hybrid"] == {"lookup", "model"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "cannot read trace"),
        pytest.param("[" * 100_000, "cannot read trace", id="deep"),
        ("[]", "not a trace"),
        ('{"format": "other"}', "not a trace"),
        ('{"format": "tokenleap-trace-1"}', "damaged trace"),
        ('{"format": "tokenleap-trace-1", "pieces": {}, "steps": [{"x": 1}]}', "steps.0.parents"),
        ('{"format": "tokenleap-trace-1", "pieces": {}, "steps": [{}]}', "damaged trace"),
        ('{"format": "tokenleap-trace-1", "pieces": [], "steps": []}', "damaged trace"),
    ],
)
def test_not_a_trace(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(text)
    with pytest.raises(TokenleapError, match=message):
        Trace.load(path)


def test_an_unknown_field_is_refused() -> None:
    value = Trace([made_step((1, 2), (0,))]).as_dict()
    assert len(Trace.from_dict(value)) == 1
    value["steps"][0]["x"] = 1
    with pytest.raises(TokenleapError, match=r"steps\.0\.x: unexpected"):
        Trace.from_dict(value)


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(TokenleapError, match="cannot read trace"):
        Trace.load(tmp_path / "absent.json")
