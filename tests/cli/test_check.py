"""`check`: how well a head fits a model, and mistakes in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from tests.cli.conftest import Run
from tests.heads import save_head, tiny_config, tiny_net
from tests.tiny import tiny_model


@pytest.fixture
def head(tiny: Path, tmp_path: Path) -> Path:
    model = AutoModelForCausalLM.from_pretrained(tiny)
    save_head(tmp_path / "head", tiny_net(tiny_config(model.config.vocab_size), model))
    return tmp_path / "head"


def test_a_record_is_kept(run: Run, tiny: Path, head: Path, tmp_path: Path) -> None:
    """With it, another model of the same sizes is refused."""
    before = (head / "config.json").read_text()
    shown = run.done("check", head, "-m", tiny)
    assert "% of the model's most probable tokens" in shown.stdout
    assert (head / "config.json").read_text() == before
    kept = run.done("check", head, "-m", tiny, "--record")
    assert str(head / "config.json") in kept.stdout
    assert "probe" in json.loads((head / "config.json").read_text())["tokenleap"]
    assert run("check", head, "-m", tiny).stdout == shown.stdout
    model = AutoModelForCausalLM.from_pretrained(tiny)
    sizes = {"vocab_size": model.config.vocab_size, "num_hidden_layers": 2}
    other = tiny_model(seed=1, **sizes)
    other.save_pretrained(tmp_path / "other")
    for file in tiny.glob("*token*"):
        (tmp_path / "other" / file.name).write_bytes(file.read_bytes())
    assert "this is another model" in run.refused("check", head, "-m", tmp_path / "other")


def test_mistakes(run: Run, tiny: Path, tmp_path: Path) -> None:
    assert "there is no folder" in run.refused("check", tmp_path / "none", "-m", tiny)
