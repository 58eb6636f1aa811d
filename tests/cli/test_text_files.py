"""`ngrams` and `datastore`: files that `corpus_ngram` and `rest` take, and mistakes in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Run, error_of
from tokenleap import LLM
from tokenleap.drafters.text.ngrams import NgramTables, count_ngrams
from tokenleap.training import collect
from tokenleap.training.conversations import SelfTalk

both = pytest.mark.parametrize("command", ["ngrams", "datastore"])


@pytest.mark.parametrize(
    ("command", "doing", "contents", "config"),
    [
        ("ngrams", "Counting n-grams", "465 tokens", {"method": "corpus_ngram", "corpus": ""}),
        (
            "datastore",
            "Building the datastore",
            "465 tokens of a vocabulary of 97 in 2 texts, the longest of 460",
            {"method": "rest", "datastore": ""},
        ),
    ],
)
def test_build_and_use(
    run: Run,
    tiny: Path,
    tmp_path: Path,
    command: str,
    doing: str,
    contents: str,
    config: dict[str, str],
) -> None:
    text, other, output = tmp_path / "a.txt", tmp_path / "b.txt", tmp_path / "made"
    text.write_text("the cat sat on the mat\n" * 20)
    other.write_text("a cat")
    built = run.done(command, "build", text, other, "--model", tiny, "--output", output)
    assert f"has {contents}" in built.stdout
    assert f"{doing} (465 bytes" in built.stderr
    if command == "datastore":
        assert run("datastore", "info", output).stdout == built.stdout
    use(run, tiny, {name: value or str(output) for name, value in config.items()})


def use(run: Run, tiny: Path, config: dict[str, object]) -> None:
    """Draft with a file; the output is the target's."""
    arguments = ("--model", tiny, "--max-tokens", 8)
    drafted = run.done(
        "generate", "the cat", *arguments, "--speculative-config", json.dumps(config)
    )
    assert drafted.stdout == run("generate", "the cat", *arguments, "--method", "none").stdout


def test_one_text(run: Run, tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a cat")
    built = run("datastore", "build", tmp_path / "a.txt", "-m", tiny, "-o", tmp_path / "a")
    assert "in 1 text, the longest of 5 tokens" in built.stdout


def test_no_datastore(run: Run, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("no arrays here")
    for name, message in (("a", "is not a valid datastore"), ("b", "cannot read")):
        assert message in run.refused("datastore", "info", tmp_path / name, code=1)
    assert run("datastore", "info").exit_code == 2


def test_write_counts_what_the_model_writes_by_itself(
    run: Run, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collect, "_ROWS", 2)
    output = tmp_path / "own.ngrams"
    run.done("ngrams", "write", "--model", tiny, "--tokens", 60, "--output", output)
    llm = LLM(tiny)
    talks = SelfTalk(llm, collect._LENGTH).write(range(2))
    texts = [each.tokens[start:stop] for each in talks for start, stop in each.answers]
    cut = [texts[0][:60], texts[1][: max(0, 60 - len(texts[0]))]]
    expected = count_ngrams(cut, llm.engine.target.vocab_size, llm.tokenizer)
    found = NgramTables.load(output)
    assert found.num_tokens == 60
    assert found.fingerprint == expected.fingerprint
    for name in ("unigrams", "bigram_tokens", "bigram_counts", "trigram_tokens"):
        assert (getattr(found, name) == getattr(expected, name)).all()
    use(run, tiny, {"method": "corpus_ngram", "corpus": str(output), "order": 1})


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("prompts.jsonl", '{"prompt": "the cat"}\n' * 2, None),
        ("notes.txt", "the cat sat on the mat", "there are no prompts to answer"),
        ("broken.jsonl", "{", "line 1: not JSON"),
    ],
)
def test_write_answers_prompts(
    run: Run, tiny: Path, tmp_path: Path, name: str, text: str, message: str | None
) -> None:
    data, output = tmp_path / name, tmp_path / "own.ngrams"
    data.write_text(text)
    result = run(
        "ngrams", "write", "--model", tiny, "--tokens", 900, "--data", data, "--output", output
    )
    if message is None:
        assert result.exit_code == 0, result.stderr
        assert 8 <= NgramTables.load(output).num_tokens <= 2 * 384
    else:
        assert message in error_of(result)
        assert not output.exists()


@both
def test_files_that_cannot_be_read(run: Run, tiny: Path, tmp_path: Path, command: str) -> None:
    latin, empty = tmp_path / "latin.txt", tmp_path / "empty.txt"
    latin.write_bytes(b"caf\xe9")
    empty.touch()
    output = tmp_path / "made"
    for file, message in ((latin, "is not UTF-8 text"), (empty, "the corpus is empty")):
        result = run(command, "build", file, "--model", tiny, "--output", output)
        assert result.exit_code == 1
        assert message in result.stderr.splitlines()[-1]
        assert not output.exists()
    assert "No such file" in run.refused(
        command, "build", tmp_path / "no", "--model", tiny, "--output", output, code=1
    )


@both
def test_nowhere_to_write(run: Run, tiny: Path, tmp_path: Path, command: str) -> None:
    text = tmp_path / "a.txt"
    text.write_text("a")
    assert "there is no folder" in run.refused(
        command, "build", text, "-m", tiny, "-o", tmp_path / "no" / "made"
    )


@both
def test_no_model_no_output_no_files(run: Run, tmp_path: Path, command: str) -> None:
    text = tmp_path / "a.txt"
    text.write_text("a")
    assert "nonesuch" in run.refused(command, "build", text, "-m", "nonesuch", "-o", tmp_path / "a")
    assert run(command, "build", text).exit_code == 2
    assert run(command, "build", "-o", tmp_path / "a").exit_code == 2
