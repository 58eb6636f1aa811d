from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest

from tokenleap.core.config import return_freed


def test_freed_memory_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[int] = []
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(malloc_trim=left.append))
    return_freed()
    assert left == [0]


@pytest.mark.parametrize("error", [OSError, TypeError, AttributeError])
def test_without_glibc_nothing_happens(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def library(name: Any) -> Any:
        raise error

    monkeypatch.setattr(ctypes, "CDLL", library)
    return_freed()
