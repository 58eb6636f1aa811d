"""`datastore build` and `info`: a file that `--method rest` takes."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.conftest import Run, error_of
from tokenleap.drafters.text.datastore import Datastore


def test_build_and_use(run: Run, tiny: Path, tmp_path: Path) -> None:
    text, other, output = tmp_path / "a.txt", tmp_path / "b.txt", tmp_path / "a.datastore"
    text.write_text("the cat sat on the mat\n" * 20)
    other.write_text("a cat")
    built = run("datastore", "build", text, other, "--model", tiny, "--output", output)
    assert built.exit_code == 0, built.stderr
    assert "has 465 tokens of a vocabulary of 97 in 2 texts, the longest of 460" in built.stdout
    assert "Building the datastore (465 bytes" in built.stderr
    assert Datastore.load(output).num_tokens == 465
    assert run("datastore", "info", output).stdout == built.stdout
    config = json.dumps({"method": "rest", "datastore": str(output)})
    arguments = ("--model", tiny, "--max-tokens", 8)
    drafted = run("generate", "the cat", *arguments, "--speculative-config", config)
    assert drafted.exit_code == 0, drafted.stderr
    assert drafted.stdout == run("generate", "the cat", *arguments, "--method", "none").stdout


def test_one_text(run: Run, tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a cat")
    built = run("datastore", "build", tmp_path / "a.txt", "-m", tiny, "-o", tmp_path / "a")
    assert "in 1 text, the longest of 5 tokens" in built.stdout


def test_no_datastore(run: Run, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("no arrays here")
    for name, message in (("a", "is not a valid datastore"), ("b", "cannot read")):
        result = run("datastore", "info", tmp_path / name)
        assert result.exit_code == 1
        assert message in error_of(result)
    assert run("datastore", "info").exit_code == 2
