"""`trace --timeline`: the spans of a trace, in the terminal and as SVG."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.cli.conftest import Run, error_of
from tests.tiny import tiny_model
from tokenleap import LLM, Origin, SamplingParams, StepTrace, Trace
from tokenleap.cli.trace import Span, timeline_of
from tokenleap.errors import TokenleapError

PLAIN = StepTrace((), (), (), (), (), (), "", 5, Origin.BONUS, 1, 0.0, 0.4, 0.0)
DRAFTED = StepTrace(
    (-1, 0, 0),
    (1, 2, 3),
    (1.0,) * 3,
    (None,) * 3,
    (0, 1),
    (),
    "",
    4,
    Origin.BONUS,
    3,
    0.2,
    0.4,
    0.1,
)
WITH_PROMPT = Trace([DRAFTED, PLAIN], {}, encode_seconds=0.1, prefill_seconds=0.3)


def saved(folder: Path, name: str, trace: Trace) -> Path:
    file = folder / name
    file.write_text(json.dumps(trace.as_dict()))
    return file


def test_spans_follow_one_another() -> None:
    found = timeline_of("x", WITH_PROMPT)
    expected = [
        Span("encoder", 0, 0.1),
        Span("prompt", 0.1, 0.3),
        Span("draft", 0.3, 0.5, levels=2),
        Span("target", 0.5, 0.9),
        Span("accept", 0.9, 1.0),
        Span("target", 1.0, 1.4),
    ]
    assert [(span.kind, span.levels) for span in found.spans] == [
        (span.kind, span.levels) for span in expected
    ]
    for got, wanted in zip(found.spans, expected, strict=True):
        assert (got.start, got.end) == pytest.approx((wanted.start, wanted.end))
    assert (found.tokens, found.count("target")) == (4, 2)
    assert found.total("target") == pytest.approx(0.8)


def test_looking_for_a_draft_in_vain_is_not_a_draft() -> None:
    found = timeline_of("x", Trace([replace(PLAIN, draft_seconds=0.1)]))
    assert [span.kind for span in found.spans] == ["target", "accept"]


def test_a_trace_without_times() -> None:
    with pytest.raises(TokenleapError, match="x: the trace has no steps with times"):
        timeline_of("x", Trace([replace(PLAIN, verify_seconds=0.0)]))


def test_the_terminal_has_a_cell_for_equal_times(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cell is a quarter of the median pass, here 0.1 s."""
    monkeypatch.setenv("COLUMNS", "80")
    file = saved(tmp_path, "run.json", WITH_PROMPT)
    result = run("trace", file, "--timeline")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0].split("   ")[:2] == ["E the encoder", "P the prompt"]
    assert "one cell: 100 ms" in lines[1]
    assert lines[3] == "run: 4 tokens in 1.40 s: 2 target passes 0.80 s, 1 drafts 0.20 s"
    assert lines[4] == "0.00 EPP▒▒▐███·▐███"


def test_long_traces_keep_within_the_terminal(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several traces have one scale, and the longest has twenty lines at most."""
    monkeypatch.setenv("COLUMNS", "80")
    long = saved(tmp_path, "long.json", Trace([PLAIN] * 2000))
    short = saved(tmp_path, "short.json", Trace([DRAFTED] * 200))
    lines = run("trace", long, short, "--timeline").stdout.splitlines()
    assert max(map(len, lines)) <= 80
    bars = [part.splitlines()[1:] for part in "\n".join(lines).split("\n\n")]
    assert len(bars[1]) == 20
    cells = [sum(len(line) - 7 for line in part) for part in bars[1:]]
    assert cells[1] / cells[0] == pytest.approx(200 * 0.7 / (2000 * 0.4), rel=0.02)


def test_svg_of_several_traces(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    one = saved(tmp_path, "gamma7.json", WITH_PROMPT)
    other = saved(tmp_path, "plain.json", Trace([PLAIN] * 3))
    svg = tmp_path / "timeline.svg"
    result = run("trace", one, other, "--svg", svg)
    assert result.exit_code == 0
    assert result.stdout == ""
    text = svg.read_text()
    assert ElementTree.fromstring(text).tag.endswith("svg")
    for word in ("gamma7", "plain", "a target pass", "the encoder", "seconds"):
        assert f">{word}<" in text
    run("trace", one, other, "--svg", svg)
    assert svg.read_text() == text


def test_a_run_has_the_time_of_its_prompt() -> None:
    llm = LLM(tiny_model(), speculative_config={"method": "random", "controller": "fixed"})
    (output,) = llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=8))
    assert output.trace.prefill_seconds == output.metrics.prefill_seconds > 0
    again = Trace.from_dict(json.loads(json.dumps(output.trace.as_dict())))
    assert again == output.trace
    kinds = [span.kind for span in timeline_of("x", again).spans]
    assert kinds[:3] == ["prompt", "draft", "target"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--timeline", "--json"], "leave out --json and --html"),
        (["two.json"], "only --timeline and --svg take several traces"),
        (["--svg", "no/such/folder.svg"], "there is no folder"),
    ],
)
def test_wrong_use(run: Run, tmp_path: Path, arguments: list[str], message: str) -> None:
    result = run("trace", saved(tmp_path, "one.json", WITH_PROMPT), *arguments)
    assert result.exit_code == 2
    assert message in error_of(result)


def test_svg_without_matplotlib(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenleap.cli.trace.find_spec", lambda _: None)
    file = saved(tmp_path, "one.json", WITH_PROMPT)
    result = run("trace", file, "--svg", tmp_path / "x.svg")
    assert result.exit_code == 2
    assert "--svg needs Matplotlib: pip install 'tokenleap[plots]'" in error_of(result)
