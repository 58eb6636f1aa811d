from __future__ import annotations

import csv
from pathlib import Path

import pytest
from benchmarks.topic_shift import main, topics

from tests.benchmarks.program import run
from tests.cli.conftest import ascii_tokenizer, save_tiny
from tests.heads import random_head, tiny_config


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = save_tiny(tmp_path_factory.mktemp("target"))
    vocab_size = len(ascii_tokenizer().get_vocab())
    head = random_head(tiny_config(vocab_size, draft_vocab_size=vocab_size))
    return ["--model", str(folder), "--head", head, "--dtype", "float32", "--device", "cpu"]


def test_both_drafters_serve_all_prompts(arguments: list[str], tmp_path: Path) -> None:
    phases = ["--before", "2", "--shifted", "3", "--after", "1", "--part", "2"]
    online = ["--online", '{"every": 1, "window": 16}', "--max-tokens", "8"]
    result = run(main, [*arguments, *phases, *online, "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    with (tmp_path / "topic_shift.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["topic"] for row in rows] == ["everyday", "SQL", "SQL", "everyday"]
    assert [int(row["tokens"]) for row in rows] == sorted(int(row["tokens"]) for row in rows)
    assert all(float(row["mean_acceptance_length_learning"]) >= 1 for row in rows)
    assert (tmp_path / "topic_shift.png").read_bytes().startswith(b"\x89PNG")
    assert "Learning took" in result.stdout


def test_prompts_are_different_and_follow_from_the_seed() -> None:
    everyday, sql = topics(0).values()
    assert len(set(everyday)) == len(everyday)
    assert len(set(sql)) > 0.8 * len(sql)
    assert topics(0) == topics(0) != topics(1)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--before", "1000"], "everyday prompts and"),
        (["--online", "[]"], "--online: give a JSON object"),
        (["--online", "{"], "--online: "),
    ],
)
def test_wrong_use(arguments: list[str], more: list[str], message: str, tmp_path: Path) -> None:
    result = run(main, [*arguments, *more, "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert message in result.output
