"""How long PyTorch's OpenMP threads spin. OpenMP reads it when PyTorch is loaded."""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping

__all__ = ["bound_spinning", "unbound_spinning"]

_NAME = "GOMP_SPINCOUNT"
_COUNT = "20000"
"""About 0.2 ms, which covers the time between two passes."""

_bounds: list[str] = []
"""What this process has set."""


def bound_spinning() -> None:
    """Bound it for this process and its children, if PyTorch is not loaded and nobody has chosen.

    PyTorch's threads spin for milliseconds after all that they did together, also when other
    programs wait for the cores.
    """
    chosen = "OMP_WAIT_POLICY" in os.environ or _NAME in os.environ
    if "torch" not in sys.modules and not chosen:
        os.environ[_NAME] = _COUNT
        _bounds.append(_COUNT)


def unbound_spinning(environment: MutableMapping[str, str]) -> None:
    """Remove the bound from an environment, unless somebody else has chosen it."""
    if environment.get(_NAME) in _bounds:
        del environment[_NAME]
