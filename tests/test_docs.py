"""The documents are true: code runs, links and paths exist, the command line has the options."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from docs import hooks
from typer.testing import CliRunner

from tokenleap.cli import app
from tokenleap.control import CONTROLLERS
from tokenleap.core.acceptance import RULES
from tokenleap.core.config import Config
from tokenleap.drafters.online import OnlineOptions
from tokenleap.drafters.registry import METHODS
from tokenleap.training.method import TrainingSettings, training_methods

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
SOURCES = ("src", "tests", "docs", "examples", "benchmarks")
HOMES = (ROOT, ROOT / "src/tokenleap", ROOT / "tests", ROOT / "tests/invariants")
GENERATED = ROOT / "docs" / hooks.PAGE
METHODS_PAGE = ROOT / "docs/methods.md"
WRITTEN_BY_BENCH = {"table.md"}
DELETED_BENCHMARKS = {"methods"}
"""Measurements in docs/results.md name the program that made them, also if it is gone."""

each_document = pytest.mark.parametrize(
    "document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT))
)


def blocks(document: Path) -> list[tuple[str, str, str]]:
    """Language, title and content of the fenced blocks."""
    fence = r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$'
    return re.findall(fence, document.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def code_spans(document: Path) -> list[str]:
    text = re.sub(r"^```.*?^```$", "", document.read_text(encoding="utf-8"), flags=re.S | re.M)
    return re.findall(r"`([^`\n]+)`", text)


# Code


@pytest.mark.model
@pytest.mark.usefixtures("smollm2_path")
def test_the_code_of_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    run_blocks(ROOT / "README.md")
    assert capsys.readouterr().out.strip()


@pytest.mark.model
@pytest.mark.usefixtures("smollm2_path")
def test_the_code_of_extending_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its modules become files, its entry points those of an installed package."""
    document = ROOT / "docs/extending.md"
    monkeypatch.syspath_prepend(str(tmp_path))
    for language, title, content in blocks(document):
        if title:
            (tmp_path / title).write_text(content, encoding="utf-8")
            monkeypatch.delitem(sys.modules, Path(title).stem, raising=False)
        elif language == "toml":
            install(tmp_path, tomllib.loads(content)["project"]["entry-points"])
    names = run_blocks(document)
    assert names["drafted"][0].metrics.num_accepted_tokens > 0
    assert names["by_name"][0].metrics.num_accepted_tokens > 0


def run_blocks(document: Path) -> dict[str, Any]:
    """Execute the Python blocks one after the other; those with a title are modules."""
    names: dict[str, Any] = {}
    for language, title, content in blocks(document):
        if language == "python" and not title:
            exec(compile(content, str(document), "exec"), names)
    return names


def install(folder: Path, entry_points: dict[str, dict[str, str]]) -> None:
    """Install a package that declares these entry points, as pip would."""
    info = folder / "plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin\nVersion: 1.0\n")
    lines = [
        line
        for group, points in entry_points.items()
        for line in (f"[{group}]", *(f"{name} = {value}" for name, value in points.items()))
    ]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")


# Links and paths


@each_document
def test_links_lead_somewhere(document: Path) -> None:
    text = re.sub(r"`[^`\n]+`", "", document.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        page = (document.parent / path).resolve() if path else document
        assert page.exists() or page == GENERATED, target
        if anchor:
            assert anchor in anchors(page), target


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub and MkDocs make them."""
    text = hooks.options_page() if page == GENERATED else page.read_text(encoding="utf-8")
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", h).strip().lower()) for h in headings}


@each_document
def test_paths_exist(document: Path) -> None:
    own = {title for _, title, _ in blocks(document)} | WRITTEN_BY_BENCH
    for span in code_spans(document):
        if re.fullmatch(r"[\w./*-]+\.(py|md|cpp|h|toml|yml)|[\w/]+/", span) and span not in own:
            assert any(found(span, document)), span


def found(name: str, document: Path) -> Iterator[bool]:
    for home in (*HOMES, document.parent):
        yield any(home.glob(name.rstrip("/")))
    yield name.rstrip("/") in names_in_the_tree()


@cache
def names_in_the_tree() -> frozenset[str]:
    return frozenset(path.name for folder in SOURCES for path in (ROOT / folder).rglob("*"))


@each_document
def test_programs_exist(document: Path) -> None:
    for name in re.findall(r"python -m benchmarks\.(\w+)", document.read_text(encoding="utf-8")):
        if document.name == "results.md" and name in DELETED_BENCHMARKS:
            continue
        assert (ROOT / f"benchmarks/{name}.py").exists(), name


# The command line


@each_document
def test_commands_have_these_options(document: Path) -> None:
    text = re.sub(r"\\?\n {8,}", " ", document.read_text(encoding="utf-8"))  # one line each
    for line in re.findall(r"^(?:    |\$ )+(?:\.venv/bin/)?tokenleap (.*)$", text, re.MULTILINE):
        check_command(re.sub(r"\s#.*", "", line))
    for span in code_spans(document):
        if match := re.fullmatch(r"tokenleap ([a-z-]+(?: .*)?|--help)", span):
            check_command(match[1])


def check_command(line: str) -> None:
    words = shlex.split(line)
    command = [word for word in words[:2] if re.fullmatch("[a-z-]+", word)]
    options = {word.partition("=")[0] for word in words if re.match("--?[a-z]", word)}
    known = help_of(*command[:2])
    assert known is not None, line
    assert options <= known, line


@cache
def help_of(*command: str) -> frozenset[str] | None:
    """The options of a command; a second word may be an argument. None if there is no such one."""
    for words in (command, command[:1]):
        arguments = [word for word in words if not word.startswith("-")]
        for page in ("--help-all", "--help"):
            result = CliRunner().invoke(app, [*arguments, page], env={"COLUMNS": "200"})
            if result.exit_code == 0:
                return frozenset(re.findall(r"(?<![\w-])--?[a-z][\w-]*", result.stdout))
    return None


def test_the_check_of_commands_notices() -> None:
    with pytest.raises(AssertionError):
        check_command("generate Hello --sed 1")
    with pytest.raises(AssertionError):
        check_command("generat Hello")


# Completeness


def test_every_method_rule_and_controller_is_described() -> None:
    document = ROOT / "docs/speculation.md"
    text, spans = document.read_text(encoding="utf-8"), code_spans(document)
    listed = re.findall(r"^\| \[(\w+)\]\(methods/\1\.md\)", METHODS_PAGE.read_text("utf-8"), re.M)
    assert sorted(listed) == sorted(METHODS)
    assert set(RULES) <= set(spans)
    for name in CONTROLLERS:
        assert f"\n**{name}.**" in text, name


OPTIONS: dict[str, type[Config]] = {
    **{name: spec.options for name, spec in METHODS.items()},
    **{name: rule.Options for name, rule in RULES.items()},
    **{name: controller.Options for name, controller in CONTROLLERS.items()},
    "online": OnlineOptions,
    "all methods": TrainingSettings,
    **{f"train {name}": method for name, method in training_methods().items()},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_is_listed_with_its_meaning(name: str) -> None:
    sections = dict(re.findall(r"^### ([\w ]+)$(.*?)(?=^##|\Z)", hooks.options_page(), re.S | re.M))
    section = hooks.method_options(name) if name in METHODS else sections[name]
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| [^|]+ \|[^|]*\| [\w`].*\.", section, re.M)
    assert sorted(rows) == sorted(OPTIONS[name].field_names())


def test_options_have_types_defaults_and_bounds() -> None:
    page = hooks.options_page() + "".join(map(hooks.method_options, METHODS))
    assert "| `prompt_lookup_max` | int | `4` | 1 to 64 | Longest suffix" in page
    assert '| `of` | `"token"` or `"path"` | `"token"` |  | Compare' in page
    assert "| `draft_top_p` | float or `None` | `None` | above 0, at most 1 | Draw" in page
    assert "| `datastore` | str | required |  | A file" in page


def test_the_first_page_has_the_code_of_the_readme() -> None:
    assert blocks(ROOT / "docs/index.md") == blocks(ROOT / "README.md")


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


def test_the_site_builds_without_warnings_and_needs_no_other_host(tmp_path: Path) -> None:
    done = subprocess.run(
        # `--quiet` would silence warnings, and what is silent is not strict.
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr, done.stderr
    assert (tmp_path / "search/search_index.js").exists()  # what the search from disk reads
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > 10
    for page in pages:
        html = page.read_text(encoding="utf-8")
        loaded = re.findall(
            r"<(?:script|img|link|iframe)[^>]*(?:src|href)=\"?(https?:[^\s\">]+)", html
        )
        assert not loaded, page
