"""`ngrams build` and `datastore build`: mistakes in one line, and nothing left behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Run, error_of

pytestmark = pytest.mark.parametrize("command", ["ngrams", "datastore"])


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
    missing = run(command, "build", tmp_path / "no", "--model", tiny, "--output", output)
    assert missing.exit_code == 1
    assert "No such file" in error_of(missing)


def test_nowhere_to_write(run: Run, tiny: Path, tmp_path: Path, command: str) -> None:
    text = tmp_path / "a.txt"
    text.write_text("a")
    result = run(command, "build", text, "-m", tiny, "-o", tmp_path / "no" / "made")
    assert result.exit_code == 2
    assert "there is no folder" in error_of(result)


def test_no_model_no_output_no_files(run: Run, tmp_path: Path, command: str) -> None:
    text = tmp_path / "a.txt"
    text.write_text("a")
    unknown = run(command, "build", text, "-m", "nonesuch", "-o", tmp_path / "a")
    assert unknown.exit_code == 2
    assert "nonesuch" in error_of(unknown)
    assert run(command, "build", text).exit_code == 2
    assert run(command, "build", "-o", tmp_path / "a").exit_code == 2
