"""`demo`: three prompts, twice each, and a table that is true."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Run
from tokenleap import LLM, RequestOutput
from tokenleap.cli.demo import PROMPTS

QUICK = ["--rounds", "1", "--max-tokens", "12"]


def test_on_a_pipe(run: Run, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    result = run.done("demo", "-m", tiny, *QUICK)
    assert result.stderr == ""
    assert "\x1b" not in result.stdout
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    for prompt in PROMPTS:
        (row,) = [line for line in lines if line.startswith(f"{prompt.title} ") and "x" in line]
        assert re.fullmatch(
            rf"{prompt.title} +[\d.]+ ±0.0 +[\d.]+ ±0.0 +[\d.]+x +12 +\d+ +[\d.]+ +yes *", row
        )
    assert result.stdout.count("without speculation\n") == 3


def test_other_bits_are_told_and_are_1(
    run: Run, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate = LLM.generate

    def forged(self: LLM, *arguments: Any, **more: Any) -> list[RequestOutput]:
        outputs = generate(self, *arguments, **more)
        if self.speculative_config.gamma:
            object.__setattr__(outputs[0].outputs[0], "token_ids", (1, 2, 3))
        return outputs

    monkeypatch.setattr(LLM, "generate", forged)
    result = run("demo", "-m", tiny, *QUICK)
    assert result.exit_code == 1
    assert result.stdout.count(" no") >= 3


def test_own_settings(run: Run, tiny: Path) -> None:
    more = ["--method", "ngram_table", "--num-speculative-tokens", "3", "--dtype", "float32"]
    result = run.done("demo", "-m", tiny, *QUICK, *more)
    assert "float32" in result.stdout
    assert "ngram_table drafts up to 3 tokens" in " ".join(result.stdout.split())


def test_without_a_tokenizer(run: Run, tiny: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(tiny / name)
    assert "has no tokenizer" in run.refused("demo", "-m", tmp_path, *QUICK)


@pytest.mark.slow  # `make demo` is the same
@pytest.mark.model
def test_default_model(run: Run) -> None:
    result = run.done("demo", "--rounds", "1", "--max-tokens", "16")
    assert result.stdout.count(" yes") == 3
