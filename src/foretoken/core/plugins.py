"""Drafters and acceptance rules of other packages, found through entry points.

A package names them in its `pyproject.toml`:

    [project.entry-points."foretoken.drafters"]
    mine = "my_package:SPEC"
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

from foretoken.errors import ConfigError

__all__ = ["plugin", "plugin_names"]


def plugin_names(group: str) -> list[str]:
    """Names of a group's entry points, in alphabetical order."""
    return sorted(entry_points(group=group).names)


def plugin(group: str, name: str) -> Any | None:
    """What an entry point names; None if there is none of this name.

    Raises:
        ConfigError: it cannot be imported.
    """
    for point in entry_points(group=group, name=name):
        try:
            return point.load()
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                f"'{name}' is an entry point in {group} that cannot be loaded "
                f"({point.value}: {error}): mend or remove the package it comes from."
            ) from error
    return None
