"""`ngrams build`: a file that `--method corpus_ngram` takes."""

from __future__ import annotations

import json
from pathlib import Path

from foretoken.drafters.text.ngrams import NgramTables
from tests.cli.conftest import Run


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
