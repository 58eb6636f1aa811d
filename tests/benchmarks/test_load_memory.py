from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.load_memory import main, memory

from benchmarks import load_memory as module
from tests.benchmarks.program import run
from tests.tiny import tiny_model


@pytest.fixture
def linux() -> None:
    if not module._ROLLUP.exists():
        pytest.skip("no /proc/self/smaps_rollup here")


@pytest.mark.usefixtures("linux")
def test_pages_of_files_are_part_of_the_memory() -> None:
    found = memory()
    assert 0 < found.of_files < found.resident
    held = bytearray(b"1") * 50_000_000
    assert memory().peak > 50
    assert memory().resident - memory().of_files > 50
    assert len(held) == 50_000_000


@pytest.mark.usefixtures("linux")
def test_on_the_command_line(tmp_path: Path) -> None:
    for seed, name in enumerate(("target", "draft")):
        tiny_model(seed=seed).save_pretrained(tmp_path / name)
    config = f'{{"model": "{tmp_path / "draft"}"}}'
    result = run(main, ["--model", str(tmp_path / "target"), "--config", config])
    assert result.exit_code == 0, result.output
    assert "| LLM" in result.output


@pytest.mark.parametrize("config", ["{", "[]", '{"method": "none", "nonsense": 1}'])
def test_a_wrong_config_is_told_in_one_line(config: str) -> None:
    result = run(main, ["--config", config])
    assert result.exit_code == 2
    assert len(result.output.strip().splitlines()) == 1


def test_elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "_ROLLUP", tmp_path / "missing")
    result = run(main, [])
    assert result.exit_code == 2
    assert "runs on Linux" in result.output
