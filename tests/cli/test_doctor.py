"""`tokenleap doctor`: the machine, and what would be faster."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tokenleap.runtime.native import build


def findings(run: Run) -> dict[str, tuple[str, str]]:
    found = json.loads(run("doctor", "--json").stdout)["findings"]
    return {each["name"]: (each["value"], each["advice"]) for each in found}


def test_what_is_there(run: Run) -> None:
    found = findings(run)
    assert found["native runtime"][0].startswith(("ready, compiled here by", "ready, prebuilt for"))
    assert "of" in found["cores"][0]
    assert found["extra bench"][0] == found["extra serve"][0] == "installed"
    assert "extra dev" not in found
    shown = run("doctor").stdout
    assert all(name in shown for name in found)


def test_no_compiler(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    build._library.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    try:
        found = findings(run)
    finally:
        build._library.cache_clear()
    value, advice = found["native runtime"]
    assert "install g++" in value
    assert "slower" in advice


def test_a_processor_without_vectors(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenleap.bench.machine.processor_flags", frozenset)
    value, advice = findings(run)["instructions"]
    assert "none" in value
    assert "AVX2" in advice
