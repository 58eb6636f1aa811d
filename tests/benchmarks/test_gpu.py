"""The GPU's benchmark, on the CPU: what is measured, how parts end, and what is written."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.gpu import (
    BASELINE,
    PROMPTS,
    TESTS,
    Amount,
    Part,
    Result,
    bits,
    main,
    measure,
    methods,
    parts_of,
    prompts_for,
    run_part,
)
from benchmarks.gpu import run as run_process
from benchmarks.harness import RANDOM, TINY

from benchmarks import gpu
from tests.benchmarks.program import run
from tests.tiny import tiny_model, tiny_tokenizer
from tokenleap import LLM
from tokenleap.bench.prompts_file import read_prompts
from tokenleap.runtime.network import PassOutput
from tokenleap.runtime.target import Target

LITTLE = Amount(max_tokens=6, batches=1, rounds=1)
EAGER = Part("tiny, eager", TINY, "module", False, (2, 1))


def llm() -> LLM:
    return LLM(tiny_model(), speculative_config={"method": "none"})


def test_time_and_tokens_of_every_method() -> None:
    """The clock counts target passes. What has not to agree with `none` is not compared with it."""
    made = llm()
    configs = {name: config for name, config in methods(TINY).items() if name != "eagle"}
    batches = [[[1, 2, 3] * 3, [4, 5] * 4], [[7] * 6, [8, 9, 8, 9]]]

    def clock() -> float:
        return float(made.engine.target.num_passes)

    cells = {cell.method: cell for cell in measure(made, configs, batches, Amount(40, 2, 1), clock)}
    assert cells[BASELINE].over_none == 1
    assert cells[BASELINE].acceptance_length == 1
    for method in ("ngram", "given 0.8"):
        assert cells[method].over_none > 1
        assert cells[method].acceptance_length > 1
    assert [cell.differing for cell in cells.values()] == [0, 0, None]


def test_the_first_run_of_a_batch_does_not_count() -> None:
    # Two readings a run: 100 seconds for the first, then 2, 4 and 3.
    readings = iter([0, 100, 100, 102, 102, 106, 106, 109])
    none = {BASELINE: {"method": "none"}}
    amount = Amount(max_tokens=6, batches=1, rounds=3)
    (cell,) = measure(llm(), none, [[[1, 2]]], amount, lambda: float(next(readings)))
    assert cell.tokens_per_second == pytest.approx(6 / 3)


def test_bits_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target(tiny_model())
    assert bits(target) == {
        "positions": 9,
        "equal": 9,
        "same_argmax": 9,
        "largest_difference": 0.0,
    }
    assert target.num_rows == 0
    verify = target.verify

    def inexact(keys: Any, trees: Sequence[Any]) -> Any:
        (output,) = verify(keys, trees)
        scores = output.scores.clone()
        if len(trees[0]) > 1:
            scores[3, 5] += 0.5
        return [PassOutput(scores)]

    monkeypatch.setattr(target, "verify", inexact)
    found = bits(target)
    assert found["equal"] == 8
    assert found["largest_difference"] == pytest.approx(0.5, abs=1e-6)


@pytest.mark.parametrize("part", [EAGER, Part("tiny, one shape", TINY, "module", True, (1,))])
def test_a_part_writes_what_it_finds_at_once(part: Part) -> None:
    found: list[dict[str, Any]] = []
    run_part(part, "cpu", LITTLE, lambda record: found.append(json.loads(json.dumps(record))))
    kinds = [kind for record in found for kind in record]
    cells = len(part.batch_sizes) * 3
    assert kinds == ["machine", "facts", "bits", "pass_ms", *["cell"] * cells]
    assert found[1]["facts"]["model"] == TINY
    assert found[2]["bits"]["bit_exact"]
    assert all(record["cell"]["tokens_per_second"] > 0 for record in found[4:])


def test_without_its_files_a_model_has_random_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RANDOM, "random-135m", RANDOM[TINY])
    found: list[Any] = []
    run_part(Part("", "no-such-model", "module", False, (1,)), "cpu", LITTLE, found.append)
    assert "It is measured with random weights." in found[0]["remark"]
    assert found[2]["facts"]["model"] == "random-135m"


def test_prompts() -> None:
    with_text = LLM(tiny_model(), tokenizer=tiny_tokenizer())
    found = prompts_for(with_text, 50, 6)
    assert len(found) == 50
    assert len({*map(tuple, found)}) == len(read_prompts(PROMPTS))
    assert [len(prompt) for prompt in prompts_for(llm(), 2, 6)] == [64, 64]


def test_parts_come_by_their_weight() -> None:
    names = [part.name for part in parts_of("some", quick=False)]
    assert names[:3] == ["some, eager", "random-7b, eager", TESTS]
    assert len(names) == 7
    assert [part.name for part in parts_of("some", quick=True)][:2] == ["some, eager", TESTS]


def test_a_part_that_hangs_loses_nothing_that_it_wrote(tmp_path: Path) -> None:
    records = tmp_path / "part.jsonl"
    records.write_text('{"remark": "one"}\n{"remark": "tw', encoding="utf-8")
    found = run_process(["sleep", "1000"], records, "some", 0.1)
    assert found.ended == "out of time after 0 s"
    assert found.all("remark") == ["one"]
    failed = run_process([sys.executable, "-c", "1 / 0"], records, "some", 60)
    assert failed.ended == "exit code 1"
    assert "ZeroDivisionError" in failed.output


def test_all_parts_are_in_one_file_and_one_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part runs in this process, and one fails."""

    def here(command: Sequence[str], records: Path, name: str, limit: float) -> Result:
        if name != "tiny, eager":
            return Result(name, "exit code 1", 1.0, [], "some traceback")
        result = run(main, command[3:])
        assert result.exit_code == 0, result.output
        lines = records.read_text(encoding="utf-8").splitlines()
        return Result(name, "ok", 2.0, [json.loads(line) for line in lines])

    monkeypatch.setattr(gpu, "run", here)
    options = ["--device", "cpu", "--quick", "--model", TINY, "--output", str(tmp_path / "out")]
    result = run(main, [*options, "--only", "eager", "--only", "compiled"])
    assert result.exit_code == 0, result.output
    page = (tmp_path / "out/gpu.md").read_text(encoding="utf-8")
    assert page.strip() == result.stdout.strip()
    assert re.search(r"\| tiny, eager +\| +2 \| +ok \|", page)
    assert re.search(r"\| tiny, compiled +\| +1 \| exit code 1 \|", page)
    assert "## Output of tiny, compiled\n\n```\nsome traceback\n```" in page
    assert re.search(r"\| tiny, eager +\| +yes \| +9 of 9 \| +9 of 9 \| +0 \|", page)
    assert re.search(r"\| given 0.8 +\| +2 \|.*\| +- \|", page)
    assert "model tiny, runtime module, layers 2" in page
    found = json.loads((tmp_path / "out/gpu.json").read_text(encoding="utf-8"))["parts"]
    assert [part["ended"] for part in found] == ["ok", "exit code 1"]


def test_parts_without_time_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([0.0, 1.0, 59.5, 60.0, 60.0])
    monkeypatch.setattr(gpu, "monotonic", lambda: next(moments))
    monkeypatch.setattr(gpu, "run", lambda *given: Result(given[2], "ok", given[3], []))
    options = ["--device", "cpu", "--quick", "--model", TINY, "--minutes", "1"]
    result = run(main, [*options, "--output", str(tmp_path)])
    assert re.search(r"\| tiny, eager +\| +59 \| +ok \|", result.stdout)
    assert len(re.findall(r"left out: no time", result.stdout)) == 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_so_in_one_line() -> None:
    result = run(main, [])
    assert result.exit_code == 2
    assert result.stderr.splitlines() == [
        "Error: this needs a CUDA device, and there is none: try --device cpu."
    ]
