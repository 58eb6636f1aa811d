"""Traces survive JSON, and what is not a trace is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from foretoken import ForetokenError, SamplingParams, Trace
from tests.matrix import PROMPTS, tiny_llm
from tests.tiny import tiny_model


def some_trace() -> Trace:
    llm = tiny_llm(tiny_model(), "ngram")
    return llm.generate([PROMPTS[0]], SamplingParams(seed=1, max_tokens=12), trace=True)[0].trace


def test_round_trip(tmp_path: Path) -> None:
    trace = some_trace()
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(trace.as_dict()))
    assert Trace.load(path) == trace
    assert len(trace) == len(list(trace)) > 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "cannot read trace"),
        pytest.param("[" * 100_000, "cannot read trace", id="deep"),
        ("[]", "not a trace"),
        ('{"format": "other"}', "not a trace"),
        ('{"format": "foretoken-trace-1"}', "damaged trace"),
        ('{"format": "foretoken-trace-1", "pieces": {}, "steps": [{"x": 1}]}', "unknown fields"),
        ('{"format": "foretoken-trace-1", "pieces": {}, "steps": [{}]}', "damaged trace"),
        ('{"format": "foretoken-trace-1", "pieces": [], "steps": []}', "damaged trace"),
    ],
)
def test_not_a_trace(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(text)
    with pytest.raises(ForetokenError, match=message):
        Trace.load(path)


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(ForetokenError, match="cannot read trace"):
        Trace.load(tmp_path / "absent.json")
