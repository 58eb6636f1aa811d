"""Drafters and acceptance rules of other packages, found through entry points.

A package declares them in its `pyproject.toml`. A drafter is a `DrafterSpec`, a rule is a subclass
of `AcceptanceRule`:

    [project.entry-points."tokenleap.drafters"]
    mine = "my_package:SPEC"

    [project.entry-points."tokenleap.acceptance"]
    my_rule = "my_package:MyRule"

`drafters.registry` and `core.acceptance` look here for names that they do not know.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

from tokenleap.errors import ConfigError

__all__ = ["plugin", "plugin_names"]


def plugin_names(group: str) -> list[str]:
    """Names of all entry points of a group, in alphabetical order."""
    return sorted(entry_points(group=group).names)


def plugin(group: str, name: str) -> Any | None:
    """Load the object that an entry point names; None if there is no such entry point."""
    for point in entry_points(group=group, name=name):
        try:
            return point.load()
        except Exception as error:  # importing it runs its package's code
            reason = str(error).partition("\n")[0] or type(error).__name__
            raise ConfigError(
                f"'{name}' is an entry point in {group} that cannot be loaded "
                f"({point.value}: {reason}): fix or remove the package it comes from."
            ) from error
    return None
