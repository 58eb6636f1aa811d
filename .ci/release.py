#!/usr/bin/env python3
"""Check that the checkout can be released; CONTRIBUTING.md has the steps."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def main() -> None:
    root = Path(__file__).resolve().parents[1]
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    if found := list(problems(root, project)):
        sys.exit("\n".join(found))
    print(f"{project['version']} can be released")


def problems(root: Path, project: dict[str, Any]) -> Iterator[str]:
    """A line for each thing that is missing."""
    version = project["version"]
    if git(root, "status", "--porcelain"):
        yield "git: there are changes that are not committed"
    if f"v{version}" not in git(root, "tag", "--points-at", "HEAD").split():
        yield f"git: the commit has no tag v{version}, after the version in pyproject.toml"
    changes = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## (.*)$", changes, re.MULTILINE)
    if not newest or not re.fullmatch(rf"\[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d", newest[1]):
        yield f"CHANGELOG.md: the first section is not [{version}] with the day of the release"
    if "Repository" not in project.get("urls", {}):
        yield "pyproject.toml: [project.urls] has no Repository, the address of the project"


def git(root: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=root, check=True, capture_output=True, text=True
    ).stdout


if __name__ == "__main__":
    main()
