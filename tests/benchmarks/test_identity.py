from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.identity import (
    Comparison,
    Difference,
    Generation,
    ResultsFile,
    first_difference,
    summary,
)

from tokenleap import TokenleapError


def test_equal_generations_do_not_differ() -> None:
    one = Generation((1, 2), (-0.5, -0.25))
    assert first_difference(one, Generation((1, 2), (-0.5, -0.25))) is None
    assert first_difference(Generation((1, 2)), one) is None


def test_the_first_difference_in_tokens() -> None:
    found = first_difference(Generation((1, 2, 3)), Generation((1, 5, 6)))
    assert found == Difference(1, 2, 5)
    assert first_difference(Generation((1,)), Generation((1, 4))) == Difference(1, None, 4)


def test_one_bit_of_a_logprob_is_a_difference() -> None:
    after = -0.5000000000000001
    found = first_difference(Generation((1,), (-0.5,)), Generation((1,), (after,)))
    assert found == Difference(0, 1, 1, -0.5, after)


def comparison(
    prompt: str = "1", difference: Difference | None = None, *, promised: bool = True
) -> Comparison:
    return Comparison("greedy", "ngram", prompt, "qa", 10, 5, promised, difference)


def test_a_difference_counts_where_identity_is_promised() -> None:
    assert comparison("1", Difference(0, 1, 2)).broken
    assert not comparison("1", Difference(0, 1, 2), promised=False).broken
    assert not comparison("1").broken


def test_a_results_file_goes_on_where_it_was_broken_off(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    first = ResultsFile(file, {"seed": 1})
    first.add(comparison("1"))
    first.add(comparison("2", Difference(3, 1, 2, top2_gap=0.5)))
    with file.open("a") as end:
        end.write('{"check": "gre')
    again = ResultsFile(file, {"seed": 1})
    assert again.comparisons == first.comparisons
    again.add(comparison("3"))
    assert list(ResultsFile(file, {"seed": 1}).comparisons.values())[2] == comparison("3")


def test_results_of_other_settings_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    ResultsFile(file, {"seed": 1})
    with pytest.raises(TokenleapError, match="made with seed 1, and this run has 2"):
        ResultsFile(file, {"seed": 2})


@pytest.mark.parametrize("content", ["hello\n", "{}\n", "[]\n", '{"check": 1', "\n"])
def test_another_file_is_refused_and_left_alone(tmp_path: Path, content: str) -> None:
    file = tmp_path / "notes.txt"
    file.write_text(content)
    with pytest.raises(TokenleapError, match="not a results file"):
        ResultsFile(file, {})
    assert file.read_text() == content


def test_the_summary_counts_per_kind() -> None:
    table = summary([comparison("1"), comparison("2", Difference(0, 1, 2))])
    assert table.splitlines()[-1].split("|")[1:4] == [" greedy: ngram ", " 1/2 ", " 1/2 "]
