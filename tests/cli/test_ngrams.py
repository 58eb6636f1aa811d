"""`ngrams build`: a file that `--method corpus_ngram` takes, and mistakes in one line."""

from __future__ import annotations

import json
from pathlib import Path

from foretoken.ngrams import NgramTables
from tests.cli.conftest import Run, error_of


def test_build_and_use(run: Run, tiny: Path, tmp_path: Path) -> None:
    text, output = tmp_path / "a.txt", tmp_path / "a.ngrams"
    text.write_text("the cat sat on the mat\n" * 20)
    built = run("ngrams", "build", text, text, "--model", tiny, "--output", output)
    assert built.exit_code == 0, built.stderr
    assert "has 920 tokens" in built.stdout
    assert "Counting n-grams (920 bytes" in built.stderr
    assert NgramTables.load(output).num_tokens == 920
    config = json.dumps({"method": "corpus_ngram", "corpus": str(output)})
    arguments = ("--model", tiny, "--max-tokens", 8)
    drafted = run("generate", "the cat", *arguments, "--speculative-config", config)
    assert drafted.exit_code == 0, drafted.stderr
    assert drafted.stdout == run("generate", "the cat", *arguments, "--method", "none").stdout


def test_files_that_cannot_be_counted(run: Run, tiny: Path, tmp_path: Path) -> None:
    latin, empty = tmp_path / "latin.txt", tmp_path / "empty.txt"
    latin.write_bytes(b"caf\xe9")
    empty.touch()
    output = tmp_path / "a.ngrams"
    for file, message in ((latin, "is not UTF-8 text"), (empty, "the corpus is empty")):
        result = run("ngrams", "build", file, "--model", tiny, "--output", output)
        assert result.exit_code == 1
        assert message in result.stderr.splitlines()[-1]
        assert not output.exists()
    missing = run("ngrams", "build", tmp_path / "no", "--model", tiny, "--output", output)
    assert missing.exit_code == 1
    assert "No such file" in error_of(missing)


def test_nowhere_to_write(run: Run, tiny: Path, tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text("a")
    result = run("ngrams", "build", text, "-m", tiny, "-o", tmp_path / "no" / "a.ngrams")
    assert result.exit_code == 2
    assert "there is no folder" in error_of(result)


def test_no_model_no_output_no_files(run: Run, tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text("a")
    unknown = run("ngrams", "build", text, "-m", "nonesuch", "-o", tmp_path / "a")
    assert unknown.exit_code == 2
    assert "nonesuch" in error_of(unknown)
    assert run("ngrams", "build", text).exit_code == 2
    assert run("ngrams", "build", "-o", tmp_path / "a").exit_code == 2
