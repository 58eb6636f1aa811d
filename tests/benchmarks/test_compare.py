from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from benchmarks.compare import main, measure, report_of

from tests.benchmarks.program import run
from tokenleap.bench.contestants import Setting
from tokenleap.bench.prompts_file import Prompt
from tokenleap.bench.run import Journal
from tokenleap.bench.worker import Process

SAMPLE = [Prompt("1", "code", "abc"), Prompt("2", "prose", "xyz")]


class Side:
    """Stands for the process of a commit: its seconds per call, and its first token."""

    def __init__(self, name: str, seconds: float, first: int, calls: list[str]) -> None:
        self.name, self.seconds, self.first, self.calls = name, seconds, first, calls
        self.facts, self.seeds = {"max_model_len": 64}, list[int]()

    def ask(self, command: str, **fields: Any) -> Any:
        if command == "encode":
            return [list(text.encode()) for text in fields["texts"]]
        if command == "forget":
            return None
        self.calls.append(self.name)
        self.seeds = fields["seeds"]
        outputs = [[self.first, *ids][: fields["max_tokens"]] for ids in fields["prompts"]]
        return {"seconds": self.seconds, "outputs": [{"token_ids": each} for each in outputs]}


ONE = Setting("m", max_tokens=3, max_num_seqs=1)


def sides(calls: list[str], firsts: Sequence[int] = (0, 0)) -> dict[str, Process]:
    both = Side("A", 2.0, firsts[0], calls), Side("B", 1.0, firsts[1], calls)
    return {side.name: cast("Process", side) for side in both}


def test_sides_take_turns_and_a_run_that_was_broken_off_goes_on(tmp_path: Path) -> None:
    path, calls = tmp_path / "calls.jsonl", list[str]()
    first = measure(sides(calls), SAMPLE, ONE, 2, Journal(path, "x", {}))
    assert calls == [*"AB", *"ABBABAAB"]  # a warm-up, and two prompts in two rounds
    calls.clear()
    again = measure(sides(calls), SAMPLE, ONE, 2, Journal(path, "x", {}))
    assert calls == [*"AB"]
    assert again == first


def test_requests_of_a_batch_have_seeds_of_their_own() -> None:
    both, setting = sides([]), Setting("m", max_tokens=2, max_num_seqs=3, temperature=1.0)
    found = measure(both, SAMPLE[:1], setting, 1, Journal(None, "x", {}))
    assert found["A"][0][0]["tokens"] == [0, ord("a")] * 3
    first = SAMPLE[0].seed
    assert cast("Side", both["A"]).seeds == [first, first + 1, first + 2]


@pytest.mark.parametrize(
    ("firsts", "said"),
    [((0, 0), "All tokens are equal."), ((0, 1), "Other tokens on prompts 1, 2.")],
)
def test_the_second_commit_is_compared_with_the_first(firsts: tuple[int, int], said: str) -> None:
    found = measure(sides([], firsts), SAMPLE, ONE, 1, Journal(None, "x", {}))
    text, same = report_of(SAMPLE, found, {})
    assert same == (firsts == (0, 0))
    assert said in text
    assert "2.000 [2.000, 2.000]" in text


def test_a_name_that_is_no_commit_is_refused_in_one_line() -> None:
    result = run(main, ["HEAD", "no-such-commit"])
    assert result.exit_code == 2
    assert "git rev-parse" in result.output
