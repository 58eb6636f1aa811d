"""Tokens on a terminal: whole words, colours of origin, nothing that could harm it."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenleap import Origin, StreamedToken
from tokenleap.cli.console import TokenWriter

CODES = re.compile(r"\x1b\[[0-9;]*m")


def written(pieces: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    writer = TokenWriter()
    writer.write([StreamedToken(0, piece, Origin.DRAFT) for piece in pieces])
    writer.close()
    return capsys.readouterr().out


def test_a_pipe_gets_the_text_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    text = ["a" * 100, " b\tc", "", "\x1b[31m", " d  ", "\n\n"]
    assert written(text, capsys) == "".join(text)
    assert written(["no end"], capsys) == "no end\n"
    assert written([], capsys) == ""


@pytest.mark.usefixtures("colours")
def test_lines_end_between_words(capsys: pytest.CaptureFixture[str]) -> None:
    shown = CODES.sub("", written([" The", " qui", "ck", " brown"] * 6, capsys))
    assert shown.split() == ["The", "quick", "brown"] * 6
    assert max(map(len, shown.splitlines())) <= 40


@pytest.mark.usefixtures("colours")
def test_line_breaks_and_indents_stay(capsys: pytest.CaptureFixture[str]) -> None:
    pieces = ["def", " f():", "\n   ", " return", " 1", "\n\n", "x"]
    assert CODES.sub("", written(pieces, capsys)) == "def f():\n    return 1\n\nx\n"


@pytest.mark.usefixtures("colours")
def test_colours_of_origin(capsys: pytest.CaptureFixture[str]) -> None:
    writer = TokenWriter()
    writer.write([StreamedToken(0, " " + origin, origin) for origin in Origin])
    writer.close()
    shown = capsys.readouterr().out
    assert "\x1b[38;5;28mdraft\x1b[0m" in shown
    assert "\x1b[38;5;32mcorrection\x1b[0m" in shown
    assert " bonus plain\n" in CODES.sub("", shown)
    assert writer.origins == {"draft": 1, "correction": 1, "bonus": 1, "plain": 1}


@pytest.mark.usefixtures("colours")
def test_control_characters_become_visible(capsys: pytest.CaptureFixture[str]) -> None:
    shown = CODES.sub("", written(["a\x1b[2Jb\x07\x9b"], capsys))
    assert shown == "a\u241b[2Jb\u2407\ufffd\n"


@pytest.mark.usefixtures("colours")
def test_a_word_without_end_is_not_held_for_ever(capsys: pytest.CaptureFixture[str]) -> None:
    writer = TokenWriter()
    writer.write([StreamedToken(0, "\u5b57" * 30, Origin.BONUS)])
    assert "\u5b57" * 30 in capsys.readouterr().out
    writer.close()


@pytest.mark.usefixtures("colours")
@given(pieces=st.lists(st.text(alphabet="ab \n", max_size=8), max_size=30))
def test_only_spaces_are_lost(pieces: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        out: list[str] = []
        patch.setattr("sys.stdout.write", out.append)
        writer = TokenWriter()
        writer.write([StreamedToken(0, piece, Origin.BONUS) for piece in pieces])
        writer.close()
    shown = CODES.sub("", "".join(out))
    assert shown.split() == "".join(pieces).split()
