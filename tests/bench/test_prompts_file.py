"""Files of prompts: what is read, what is refused, and what a sample is."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tokenleap.bench.prompts_file import MULTI_TURN, Prompt, cut_middle, read_prompts, stratified
from tokenleap.errors import PromptError, TokenleapError


def write(folder: Path, name: str, *lines: Any) -> Path:
    file = folder / name
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    file.write_text("\n".join(texts) + "\n")
    return file


def test_spec_bench_lines_give_first_turns_and_six_kinds(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        "questions.jsonl",
        {"question_id": 81, "category": "writing", "turns": ["a", "b"]},
        {"question_id": 101, "category": "math", "turns": ["c", "d"]},
        {"question_id": 171, "category": "math_reasoning", "turns": ["e"], "reference": ["f"]},
    )
    assert read_prompts(file) == [
        Prompt("81", MULTI_TURN, "a"),
        Prompt("101", MULTI_TURN, "c"),
        Prompt("171", "math_reasoning", "e"),
    ]


def speed_bench(number: int, category: str, *turns: str, **fields: Any) -> dict[str, Any]:
    """A row with the columns of the dataset's card."""
    return {
        "question_id": f"{number:032x}",
        "category": category,
        "sub_category": "",
        "turns": list(turns),
        "source": "",
        "src_id": "",
        "difficulty": "",
        "multiturn": len(turns) > 1,
        **fields,
    }


def test_categories_of_speed_bench_are_kinds(tmp_path: Path) -> None:
    """Also those that have the name of one of MT-Bench's."""
    rows = [speed_bench(1, "writing", "a", "b"), speed_bench(2, "rag", "c")]
    expected = [Prompt(f"{1:032x}", "writing", "a"), Prompt(f"{2:032x}", "rag", "c")]
    assert read_prompts(write(tmp_path, "qualitative.jsonl", *rows)) == expected
    for row in rows:  # as NeMo-Skills' prepare.py writes them
        row["messages"] = [{"role": "user", "content": turn} for turn in row.pop("turns")]
    assert read_prompts(write(tmp_path, "prepared.jsonl", *rows)) == expected


def test_speed_bench_is_published_as_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="needs pyarrow, which `.[ray]` brings")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [speed_bench(1, "low_entropy", "a"), speed_bench(2, "mixed", "b")]
    file = tmp_path / "throughput_1k.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    assert [(p.kind, p.text) for p in read_prompts(file)] == [("low_entropy", "a"), ("mixed", "b")]
    file.write_bytes(b"PAR1")
    with pytest.raises(PromptError, match="throughput_1k"):
        read_prompts(file)


def test_parquet_without_its_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(TokenleapError, match="needs pyarrow: pip install pyarrow"):
        read_prompts(tmp_path / "test.parquet")


def test_a_text_that_could_not_be_published_is_refused(tmp_path: Path) -> None:
    text = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH\n\n{article}"
    file = write(tmp_path, "qualitative.jsonl", speed_bench(1, "summarization", text))
    with pytest.raises(PromptError, match=r"line 1: a placeholder.*prepare\.py"):
        read_prompts(file)


def test_other_json_lines_and_plain_text(tmp_path: Path) -> None:
    lines = write(tmp_path, "mine.jsonl", {"prompt": "a"}, '"b"', "", {"question": "c"})
    assert [p.text for p in read_prompts(lines)] == ["a", "b", "c"]
    assert [p.kind for p in read_prompts(lines)] == ["mine"] * 3
    text = write(tmp_path, "mine.txt", "one prompt", "", " another ", "one\u2028of two\x0clines")
    texts = ["one prompt", "another", "one\u2028of two\x0clines"]
    assert [p.text for p in read_prompts(text)] == texts
    text.rename(tmp_path / "mine.jsonl").write_text('{"prompt": "a\u2028b"}\n')
    assert [p.text for p in read_prompts(tmp_path / "mine.jsonl")] == ["a\u2028b"]


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ([], "has no prompts"),
        (["{"], "line 1: not JSON"),
        (["3"], "line 1: no text"),
        ([{"turns": []}], "line 1: no text"),
        ([{"turns": [5]}], "line 1: no text"),
        ([{"messages": [{"role": "user"}]}], "line 1: no text"),
        ([{"answer": "a"}], "line 1: no text"),
        ([{"question_id": 1, "text": "a"}, {"question_id": 1, "text": "b"}], "1 occurs twice"),
    ],
)
def test_what_is_not_a_prompt_is_refused(tmp_path: Path, lines: list[Any], told: str) -> None:
    with pytest.raises(PromptError, match=told):
        read_prompts(write(tmp_path, "bad.jsonl", *lines))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TokenleapError, match="cannot read"):
        read_prompts(tmp_path / "none.jsonl")


def many(*kinds: str, each: int = 10) -> list[Prompt]:
    return [Prompt(f"{kind}{i}", kind, "text") for kind in kinds for i in range(each)]


def test_a_sample_has_as_many_of_every_kind_and_takes_turns() -> None:
    sample = stratified(many("a", "b", "c"), 4, seed=0)
    assert [p.kind for p in sample] == ["a", "b", "c"] * 4
    assert len({p.id for p in sample}) == 12


def test_a_larger_sample_begins_with_the_smaller_one() -> None:
    prompts = many("a", "b")
    assert stratified(prompts, 7, seed=3)[:6] == stratified(prompts, 3, seed=3)
    assert stratified(prompts, 7, seed=3) != stratified(prompts, 7, seed=4)


def test_a_sample_of_one_kind_is_that_of_all() -> None:
    prompts = many("a", "b")
    alone = stratified(prompts, 5, seed=1, kinds=["b"])
    assert alone == [p for p in stratified(prompts, 5, seed=1) if p.kind == "b"]
    with pytest.raises(PromptError, match="no prompts of kind 'd'; there are: a, b"):
        stratified(prompts, 5, seed=1, kinds=["d"])


def test_a_long_prompt_loses_its_middle() -> None:
    assert cut_middle([1, 2, 3], 3) == [1, 2, 3]
    assert cut_middle(list(range(10)), 5) == [0, 1, 7, 8, 9]
