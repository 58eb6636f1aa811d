"""Damaged files end in one line or do no harm, whichever reader gets them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.fuzz.mutants import failures
from tests.fuzz.readers import READERS, reader

FEW, MANY = 6, 226
"""Mutants for each reader; 0 is the intact seed."""


def check(name: str, numbers: range, folder: Path, make_gguf: Any) -> None:
    found = failures(reader(name, folder / "seed", make_gguf), numbers)
    told = "\n\n".join(f"{name} {each.number}: {each.what}" for each in found[:5])
    assert not found, f"{len(found)} of {len(numbers)} mutants:\n{told}"


@pytest.mark.parametrize("name", READERS)
def test_a_few_mutants(name: str, tmp_path: Path, make_gguf: Any) -> None:
    check(name, range(FEW), tmp_path, make_gguf)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", READERS)
def test_many_mutants(name: str, tmp_path: Path, make_gguf: Any) -> None:
    check(name, range(FEW, MANY), tmp_path, make_gguf)
