"""The GPU benchmark's logic, on the CPU with a clock of its own."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from benchmarks.gpu import BASELINE, Cell, contestants, groups_of, main, measure, report
from benchmarks.harness import Loaded

from benchmarks import BenchmarkError, gpu
from tests.benchmarks.program import run
from tests.tiny import tiny_model, tiny_tokenizer
from tokenleap.bench.summary import Interval

ON_A_CPU = {"eager": "torch", "compiled": "torch"}


@pytest.fixture(autouse=True)
def runtimes_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """They stand for those of a GPU."""
    monkeypatch.setattr(gpu, "RUNTIMES", ON_A_CPU)


def test_all_ways_give_the_same_tokens_and_are_timed_alike() -> None:
    """The clock counts target passes: on all ways as many."""
    run = contestants(Loaded(tiny_model(), None), 4, 2, compiled=True)
    assert list(run) == [f"{method}, {way}" for way in ON_A_CPU for method in ("none", "ngram")]
    targets = {id(one.llm): one.llm.engine.target for one in run.values()}.values()

    def clock() -> float:
        return float(sum(target.num_passes for target in targets))

    batches = [[[1, 2, 3] * 3, [4, 5] * 4], [[7] * 6, [8, 9, 8, 9]]]
    cells = {cell.contestant: cell for cell in measure(run, batches, 1, 40, clock)}
    for way in ON_A_CPU:
        assert cells[f"none, {way}"].ratio.mean == 1
        assert cells[f"ngram, {way}"].ratio == cells["ngram, eager"].ratio
    assert not any(cell.differing for cell in cells.values())
    assert cells["ngram, eager"].ratio.mean > 1


def test_the_first_run_of_a_batch_does_not_count() -> None:
    found = contestants(Loaded(tiny_model(), None), 4, 1, compiled=False)
    run = {BASELINE: found[BASELINE]}
    # Two readings a run: 100 seconds for the first, then 2, 4 and 3.
    readings = iter([0, 100, 100, 102, 102, 106, 106, 109])
    (cell,) = measure(run, [[[1, 2]]], 3, 6, lambda: float(next(readings)))
    assert cell.ratio == Interval(1.0, None, None)
    assert cell.speed == pytest.approx(6 / 3)


def test_the_report_names_what_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu.py"])  # the report has the command
    one = Interval(1.0, None, None)
    found = [
        Cell(label, size, one, 10 * size, size - 1)
        for label in (BASELINE, "ngram, compiled")
        for size in (1, 2)
    ]
    text = report(found, {"gpu": "some", "cpu": None})
    assert "gpu some" in text
    assert "cpu" not in text
    assert re.search(r"\| ngram, compiled\s+\|\s+1.000\s+\|\s+1.000\s+\|", text)
    assert re.search(r"\| ngram, compiled\s+\|\s+10\s+\|\s+20\s+\|", text)
    assert "none, eager at 2; ngram, compiled at 2." in text
    assert "All outputs are those" in report(found[:1], {})


def test_prompts_are_dealt_in_batches() -> None:
    ids = [[i] for i in range(7)]
    assert groups_of(ids, 3, 9) == [[[0], [1], [2]], [[3], [4], [5]]]
    assert groups_of(ids, 2, 1) == [[[0], [1]]]
    with pytest.raises(BenchmarkError, match="needs as many prompts, and there are 7"):
        groups_of(ids, 8, 1)


def test_with_a_device_two_tables_are_printed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The CPU plays the device."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu, "load", lambda *_: Loaded(tiny_model(), tiny_tokenizer()))
    file, written = tmp_path / "prompts.txt", tmp_path / "gpu.json"
    file.write_text("abc abc abc\nxyz xyz\nqqqq\n", encoding="utf-8")
    sizes = ["--batch-size", "2", "--batch-size", "1"]
    options = ["--batches", "2", "--rounds", "1", "--max-tokens", "4", "--json", str(written)]
    result = run(main, ["--prompts", str(file), *sizes, *options])
    assert result.exit_code == 0, result.output
    lines = [line for line in result.stdout.splitlines() if line.startswith("| ")]
    assert len(lines) == 2 * (2 + 2)  # a header of two lines and two contestants
    assert "All outputs are those of none, eager." in result.stdout
    found = json.loads(written.read_text(encoding="utf-8"))["cells"]
    assert [cell["batch_size"] for cell in found] == [1] * 2 + [2] * 2
    assert all(cell["speed"] > 0 for cell in found)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_so_in_one_line(tmp_path: Path) -> None:
    result = run(main, ["--prompts", str(tmp_path / "none.jsonl")])
    assert result.exit_code == 2
    assert result.stderr.splitlines() == ["Error: this needs a CUDA device, and there is none."]
