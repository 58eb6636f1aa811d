"""The extras of the installed distribution: what each brings, by its own metadata."""

from __future__ import annotations

import shlex
from importlib.metadata import metadata, requires
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from packaging.requirements import Requirement


def extras() -> list[str]:
    """Names of all extras, those for developers included."""
    return metadata("tokenleap").get_all("Provides-Extra", [])


def requirements(extra: str) -> list[Requirement]:
    """What an extra brings on this machine, also through other extras."""
    from packaging.requirements import Requirement  # costs the shell's start 11 ms

    found = []
    for each in map(Requirement, requires("tokenleap") or ()):
        marker, each.marker = each.marker, None
        if marker is None or not marker.evaluate({"extra": extra}):
            continue
        if each.name == "tokenleap":
            found += [inner for name in sorted(each.extras) for inner in requirements(name)]
        else:
            found.append(each)
    return found


def how_to_install(extra: str) -> str:
    """The command that installs what an extra brings.

    It names those packages, not "tokenleap[EXTRA]", so it works in a clone, too, and on a package
    index where that name is missing or not ours.
    """
    return shlex.join(["pip", "install", *map(str, requirements(extra))])
