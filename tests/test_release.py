"""`.ci/release.py` says what is missing for a release, and passes when nothing is."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / ".ci/release.py"
PROJECT = """[project]
name = "tokenleap"
version = "1.2.0"
urls = { Repository = "https://example.org/tokenleap" }
"""
CHANGES = "# Changelog\n\n## [1.2.0] - 2026-12-01\n\n## [1.1.0] - 2026-11-01\n"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / ".ci").mkdir()
    shutil.copy(SCRIPT, tmp_path / ".ci")
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    (tmp_path / "CHANGELOG.md").write_text(CHANGES)
    git(tmp_path, "init", "--quiet")
    commit(tmp_path)
    git(tmp_path, "tag", "v1.2.0")
    return tmp_path


def git(checkout: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=Nobody", "-c", "user.email=nobody@example.org")
    subprocess.run(["git", *identity, *arguments], cwd=checkout, check=True)


def commit(checkout: Path) -> None:
    git(checkout, "add", "--all")
    git(checkout, "commit", "--quiet", "--message", "A change")


def check(checkout: Path) -> list[str]:
    """What the script says on standard error, or nothing if it passes."""
    command = [sys.executable, ".ci/release.py"]
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False)
    assert done.returncode == bool(done.stderr)
    return done.stderr.splitlines()


def edit(name: str, old: str, new: str) -> Callable[[Path], None]:
    def change(checkout: Path) -> None:
        text = (checkout / name).read_text()
        assert old in text
        (checkout / name).write_text(text.replace(old, new))
        commit(checkout)
        git(checkout, "tag", "--force", "v1.2.0")

    return change


def test_a_release_passes(checkout: Path) -> None:
    assert check(checkout) == []


@pytest.mark.parametrize(
    ("change", "missing"),
    [
        (lambda checkout: (checkout / "new.txt").touch(), "git: there are changes"),
        (lambda checkout: git(checkout, "tag", "--delete", "v1.2.0"), "has no tag v1.2.0"),
        (edit("pyproject.toml", "urls", "#"), "has no Repository"),
        (edit("CHANGELOG.md", "2026-12-01", "unreleased"), "is not [1.2.0] with the day"),
        (edit("CHANGELOG.md", "[1.2.0]", "[Unreleased]"), "is not [1.2.0] with the day"),
    ],
    ids=["changes", "tag", "home", "day", "section"],
)
def test_what_is_missing_has_a_line(
    checkout: Path, change: Callable[[Path], None], missing: str
) -> None:
    change(checkout)
    (line,) = check(checkout)
    assert missing in line
