"""How long the suite times what passes cost; see `conftest.py`."""

from __future__ import annotations

import pytest

from tokenleap.runtime import profiling

__all__ = ["SHORT", "USUAL", "measure_with"]

SHORT: dict[str, float] = {"ROUNDS": 1, "MAX_SECONDS": 0.2}
USUAL: dict[str, float] = {name: getattr(profiling, name) for name in SHORT}
"""As outside the tests."""


def measure_with(patch: pytest.MonkeyPatch, settings: dict[str, float]) -> None:
    """Time passes so."""
    for name, value in settings.items():
        patch.setattr(profiling, name, value)
