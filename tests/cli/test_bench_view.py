"""The tables of `bench` fit a terminal, whatever they hold."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from tests.bench.records import CONTESTANTS, HEADER, complete, control
from tokenleap.bench.report import tables
from tokenleap.bench.summary import Results
from tokenleap.cli import bench
from tokenleap.cli import console as console_module
from tokenleap.cli.bench import fitted, show_results
from tokenleap.cli.console import THEME

WIDTHS = (60, 80, 120)


def shown(results: Results, width: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    text = StringIO()
    console = Console(file=text, width=width, theme=THEME)
    for module in (bench, console_module):
        monkeypatch.setattr(module, "display", lambda: console)
    show_results(results, HEADER)
    return text.getvalue().splitlines()


@pytest.mark.parametrize("width", WIDTHS)
def test_every_cell_is_shown_within_the_width(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    results = Results([*complete(), *control()], CONTESTANTS)
    lines = shown(results, width, monkeypatch)
    assert max(map(len, lines)) <= width
    text = " ".join(" ".join(lines).split())
    assert "…" not in text
    for title, header, rows in tables(results):
        assert title in text
        for cell in (*header, *(cell for row in rows for cell in row)):
            assert all(part in text for part in cell.replace("-", " ").split()), cell
    assert "dtype float32" in text  # what ran: the setting is auto
    assert "runtime native" in text
    assert "dtype auto" not in text


def test_what_is_too_wide_is_cut_between_columns() -> None:
    header = ["contestant", *(f"kind{number}" for number in range(9))]
    rows = [["ngram", *["1.000 [0.900, 1.100]"] * 9], ["transformers-plain", *["-"] * 9]]
    for width in WIDTHS:
        parts = fitted(header, rows, width)
        names = [[str(column.header) for column in part.columns] for part in parts]
        assert [name for part in names for name in part[1:]] == header[1:]
        assert {part[0] for part in names} == {"contestant"}
    assert len(fitted(header, rows, 80)) == 3
    assert len(fitted(header, rows, 300)) == 1


def test_a_long_label_wraps_between_words() -> None:
    label = 'ngram {"controller": "fixed", "num_speculative_tokens": 5}'
    (table,) = fitted(["contestant", "speed over none"], [[label, "1.5"]], 40)
    (cell, *_) = table.columns[0].cells
    assert str(cell).split() == label.split()
    assert max(map(len, str(cell).splitlines())) <= 26
