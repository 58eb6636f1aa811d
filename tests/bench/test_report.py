"""Markdown and HTML of known figures."""

from __future__ import annotations

import base64
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from tests.bench.records import CONTESTANTS, HEADER, complete, control
from tokenleap.bench import report
from tokenleap.bench.report import ACCEPTANCE, html, markdown, markdown_table
from tokenleap.bench.summary import Footprint, Results

PLOTS = [
    "Speed-up by kind of prompt",
    "Single-prompt speed-ups",
    "Accepted tokens per draft",
    "Latency against throughput by batch size",
    "Peak memory",
]
VOID = {"meta", "img"}


class Page(HTMLParser):
    """Checks that tags are balanced, and keeps images and cells."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text
        self.images: dict[str, str] = {}
        self.cells: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        fields = dict(attrs)
        assert not (fields.get("href") or "").startswith("http")
        if tag == "img":
            self.images[fields["alt"] or ""] = fields["src"] or ""
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] == "td":
            self.cells.append(data)


def results() -> Results:
    return Results(complete(), CONTESTANTS)


def test_markdown_has_every_table() -> None:
    text = markdown(results(), HEADER)
    titles = [line for line in text.splitlines() if line.startswith("## ")]
    assert titles == [
        *("## Speed", "## Speed by kind of prompt", f"## {ACCEPTANCE}"),
        *("## Steps", "## What ran", "## Start", "## Memory", "## Roofline", "## Batches"),
        "## Remarks",
    ]
    assert "2.213 [" in text
    assert "Energy: unavailable: no counter." in text
    assert "transformers-plain: version 5, weights float32." in text


def test_what_ran_is_named_and_not_auto() -> None:
    text = markdown(results(), HEADER)
    assert "dtype float32, threads 2, cpu any <processor>, device cpu, runtime native\n" in text
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    assert ["ngram", "native", "float32", "cpu", "2", "fixed", "yes"] in rows
    assert ["transformers-plain", "its own", "float32", "cpu", "2", "-", "-"] in rows


def test_how_much_rounds_differ_is_said_of_several() -> None:
    assert "Rounds of the same call differ" not in markdown(results(), HEADER)
    assert "Every call was made once" in markdown(results(), HEADER)
    records = complete()
    again = {**next(r for r in records if r["type"] == "request"), "round": 1, "seconds": 5.0}
    several = Results([*records, again], CONTESTANTS)
    assert several.spread == pytest.approx(1 / 4.5)
    assert "Rounds of the same call differ by 22.2%" in markdown(several, HEADER)


def test_the_rest_of_the_peak_is_explained() -> None:
    assert "The rest of the peak is Python with its libraries" in markdown(results(), HEADER)


@pytest.fixture(scope="module")
def page() -> Page:
    pytest.importorskip("matplotlib")
    return Page(html(results(), HEADER))


def picture(page: Page, title: str) -> str:
    kind, _, content = page.images[title].partition(",")
    assert kind == "data:image/svg+xml;base64"
    return base64.b64decode(content).decode()


def test_what_is_counted_has_ticks_at_whole_numbers(page: Page) -> None:
    for title, axis in (
        ("Accepted tokens per draft", "xtick"),
        ("Single-prompt speed-ups", "ytick"),
    ):
        ticks = re.findall(
            rf'<g id="{axis}_\d+">.*?<text[^>]*>([^<]*)<', picture(page, title), re.DOTALL
        )
        assert len(ticks) >= 2
        assert all(tick.isdecimal() for tick in ticks), (title, ticks)


def test_who_is_not_measured_in_batches_and_why() -> None:
    records = complete()
    peer = next(r for r in records if r.get("label") == "transformers-plain")
    peer["facts"] = {**peer["facts"], "batches": False, "no_batches": "it takes one prompt"}
    text = markdown(Results(records, CONTESTANTS), HEADER)
    assert "- Several prompts at once were measured for none, ngram.\n" in text
    assert (
        "- transformers-plain: measured with one prompt at a time: it takes one prompt.\n" in text
    )
    alone = [r for r in records if r.get("kind") != "batch"]
    assert "Several prompts" not in markdown(Results(alone, CONTESTANTS), HEADER)


def test_energy_has_a_table_where_there_is_a_counter() -> None:
    records = complete()
    for record in records:
        if record["type"] == "request":
            record["joules"] = 100.0
    text = markdown(Results(records, CONTESTANTS, footprint=Footprint(pue=1.2)), HEADER)
    assert "average W" in text
    assert "(PUE) of 1.2, with 0.385 g of CO2 per Wh" in text
    assert "PUE" not in markdown(results(), HEADER)


def test_names_of_runtimes_are_explained_where_they_are_shown() -> None:
    records = complete()
    records[1] = {**records[1], "facts": {**records[1]["facts"], "runtime": "lean"}}
    assert "- The runtime lean is PyTorch operations." in markdown(
        Results(records, CONTESTANTS), HEADER
    )
    assert "The runtime" not in markdown(results(), HEADER)


def test_the_control_has_a_column_and_a_remark() -> None:
    records = [*complete(), *control()]
    text = markdown(Results(records, CONTESTANTS), HEADER)
    headers = [line for line in text.splitlines() if "| " in line and " control " in line]
    found = [[cell.strip() for cell in header.split("|")[2:-1]] for header in headers]
    assert found == [["qa", "rag", "control"]] * 2
    assert "- control: 1 prompts of random tokens" in text
    assert "of random tokens" not in markdown(results(), HEADER)


def test_the_page_is_one_file_with_all_plots(page: Page) -> None:
    assert list(page.images) == PLOTS
    for title in PLOTS:
        assert ElementTree.fromstring(picture(page, title)).tag.endswith("svg")
    assert "transformers-plain" in page.cells


def test_what_users_write_is_escaped(page: Page) -> None:
    assert "any &lt;processor&gt;" in page.text


def test_verify_cost_is_drawn_where_there_are_several_sizes() -> None:
    pytest.importorskip("matplotlib")
    records = complete()
    for record in records:
        if record["type"] == "request" and record["contestant"] == "ngram":
            record["outputs"][0]["verify_seconds"] = {"1": [0.1], "4": [0.2]}
    plots = report.draw_all(Results(records, CONTESTANTS))
    assert "Cost of verification by nodes" in plots
    assert "nodes of a target pass" in plots["Cost of verification by nodes"]


def test_without_matplotlib_the_page_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    text = html(results(), HEADER)
    assert Page(text).images == {}
    assert "pip install &#39;matplotlib&lt;" in text


def test_a_table_is_markdown() -> None:
    table = markdown_table(["name", "value"], [["a", "1"], ["bc", "10"]])
    assert table.splitlines() == [
        "| name | value |",
        "| ---- | ----: |",
        "| a    |     1 |",
        "| bc   |    10 |",
    ]
