"""English-German sentence pairs from Debian's packages, for `benchmarks.seq2seq`.

LibreOffice's help pages give each paragraph and heading an id, which is the same in all languages:
pages are aligned by file and id. Whole pages are held out, and what occurs on a held-out page is
not learnt. The catalogues (.mo) of translated programs, aligned by message, are learnt only.

    python -m benchmarks.seq2seq data OUT

writes `train`, `dev` and `test`, each as `.en` and `.de`, a line a paragraph, and `data.json`.
"""

from __future__ import annotations

import gettext
import json
import random
import re
import subprocess
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple

from tokenleap.errors import DataError

HELP = ("libreoffice-help-en-us", "libreoffice-help-de")
"""Packages of the help pages."""
CATALOGUES = ("libreoffice-l10n-de",)
"""Packages with German catalogues: by default, what the pages speak of. Others, such as `git` and
`gcc-12-locales`, are further from them."""

_WORDS = (4, 60)
"""Fewest and most words of a paragraph, on both sides."""
_HELD_OUT = {"test": range(3), "dev": range(3, 5)}
"""Hundredths of the pages."""
_MOST_RATIO = 2.2
"""Characters of the longer side over those of the shorter one, plus ten each."""
_BLOCKS = frozenset(("p", "h1", "h2", "h3", "h4", "h5", "h6"))


class TextPair(NamedTuple):
    """A paragraph in English and in German."""

    english: str
    german: str


class _Paragraphs(HTMLParser):
    """Text of the paragraphs and headings that have an id.

    Attributes:
        found: by id; empty where the page shows program code.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, str] = {}
        self._id: str | None = None
        self._parts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """A new block ends the last one."""
        if tag in _BLOCKS:
            self._end()
            given = dict(attrs)
            code = given.get("class") in ("code", "bascode", "pycode", "sqlcode")
            self._id = None if code else given.get("id")
        elif tag == "br":
            self._parts.append(" ")

    def handle_endtag(self, tag: str) -> None:
        if tag in _BLOCKS:
            self._end()

    def handle_data(self, data: str) -> None:
        """Text, also of what stands within a block."""
        if self._id is not None:
            self._parts.append(data)

    def _end(self) -> None:
        if self._id is not None:
            self.found[self._id] = in_one_space("".join(self._parts))
        self._id, self._parts = None, []


def download(packages: Iterable[str], folder: Path) -> Path:
    """Fetch Debian packages with `apt-get download`; the root of what they hold, unpacked."""
    root = folder / "root"
    for package in packages:
        done = folder / f"{package}.unpacked"
        if done.exists():
            continue
        into = folder / package
        into.mkdir(parents=True, exist_ok=True)
        _run(["apt-get", "download", package], into)
        for archive in into.glob("*.deb"):
            _run(["dpkg", "-x", str(archive.resolve()), str(root.resolve())], into)
            done.write_text(archive.name + "\n")
    return root


def _run(command: list[str], folder: Path) -> None:
    try:
        subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    except FileNotFoundError:
        raise DataError(f"{command[0]}: not found; the data are packages of Debian 12.") from None
    except subprocess.CalledProcessError as error:
        reason = error.stderr.strip().splitlines()[-1:]
        raise DataError(f"{' '.join(command)} failed: {''.join(reason)}") from None


def lines(path: Path) -> list[str]:
    """The lines of a text file; a line may hold any character but a line feed."""
    try:
        return path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error}; run `data` first.") from None


def paragraphs(page: str) -> dict[str, str]:
    """By id, the text of the paragraphs and headings of an HTML page."""
    parser = _Paragraphs()
    parser.feed(page)
    parser.close()
    return parser.found


def help_pairs(english: Path, german: Path) -> Iterator[tuple[str, TextPair]]:
    """(page, pair) of two folders with the same pages, for every id that both have."""
    for path in sorted(english.rglob("*.html")):
        page = path.relative_to(english).as_posix()
        other = german / page
        if not other.exists():
            continue
        first, second = (paragraphs(each.read_text(encoding="utf-8")) for each in (path, other))
        for key, text in first.items():
            if key in second:
                yield page, TextPair(text, second[key])


def messages(catalogue: Path) -> Iterator[TextPair]:
    """The translations in a .mo file, without contexts, accelerators and plurals."""
    with catalogue.open("rb") as file:
        translations = vars(gettext.GNUTranslations(file))["_catalog"]
    for message, translation in translations.items():
        if isinstance(message, str) and message:
            text = message.rpartition("\x04")[2]
            yield TextPair(_plain(text), _plain(translation))


def _plain(message: str) -> str:
    """Without the marks of shortcut keys, and in one line."""
    return in_one_space(re.sub(r"[~_&](?=\w)", "", message) if len(message) < 40 else message)


def in_one_space(text: str) -> str:
    """With single spaces, no invisible characters, and one kind of apostrophe."""
    text = re.sub(r"[\u00ad\u200b-\u200f\ufeff\ufffc]", "", text)
    return " ".join(text.replace("\u2019", "'").split())


def is_clean(pair: TextPair, words: tuple[int, int] = _WORDS) -> bool:
    """Whether this looks like a sentence and its translation."""
    least, most = words
    shorter, longer = sorted(map(len, pair))
    return (
        pair.english != pair.german
        and all(least <= len(text.split()) <= most for text in pair)
        and (longer + 10) / (shorter + 10) <= _MOST_RATIO
        and all(2 * sum(c.isalpha() or c.isspace() for c in text) > len(text) for text in pair)
    )


def part_of(page: str) -> str:
    """`train`, `dev` or `test`, by a checksum of the page's name."""
    place = zlib.crc32(page.encode()) % 100
    return next((part for part, places in _HELD_OUT.items() if place in places), "train")


def split(pairs: Iterable[tuple[str, TextPair]]) -> dict[str, list[TextPair]]:
    """By part, each English text once. What a held-out page shows is not learnt."""
    seen: dict[str, str] = {}
    kept: dict[str, TextPair] = {}
    order = ("test", "dev", "train")
    for page, pair in pairs:
        part = part_of(page)
        before = seen.get(pair.english)
        if before is None or order.index(part) < order.index(before):
            seen[pair.english], kept[pair.english] = part, pair
    return {part: [pair for text, pair in kept.items() if seen[text] == part] for part in order}


def prepare(folder: Path, root: Path, *, most: int | None = None, seed: int = 0) -> dict[str, int]:
    """Write the parts to `folder`, at most `most` pairs to learn, from the unpacked packages.

    Returns the number of pairs of each part, and of each source.
    """
    text = root / "usr/share/libreoffice/help"
    pages = help_pairs(text / "en-US/text", text / "de/text")
    parts = split((page, pair) for page, pair in pages if is_clean(pair))
    if not parts["train"]:
        raise DataError(f"{text}: no pages; are the packages {' and '.join(HELP)} unpacked?")
    counts = Counter({"help pages": len(parts["train"])})
    known = {pair.english for pairs in parts.values() for pair in pairs}
    for catalogue in sorted(root.rglob("de/LC_MESSAGES/*.mo")):
        for pair in messages(catalogue):
            if pair.english not in known and is_clean(pair, (1, _WORDS[1])):
                known.add(pair.english)
                parts["train"].append(pair)
                counts["catalogues"] += 1
    random.Random(seed).shuffle(parts["train"])
    parts["train"] = parts["train"][:most]
    folder.mkdir(parents=True, exist_ok=True)
    for part, pairs in parts.items():
        for number, language in enumerate(("en", "de")):
            lines = "".join(f"{pair[number]}\n" for pair in pairs)
            (folder / f"{part}.{language}").write_text(lines, encoding="utf-8")
    found = {part: len(pairs) for part, pairs in parts.items()} | dict(counts)
    (folder / "data.json").write_text(json.dumps(found, indent=1) + "\n")
    return found
