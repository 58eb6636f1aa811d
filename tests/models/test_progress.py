"""Sizes read well, and progress keeps off stdout."""

from __future__ import annotations

import pytest

from tokenleap.models.store import bytes_text, progress


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (1000, "1 kB"),
        (92_871_040, "92.9 MB"),
        (999_999_999, "1 GB"),
    ],
)
def test_sizes_are_written_as_people_write_them(count: int, text: str) -> None:
    assert bytes_text(count) == text


def test_without_a_terminal_progress_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("Working", "a moment", 2000) as report:
        report(1000)
        report(2000)
    assert capsys.readouterr() == ("", "Working (2 kB, usually a moment) ...\n")
