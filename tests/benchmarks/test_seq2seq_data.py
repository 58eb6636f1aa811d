from __future__ import annotations

import struct
from pathlib import Path

import pytest
from benchmarks.seq2seq_data import TextPair, help_pairs, is_clean, messages, part_of, split

PAGES = {
    "en": """<p id="a">Opens the <span class="emph">File</span> menu
      of this.</p><h2 id="b">Sums &amp; means</h2><p>no id</p>
      <p id="c" class="bascode">x=1</p><p id="d">English only.</p>""",
    "de": """<h2 id="b">Summen &amp; Mittel</h2><p id="a">Öffnet das Menü<br>Datei
      davon.</p><p id="c" class="bascode">x=1</p><p id="e">Nur Deutsch.</p>""",
}


def test_pages_are_aligned_by_id(tmp_path: Path) -> None:
    for language, page in PAGES.items():
        (tmp_path / language / "guide").mkdir(parents=True)
        (tmp_path / language / "guide/one.html").write_text(page)
    (tmp_path / "en/two.html").write_text(PAGES["en"])  # not translated
    assert list(help_pairs(tmp_path / "en", tmp_path / "de")) == [
        (
            "guide/one.html",
            TextPair("Opens the File menu of this.", "Öffnet das Menü Datei davon."),
        ),
        ("guide/one.html", TextPair("Sums & means", "Summen & Mittel")),
    ]


def test_catalogues_lose_contexts_and_marks_of_keys(tmp_path: Path) -> None:
    path = tmp_path / "x.mo"
    entries = {"": "Content-Type: text/plain; charset=UTF-8\n", "menu\x04~Open": "Ö~ffnen"}
    path.write_bytes(catalogue(entries))
    assert list(messages(path)) == [TextPair("Open", "Öffnen")]


def catalogue(entries: dict[str, str]) -> bytes:
    """A .mo file: a header, two tables of (length, offset), and the texts."""
    texts = [x.encode() for pair in zip(*sorted(entries.items()), strict=True) for x in pair]
    count, table, body = len(entries), b"", b""
    start = 28 + 8 * len(texts)
    for text in texts:
        table += struct.pack("<2I", len(text), start + len(body))
        body += text + b"\0"
    return struct.pack("<7I", 0x950412DE, 0, count, 28, 28 + 8 * count, 0, 0) + table + body


@pytest.mark.parametrize(
    ("english", "german", "clean"),
    [
        ("Opens the file menu.", "Öffnet das Menü Datei.", True),
        ("Opens it.", "Öffnet es.", False),  # too short
        ("Opens the file menu.", "Opens the file menu.", False),  # not translated
        ("A = 123 + 4567 + 89", "B = 123 + 4567 + 89", False),  # hardly a letter
        (
            "Opens the file menu.",
            "Öffnet das Menü Datei, und was immer sonst noch da sein mag.",
            False,
        ),
    ],
)
def test_what_is_learnt_looks_like_a_translation(english: str, german: str, clean: bool) -> None:
    assert is_clean(TextPair(english, german)) is clean


def test_what_a_held_out_page_shows_is_not_learnt() -> None:
    names = [f"page{number}.html" for number in range(400)]
    by_part = {part: [n for n in names if part_of(n) == part] for part in ("train", "dev", "test")}
    assert len(by_part["train"]) > 340
    learnt, dev, test = (by_part[part][0] for part in ("train", "dev", "test"))
    shared = TextPair("Shared text.", "Gemeinsamer Text.")
    parts = split(
        [
            (learnt, shared),
            (learnt, TextPair("Own text.", "Eigener Text.")),
            (learnt, TextPair("Own text.", "Noch einmal.")),
            (dev, shared),
            (test, shared),
        ]
    )
    assert parts == {
        "train": [TextPair("Own text.", "Eigener Text.")],
        "dev": [],
        "test": [shared],
    }
