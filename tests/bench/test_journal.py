"""`Journal`: what a kill leaves is read, and nothing that was written is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tokenleap.bench.run import Journal
from tokenleap.errors import TokenleapError

HEADER = b'{"format": "test", "seed": 0, "checksum": "980e8106"}\n'


def journal(path: Path) -> Journal:
    return Journal(path, "test", {"seed": 0})


def test_a_record_that_was_cut_off_is_removed_without_writing_the_others_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill while they are written again would lose all of them."""
    path = tmp_path / "results.jsonl"
    first = journal(path)
    for record in ({"of": "\u00e9"}, {"of": 2}):
        first.add(record)
    path.write_bytes(path.read_bytes() + b'{"of": ')

    def write(*_: Any, **__: Any) -> None:
        raise AssertionError("the records are written again")

    monkeypatch.setattr(Path, "write_text", write)
    again = journal(path)
    assert again.records == [{"of": "\u00e9"}, {"of": 2}]
    again.add({"of": 3})
    assert journal(path).records == again.records == [{"of": "\u00e9"}, {"of": 2}, {"of": 3}]


def test_a_record_that_was_changed_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    journal(path).add({"of": 2})
    path.write_text(path.read_text().replace("2}", "3}").replace('"of": 2', '"of": "two"'))
    with pytest.raises(TokenleapError, match="line 2 has changed since it was written"):
        journal(path)


@pytest.mark.parametrize("length", [0, 1, len(HEADER) - 1])
def test_a_header_that_was_cut_off_is_written_again(length: int, tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_bytes(HEADER[:length])
    assert journal(path).records == []
    assert path.read_bytes() == HEADER


def test_what_is_no_results_file_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    for content in (b"notes", b"notes\n", b"[]\n", HEADER.replace(b"0,", b"1,")[:-1]):
        path.write_bytes(content)
        with pytest.raises(TokenleapError, match="not a results file"):
            journal(path)
        assert path.read_bytes() == content
