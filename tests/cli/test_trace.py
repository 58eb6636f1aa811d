"""`trace`: figure 1, for chains and trees; a page; and figure 5, in the terminal and as SVG."""

from __future__ import annotations

import json
import re
from base64 import b64encode
from dataclasses import replace
from hashlib import sha256
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cli.conftest import Run
from tests.tiny import tiny_model, tiny_tokenizer
from tests.traces import PIECES, step
from tokenleap import LLM, Origin, SamplingParams, StepTrace, Trace
from tokenleap.cli.trace import Span, TraceSummary, picture, timeline_of
from tokenleap.errors import TokenleapError

CORRECTED = step((1, 2, 3, 4), (0, 1), rejected=(2,), origin=Origin.CORRECTION, reason="no")
BONUS = step((1, 2), (0, 1), token=4)
PLAIN = step((), (), token=6, origin=Origin.PLAIN)
CUT = replace(BONUS, committed=1)
TREE = step(
    (1, 2, 3, 5, 4, 6),
    (0, 3),
    parents=(-1, 0, 1, 0, 3, 3),
    rejected=(1, 4, 5),
    origin=Origin.CORRECTION,
    reason="no",
)
TREE_AT_ROOT = step((1, 2), (1,), parents=(-1, -1), rejected=(0,), token=4)


def saved(folder: Path, trace: Trace, name: str = "steps.json") -> Path:
    file = folder / name
    file.write_text(json.dumps(trace.as_dict()))
    return file


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (CORRECTED, "·the ·cat ✗·sat ↵ →·dog"),
        (BONUS, "·the ·cat +↵"),
        (PLAIN, "⇥"),
        (CUT, "·the ·cat"),
        (TREE, "·the\n├─ ✗·cat ·sat\n└─ ·dog\n   ├─ ✗↵\n   ├─ ✗⇥\n   └─ →·dog"),
        (TREE_AT_ROOT, "├─ ✗·the\n└─ ·cat +↵"),
        (replace(PLAIN, token=99), "#99"),
    ],
)
def test_picture(shown: StepTrace, expected: str) -> None:
    assert picture(shown, PIECES).plain == expected


def test_styles_say_the_same() -> None:
    def styles(shown: StepTrace) -> list[tuple[str, str]]:
        text = picture(shown, PIECES)
        return [(text.plain[span.start : span.end], str(span.style)) for span in text.spans]

    assert styles(CORRECTED) == [
        ("·the", "draft"),
        ("·cat", "draft"),
        ("✗·sat", "rejected"),
        ("↵", "unreached"),
        ("→·dog", "correction"),
    ]
    assert styles(CUT) == [("·the", "draft"), ("·cat", "unreached")]
    assert styles(BONUS)[-1] == ("+↵", "bold")


def test_summary_counts() -> None:
    summary = TraceSummary(Trace([CORRECTED, BONUS, PLAIN, CUT, TREE]))
    metrics = summary.metrics
    assert (metrics.target_passes, metrics.num_drafts) == (5, 4)
    assert metrics.generated_tokens == 3 + 3 + 1 + 1 + 3
    assert summary.positions == [(4, 4), (4, 3), (2, 0), (1, 0)]
    assert metrics.mean_acceptance_length == 10 / 4  # a stop has cut the bonus token of one
    assert metrics.acceptance_rate == 7 / (7 + 1 + 3)
    assert TraceSummary(Trace([PLAIN])).metrics.mean_acceptance_length == 1
    assert TraceSummary(Trace()).metrics.acceptance_rate == 0


def test_what_a_stop_cut_off_does_not_count() -> None:
    """After the first token of the path, only its own sibling was refused; later ones were not."""
    tree = step((1, 2, 3, 5), (1, 3), parents=(-1, -1, 1, 1), rejected=(0, 2), committed=1)
    assert (tree.kept, tree.refused) == ((1,), (0,))
    assert TraceSummary(Trace([tree])).metrics.num_rejected_tokens == 1
    whole = replace(tree, committed=3)
    assert (whole.kept, whole.refused) == ((1, 3), (0, 2))
    chain = replace(CORRECTED, committed=2)  # the stop is the last accepted token
    assert (chain.kept, chain.refused) == ((0, 1), ())
    assert picture(chain, PIECES).plain == "·the ·cat ·sat ↵"


STOPS = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 5),
        "temperature": st.sampled_from([0.0, 1.0]),
        "max_tokens": st.integers(1, 12),
        "stop": st.lists(st.sampled_from(["(", "I(", "H)", "IH"]), max_size=2).map(tuple),
        "stop_token_ids": st.lists(st.sampled_from([8, 9]), max_size=1).map(tuple),
        "min_tokens": st.integers(0, 6),
        "include_stop_str_in_output": st.booleans(),
    }
)


@pytest.fixture(scope="module")
def tiny_llms() -> list[LLM]:
    """Chains and trees over a model whose end of sequence is the token of `I`."""
    model = tiny_model("lean")
    model.generation_config.eos_token_id = 41
    drafts = {"method": "draft_model", "model": model, "acceptance": "rejection"}
    methods: list[dict[str, Any]] = [
        {"method": "ngram_table"},
        {**drafts, "acceptance": "block", "draft_temperature": 3.0},
        {**drafts, "draft_temperature": 3.0},
        {**drafts, "draft_temperature": 3.0, "tree": [2, 2, 1]},
    ]
    tokenizer = tiny_tokenizer()
    return [
        LLM(model, tokenizer=tokenizer, speculative_config={"controller": "fixed", **fields})
        for fields in methods
    ]


def test_summary_agrees_with_the_metrics_wherever_an_output_stops(tiny_llms: list[LLM]) -> None:
    """Random stops: strings, tokens, the end of sequence inside a draft, and lengths."""
    cut = 0

    @settings(max_examples=60, deadline=None, derandomize=True)
    @given(which=st.integers(0, 3), stops=STOPS)
    def agrees(which: int, stops: dict[str, Any]) -> None:
        nonlocal cut
        stops["min_tokens"] = min(stops["min_tokens"], stops["max_tokens"])
        params = SamplingParams(**stops, allowed_token_ids=(8, 9, 40, 41, 42))
        prompt = [40, 41, 8, 9, 40, 41, 8, 9, 40, 40, 41]
        (output,) = tiny_llms[which].generate([prompt], params)
        found = TraceSummary(output.trace).as_dict()
        metrics = output.metrics.as_dict()
        shared = set(found) & set(metrics)
        assert {"num_rejected_tokens", "num_accepted_tokens", "accepted_per_position"} <= shared
        assert all(found[name] == pytest.approx(metrics[name]) for name in shared)
        assert found["steps"] == metrics["target_passes"]
        assert found["tokens"] == metrics["generated_tokens"] == len(output.token_ids)
        steps = list(output.trace)
        assert all(len(each.refused) == len(each.rejected) for each in steps[:-1])
        cut += len(steps[-1].refused) < len(steps[-1].rejected)

    agrees()
    assert cut > 3, "too few stops before a rejected token to tell anything"


def test_command(run: Run, tmp_path: Path) -> None:
    file = saved(tmp_path, Trace([CORRECTED, PLAIN, TREE], PIECES))
    result = run.done("trace", file)
    for text in ("·the ·cat ✗·sat ↵ →·dog", "2/4", "└─ ·dog", "7 tokens in 3 steps, 2 with"):
        assert text in result.stdout
    summary = json.loads(run("trace", file, "--json").stdout)
    assert summary["accepted_per_position"] == [2, 2, 0, 0]


class _Page(HTMLParser):
    """A page as a browser reads it: elements, attributes, and the text of its scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.outside: list[str] = []
        self.texts: dict[str, str] = {}
        self.policy = ""
        self._in = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.tags.append(tag)
        self.outside += [given[name] or "" for name in ("src", "href") if name in given]
        if given.get("http-equiv") == "Content-Security-Policy":
            self.policy = given["content"] or ""
        self._in = given.get("type") or tag

    def handle_endtag(self, tag: str) -> None:
        self._in = ""

    def handle_data(self, data: str) -> None:
        self.texts[self._in] = self.texts.get(self._in, "") + data


def test_the_page_is_one_file_in_which_text_is_never_markup(run: Run, tmp_path: Path) -> None:
    """It has the whole trace, loads nothing, and its policy allows its own script and style."""
    pieces = {**PIECES, 3: "</script><b>&", 2: '" onx="', 5: "<!--<script>"}
    trace = Trace([CORRECTED, TREE, PLAIN], pieces)
    name = "a<b>&amp;"
    file, out = tmp_path / f"{name}.json", tmp_path / "steps.html"
    file.write_text(json.dumps(trace.as_dict()))
    result = run.done("trace", file, "--html", out)
    assert str(out) in result.stderr.replace("\n", "")
    page = _Page(out.read_text())
    assert page.outside == []
    assert "b" not in page.tags
    assert page.tags.count("script") == 2
    assert page.texts["h1"] == name
    assert Trace.from_dict(json.loads(page.texts["application/json"])) == trace
    for kind, directive in (("module", "script-src"), ("style", "style-src")):
        digest = b64encode(sha256(page.texts[kind].encode()).digest()).decode()
        assert f"{directive} 'sha256-{digest}';" in page.policy
    assert "default-src 'none'" in page.policy
    assert not re.search(r"^(import|export) ", page.texts["module"], re.MULTILINE)


def test_a_page_that_cannot_be_written(run: Run, tmp_path: Path) -> None:
    file = saved(tmp_path, Trace())
    assert "there is no folder" in run.refused(
        "trace", file, "--html", tmp_path / "none" / "out.html"
    )
    assert run("trace", file, "--html", tmp_path / "out.html").exit_code == 0


def test_empty_trace(run: Run, tmp_path: Path) -> None:
    file = saved(tmp_path, Trace())
    assert "0 tokens in 0 steps" in run("trace", file).stdout


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"parents": [-1, 7, 0, 0]}, "a parent does not come before its child"),
        ({"q": [1.0]}, "differ in length"),
        ({"accepted": [9]}, "were not drafted"),
        ({"accepted": [0, 0, 0, 0]}, "accepted tokens that are no path"),
        ({"draft_seconds": float("inf")}, "a time that is negative, too long, or not finite"),
        ({"verify_seconds": 1e300}, "a time that is negative, too long, or not finite"),
        (
            {name: [0] * 600 for name in ("drafted", "q", "p")}
            | {"parents": list(range(-1, 599)), "accepted": [], "rejected": []},
            "a draft of 600 tokens: more than 4096, or too deep",
        ),
        ({"sources": ["model"]}, "do not belong to the drafted tokens"),
        ({"candidates": [[[1, 0.5, 0.5, None]]]}, "do not belong to the drafted tokens"),
        ({"candidates": [[[1, 0.5]]] * 5}, "damaged trace"),
    ],
)
def test_a_tree_that_does_not_hang_together(
    run: Run, tmp_path: Path, fields: dict[str, object], message: str
) -> None:
    value = Trace([CORRECTED], PIECES).as_dict()
    value["steps"][0] |= fields
    file = tmp_path / "steps.json"
    file.write_text(json.dumps(value))
    assert message in run.refused("trace", file, code=1)


def test_what_is_no_trace(run: Run, tmp_path: Path) -> None:
    assert "cannot read trace" in run.refused("trace", tmp_path / "absent.json", code=1)
    file = tmp_path / "other.json"
    file.write_text("{}")
    assert "not a trace" in run.refused("trace", file, code=1)


@pytest.mark.usefixtures("colours")
def test_colours(run: Run, tmp_path: Path) -> None:
    file = saved(tmp_path, Trace([CORRECTED], PIECES))
    shown = run("trace", file).stdout
    assert "\x1b[38;5;28m·the" in shown
    assert "\x1b[38;5;160m✗·sat" in shown
    assert "\x1b[38;5;32m→·dog" in shown


# When the target and the drafter computed


STEP = StepTrace((), (), (), (), (), (), "", 5, Origin.BONUS, 1, 0.0, 0.4, 0.0)
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
WITH_PROMPT = Trace([DRAFTED, STEP], {}, encode_seconds=0.1, prefill_seconds=0.3)


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
    found = timeline_of("x", Trace([replace(STEP, draft_seconds=0.1)]))
    assert [span.kind for span in found.spans] == ["target", "accept"]


def test_a_trace_without_times() -> None:
    with pytest.raises(TokenleapError, match="x: the trace has no steps with times"):
        timeline_of("x", Trace([replace(STEP, verify_seconds=0.0)]))


def test_the_terminal_has_a_cell_for_equal_times(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cell is a quarter of the median pass, here 0.1 s."""
    monkeypatch.setenv("COLUMNS", "80")
    file = saved(tmp_path, WITH_PROMPT, "run.json")
    result = run.done("trace", file, "--timeline")
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
    long = saved(tmp_path, Trace([STEP] * 2000), "long.json")
    short = saved(tmp_path, Trace([DRAFTED] * 200), "short.json")
    lines = run("trace", long, short, "--timeline").stdout.splitlines()
    assert max(map(len, lines)) <= 80
    bars = [part.splitlines()[1:] for part in "\n".join(lines).split("\n\n")]
    assert len(bars[1]) == 20
    cells = [sum(len(line) - 7 for line in part) for part in bars[1:]]
    assert cells[1] / cells[0] == pytest.approx(200 * 0.7 / (2000 * 0.4), rel=0.02)


def test_svg_of_several_traces(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    one = saved(tmp_path, WITH_PROMPT, "gamma7.json")
    other = saved(tmp_path, Trace([STEP] * 3), "plain.json")
    svg = tmp_path / "timeline.svg"
    result = run.done("trace", one, other, "--svg", svg)
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
    assert message in run.refused("trace", saved(tmp_path, WITH_PROMPT, "one.json"), *arguments)


def test_svg_without_matplotlib(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenleap.cli.options.find_spec", lambda _: None)
    file = saved(tmp_path, WITH_PROMPT, "one.json")
    assert "--svg needs Matplotlib: pip install 'matplotlib<" in run.refused(
        "trace", file, "--svg", tmp_path / "x.svg"
    )
