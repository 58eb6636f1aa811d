from __future__ import annotations

import gc
import json
import random
from collections.abc import Mapping
from dataclasses import replace
from math import exp
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from benchmarks.contract import (
    DEFAULT,
    FIXED,
    FLOOR,
    Cell,
    Result,
    broken_promises,
    measure,
    results,
)
from benchmarks.harness import Loaded

from benchmarks import contract
from tests.benchmarks.program import run
from tests.tiny import tiny_model, tiny_tokenizer
from tokenleap import LLM
from tokenleap.bench.prompts_file import Prompt
from tokenleap.bench.run import Journal
from tokenleap.bench.summary import Interval, t_ratio
from tokenleap.errors import TokenleapError

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


def test_what_a_fixed_length_gains_is_asked_of_the_default() -> None:
    fixed = (1.2, 1.1, 1.3)
    assert result((1.0, 0.98, 1.02)).gain == "-"  # the interval of the fixed length contains 1
    assert result((1.1, 1.01, 1.2), fixed).gain == "shown"
    assert result((1.1, 0.99, 1.2), fixed).gain == "not shown"
    assert result((0.98, 0.975, 0.99), fixed).gain == "broken"
    unjudged = replace(result((0.98, 0.975, 0.99), fixed), judged=0)
    assert (unjudged.gain, unjudged.state) == ("-", "open")


def journal(path: Path | None = None, **settings: Any) -> Journal:
    return Journal(path, "test", settings)


def test_every_cell_has_its_rounds_going_around() -> None:
    run = Fake(dict.fromkeys(CELLS, 1.0))
    found = measure(CELLS, journal(), 3, run)
    assert run.calls == [(cell, index) for index in range(3) for cell in CELLS]
    assert [(r.rounds, r.state, r.tokens_per_second) for r in found] == [(3, "shown", 100.0)] * 3
    assert found[0].ratios[FIXED].mean == pytest.approx(0.9)


def record(ratio: float) -> dict[str, Any]:
    speeds = {"none": 100.0, DEFAULT: 100 * ratio, FIXED: 100.0}
    return {"batch": 1, "kind": "qa", "tokens_per_second": speeds, "differing": 0}


def test_looks_are_where_rounds_have_doubled_and_intervals_grow() -> None:
    """In between a cell stays what it was found to be, whatever later rounds say."""
    records = [record(1.0 + 0.02 * (index % 2)) for index in range(6)]
    found = [results(CELLS[:1], records[:count], 3)[0] for count in range(1, 7)]
    assert [r.judged for r in found] == [0, 0, 3, 3, 3, 6]
    assert [r.rounds for r in found] == [1, 2, 3, 4, 5, 6]
    assert found[2].ratios == found[3].ratios == found[4].ratios
    ratios = [1.0, 1.02] * 3
    assert found[2].ratios[DEFAULT] == t_ratio(ratios[:3], 0.975)
    assert found[5].ratios[DEFAULT] == t_ratio(ratios, 0.9875)
    (later,) = results(CELLS[:1], [*records, *[record(0.5)] * 5], 3)
    assert later.ratios == found[5].ratios


def test_going_on_until_there_is_a_verdict_seldom_gives_a_false_one() -> None:
    """Ratios whose true mean is the floor, so that either verdict is false: one in 20 may be.

    Of 300 cells 15 then, give or take 4. Verdicts change at looks only, after 5, 10, 20 and 40
    rounds. With a look after every round, at a bootstrap's intervals of 95 %, it is 41 of 100.
    """
    dice, false = random.Random(0), 0
    for _ in range(300):
        records = [record(FLOOR * exp(dice.gauss(0, 0.02))) for _ in range(40)]
        looks = (results(CELLS[:1], records[:count], 5)[0].state for count in (5, 10, 20, 40))
        false += any(state != "open" for state in looks)
    assert false < 15 + 4 * 4


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
    with pytest.raises(TokenleapError, match="seed 0"):
        journal(path, seed=1)


def test_time_that_is_left_goes_to_open_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(10**6))
    monkeypatch.setattr(contract, "time", SimpleNamespace(monotonic=lambda: next(now)))
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


@pytest.fixture
def still_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds collect garbage, and would thaw what `tests/conftest.py` has frozen."""
    monkeypatch.setattr(contract, "gc", Mock(spec=gc))


@pytest.mark.usefixtures("still_frozen")
def test_the_whole_on_a_tiny_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two kinds and the two that defeat drafters, in two batch sizes, and nothing twice."""
    loaded = Loaded(tiny_model(), tiny_tokenizer())
    monkeypatch.setattr(contract, "load", lambda *_: loaded)
    monkeypatch.setattr(contract, "WARM_UP_TOKENS", 16)
    monkeypatch.setattr(contract, "REQUESTS", 3)
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "rounds.jsonl"
    lines = [
        {"question_id": f"{kind} {index}", "category": kind, "turns": ["abc abc abc"]}
        for index in range(3)
        for kind in ("qa", "rag")
    ]
    prompts.write_text("\n".join(json.dumps(line) for line in lines))
    arguments = ["--prompts", str(prompts), "--output", str(output), "--rounds", "3"]
    arguments += ["--batch-size", "1", "--batch-size", "3"]
    arguments += ["--max-tokens", "6", "--max-prompt-tokens", "12"]
    first = run(contract.main, arguments)
    assert first.exit_code in (0, 1), first.output  # on tiny models speed is noise
    assert "Outputs that differ from those of none: 0." in first.output
    table = [line for line in first.output.splitlines() if line.startswith("| ")]
    labels = {line.split("|")[1].strip() for line in table}
    expected = ("qa", "rag", "temperature 1.5", "random tokens")
    assert {f"{batch}: {kind}" for batch in (1, 3) for kind in expected} <= labels
    assert len(output.read_text().splitlines()) == 1 + 3 * 2 * 4
    again = run(contract.main, arguments)
    assert len(output.read_text().splitlines()) == 1 + 3 * 2 * 4
    assert [line for line in again.output.splitlines() if line.startswith("| ")] == table
    other = run(contract.main, [*arguments, "--seed", "1"])
    assert other.exit_code == 2
    assert "made with seed 0" in other.output
    more = run(contract.main, [*arguments, "--rounds", "4"])
    assert more.exit_code == 2
    assert "made with rounds 3" in more.output
    nothing = run(contract.main, [*arguments, "--kind", "math"])
    assert nothing.exit_code == 2
    assert "--kind math: not among qa, rag, temperature 1.5, random tokens" in nothing.output


def test_every_round_has_prompts_of_its_own_as_long_as_there_are_any(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(contract, "REQUESTS", 1)
    llm = LLM(tiny_model(), tokenizer=tiny_tokenizer())
    kinds = ("qa", "qa", "rag", "qa", "qa")
    sample = [Prompt(str(i), kind, "abcdefgh"[i:]) for i, kind in enumerate(kinds)]
    texts = contract.Texts(llm, sample, max_tokens=6, limit=12, seed=0)

    def rounds(cell: Cell) -> list[list[tuple[int, ...]]]:
        return [[tuple(ids) for ids in texts.prompts(cell, index)] for index in range(3)]

    first, second, third = rounds(Cell(1, "qa"))
    assert len({*first, *second}) == 4
    assert [*second, *third] == [second[0], *first, second[0], first[0]]  # there are four
    hot = rounds(Cell(1, contract.HOT))
    assert len({ids for each in hot for ids in each}) == len(sample)
    noise = rounds(Cell(1, contract.RANDOM))
    assert len({ids for each in noise for ids in each}) == 9
    seeds = [p.seed for index in range(3) for p in texts.params(Cell(1, contract.HOT), index)]
    assert seeds == list(range(9))


class CountedRun:
    """Stands for a variant's run: four tokens a step."""

    ends = False

    def __init__(self, llm: LLM, prompts: list[Any], params: list[Any], batch: int) -> None:
        self.begun, self.num_tokens, self.seconds = len(prompts), 0, 1.0
        self.outputs: list[list[int]] = []
        counted.append(self)

    def step(self) -> None:
        self.num_tokens += 4

    def close(self) -> None:
        pass


counted: list[CountedRun] = []


@pytest.mark.usefixtures("still_frozen")
@pytest.mark.parametrize(("batch", "requests"), [(1, 16), (16, 16), (32, 32)])
def test_a_round_has_the_tokens_of_sixteen_requests(
    batch: int, requests: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or of as many as are in flight; and prompts for all that may be begun until then."""
    llm = LLM(tiny_model(), tokenizer=tiny_tokenizer())
    texts = contract.Texts(llm, [Prompt("0", "qa", "abc")], max_tokens=6, limit=12, seed=0)
    monkeypatch.setattr(contract, "Run", CountedRun)
    counted.clear()
    found = contract.run_round({"none": llm, "default": llm}, texts, Cell(batch, "qa"), 0)
    assert [run.num_tokens for run in counted] == [6 * requests] * 2
    assert [run.begun for run in counted] == [requests + 2 * batch] * 2
    assert found["tokens_per_second"] == {"none": 6.0 * requests, "default": 6.0 * requests}


def test_requests_of_a_round_do_not_end_all_at_once() -> None:
    llm = LLM(tiny_model(), tokenizer=tiny_tokenizer())
    texts = contract.Texts(llm, [Prompt("0", "qa", "abc")], max_tokens=6, limit=12, seed=0)
    lengths = [p.max_tokens for p in texts.params(Cell(4, "qa"), 0)]
    assert lengths == [2, 3, 5, 6, *[6] * (contract.REQUESTS + 2 * 4 - 4)]


def test_a_file_of_the_old_form_is_refused(tmp_path: Path) -> None:
    """Its rounds had the same prompts every time."""
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "rounds.jsonl"
    prompts.write_text('{"prompt": "abc"}\n')
    output.write_text('{"format": "tokenleap contract 1"}\n')
    result = run(contract.main, ["--prompts", str(prompts), "--output", str(output)])
    assert result.exit_code == 2
    assert "is not a results file; choose another --output" in result.output
