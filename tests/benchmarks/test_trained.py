from __future__ import annotations

import json
from pathlib import Path

from benchmarks.trained import METHODS, main

from tests.benchmarks.program import run
from tests.cli.conftest import save_tiny
from tokenleap.training.method import TRAINABLE


def test_methods_learn_from_the_same_text_and_are_trained_once(tmp_path: Path) -> None:
    model, out, file = save_tiny(tmp_path / "target"), tmp_path / "out", tmp_path / "texts.jsonl"
    file.write_text("\n".join(json.dumps({"text": f"{n} is a number"}) for n in range(40)))
    given = ["--model", str(model), "--out", str(out), "--dtype", "float32", "--epochs", "0.1"]
    given += ["--tokens", "300", "--held-out-tokens", "15", "--file", str(file)]
    given += ["--method", "medusa", "--method", "early_exit"]
    result = run(main, given)
    assert result.exit_code == 0, result.output
    first, second = (out / name / "training/data/train.jsonl" for name in ("medusa", "early_exit"))
    assert first.read_bytes() == second.read_bytes() != b""
    found = json.loads((out / "trained.json").read_text())
    assert list(found) == ["medusa", "early_exit"]
    assert found["early_exit"]["perplexity"]["new"] > 1  # the new model is measured, too

    once = result.stdout
    assert run(main, given).stdout == once  # no clock was asked again
    assert "`medusa`" in once
    assert "`early_exit`" in once


def test_methods_for_encoder_decoders_are_left_out() -> None:
    assert set(TRAINABLE) - set(METHODS) == {"spec_drafter"}


def test_unknown_methods_are_refused(tmp_path: Path) -> None:
    result = run(main, ["--out", str(tmp_path), "--method", "nothing"])
    assert result.exit_code == 2
    assert "there is no 'nothing' here" in result.output
