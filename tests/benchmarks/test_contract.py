from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from benchmarks.contract_rounds import (
    DEFAULT,
    FIXED,
    Cell,
    Result,
    broken_promises,
    measure,
    results,
)
from benchmarks.loading import Loaded
from typer import Typer
from typer.testing import CliRunner

from benchmarks import contract
from foretoken.bench.journal import Journal
from foretoken.bench.ratios import Interval
from foretoken.errors import ForetokenError
from tests.tiny import tiny_model, tiny_tokenizer

CELLS = [Cell(1, "qa"), Cell(4, "qa"), Cell(4, "rag")]


def result(
    default: tuple[float, float, float], fixed: tuple[float, float, float] = (1, 0.9, 1.1)
) -> Result:
    return Result(CELLS[0], 5, 5, {DEFAULT: Interval(*default), FIXED: Interval(*fixed)}, 100.0, 0)


@pytest.mark.parametrize(
    ("default", "fixed", "state", "broken"),
    [
        ((1.0, 0.98, 1.02), (1.0, 0.9, 1.1), "shown", 0),
        ((0.95, 0.93, 0.96), (0.9, 0.8, 1.0), "broken", 1),
        ((0.96, 0.93, 0.98), (0.9, 0.8, 1.0), "open", 0),
        ((0.98, 0.975, 0.99), (1.2, 1.1, 1.3), "shown", 1),  # a fixed length would have gained
        ((0.9, 0.85, 0.95), (1.2, 1.1, 1.3), "broken", 2),
    ],
)
def test_what_breaks_the_contract(
    default: tuple[float, float, float], fixed: tuple[float, float, float], state: str, broken: int
) -> None:
    found = result(default, fixed)
    assert found.state == state
    assert len(broken_promises([found])) == broken


class Fake:
    """Rounds whose ratios are known: the default's go up and down by this much."""

    def __init__(self, ratios: Mapping[Cell, float], swing: float = 0.0) -> None:
        self.ratios, self.swing = ratios, swing
        self.calls: list[tuple[Cell, int]] = []

    def __call__(self, cell: Cell, index: int) -> dict[str, Any]:
        self.calls.append((cell, index))
        ratio = self.ratios[cell] + (self.swing if index % 2 else -self.swing)
        speeds = {"none": 100.0, DEFAULT: 100 * ratio, FIXED: 90.0}
        return {"tokens_per_second": speeds, "differing": 0}


def journal(path: Path | None = None, **settings: Any) -> Journal:
    return Journal(path, "test", settings)


def test_every_cell_has_its_rounds_going_around() -> None:
    run = Fake(dict.fromkeys(CELLS, 1.0))
    found = measure(CELLS, journal(), 3, run)
    assert run.calls == [(cell, index) for index in range(3) for cell in CELLS]
    assert [(r.rounds, r.state, r.tokens_per_second) for r in found] == [(3, "shown", 100.0)] * 3
    assert found[0].ratios[FIXED].mean == pytest.approx(0.9)


def test_a_run_that_was_broken_off_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "contract.jsonl"
    first = Fake(dict.fromkeys(CELLS[:2], 1.0))  # and does not know the third
    with pytest.raises(KeyError):
        measure(CELLS, journal(path, seed=0), 2, first)
    assert len(path.read_text().splitlines()) == 1 + 2
    second = Fake(dict.fromkeys(CELLS, 1.0))
    found = measure(CELLS, journal(path, seed=0), 2, second)
    assert second.calls == [(CELLS[2], 0), *((cell, 1) for cell in CELLS)]
    assert [r.rounds for r in found] == [2, 2, 2]
    with pytest.raises(ForetokenError, match="seed 0"):
        journal(path, seed=1)


def test_time_that_is_left_goes_to_open_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(10**6))
    monkeypatch.setattr(time, "monotonic", lambda: next(now))
    run = Fake({CELLS[0]: 1.2, CELLS[1]: 0.97, CELLS[2]: 0.8}, swing=0.02)
    found = measure(CELLS, journal(), 3, run, seconds=30)
    assert [r.state for r in found] == ["shown", "open", "broken"]
    assert [r.rounds for r in found] == [3, 29 - 6, 3]


def test_it_ends_before_its_time_where_nothing_is_open() -> None:
    run = Fake(dict.fromkeys(CELLS, 1.0))
    found = measure(CELLS, journal(), 2, run, seconds=3600)
    assert [r.rounds for r in found] == [2, 2, 2]


def test_a_cell_without_rounds_is_open() -> None:
    (found,) = results(CELLS[:1], [], 2)
    assert (found.state, found.rounds, found.ratios) == ("open", 0, {})
    assert broken_promises([found]) == []


def test_the_whole_on_a_tiny_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two kinds and the two that defeat drafters, in two batch sizes, and nothing twice."""
    loaded = Loaded(tiny_model(), tiny_tokenizer())
    monkeypatch.setattr(contract, "load", lambda *_: loaded)
    monkeypatch.setattr(contract, "WARM_UP_TOKENS", 16)
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "rounds.jsonl"
    lines = [
        {"question_id": f"{kind} {index}", "category": kind, "turns": ["abc abc abc"]}
        for index in range(3)
        for kind in ("qa", "rag")
    ]
    prompts.write_text("\n".join(json.dumps(line) for line in lines))
    app = Typer()
    app.command()(contract.main)
    arguments = ["--prompts", str(prompts), "--output", str(output), "--rounds", "2"]
    arguments += ["--batch-size", "1", "--batch-size", "3"]
    arguments += ["--max-tokens", "6", "--max-prompt-tokens", "12"]
    first = CliRunner().invoke(app, arguments)
    assert first.exit_code in (0, 1), first.output  # on tiny models speed is noise
    assert "Outputs that differ from those of none: 0." in first.output
    table = [line for line in first.output.splitlines() if line.startswith("| ")]
    labels = {line.split("|")[1].strip() for line in table}
    expected = ("qa", "rag", "temperature 1.5", "random tokens")
    assert {f"{batch}: {kind}" for batch in (1, 3) for kind in expected} <= labels
    assert len(output.read_text().splitlines()) == 1 + 2 * 2 * 4
    again = CliRunner().invoke(app, arguments)
    assert len(output.read_text().splitlines()) == 1 + 2 * 2 * 4
    assert [line for line in again.output.splitlines() if line.startswith("| ")] == table
    other = CliRunner().invoke(app, [*arguments, "--seed", "1"])
    assert other.exit_code == 2
    assert "made with seed 0" in other.output
    nothing = CliRunner().invoke(app, [*arguments, "--kind", "math"])
    assert nothing.exit_code == 2
    assert "--kind math: not among qa, rag, temperature 1.5, random tokens" in nothing.output
