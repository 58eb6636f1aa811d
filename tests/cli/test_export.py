"""`export` and `check`: a head with the target's embedding and output rows; how well one fits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.cli.conftest import Run
from tests.heads import save_head, state_config, state_net, tiny_config, tiny_net
from tests.tiny import tiny_model
from tokenleap.drafters.heads.folder import Verifier
from tokenleap.drafters.heads.layouts import write_head


@pytest.fixture
def model(tiny: Path) -> PreTrainedModel:
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(tiny)
    return loaded


@pytest.fixture
def head(model: PreTrainedModel, tmp_path: Path) -> Path:
    """One that can draft every second of the tiny model's tokens."""
    net = tiny_net(tiny_config(model.config.vocab_size), model)
    verifier = Verifier("some/model", ("LlamaForCausalLM",), 2)
    write_head(tmp_path / "head", net, verifier, {"seed": 3})
    return tmp_path / "head"


def contents(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


@pytest.mark.parametrize("name", [None, "some/other-model"])
def test_the_head_with_the_model_s_rows(
    run: Run, tiny: Path, head: Path, model: PreTrainedModel, name: str | None, tmp_path: Path
) -> None:
    more = [] if name is None else ["--verifier", name]
    result = run.done("export", head, "--out", tmp_path / "out", "-m", tiny, *more)
    assert str(tmp_path / "out") in result.stdout
    (config, tensors), (given, kept) = contents(tmp_path / "out"), contents(head)
    given["speculators_config"]["verifier"]["name_or_path"] = name or str(tiny)
    assert config == given
    weights = model.state_dict()
    tokens = torch.arange(len(kept["d2t"])) + kept["d2t"]
    expected = {
        **kept,
        "embed_tokens.weight": weights["model.embed_tokens.weight"].bfloat16(),
        "lm_head.weight": weights["lm_head.weight"][tokens].bfloat16(),
    }
    assert tensors.keys() == expected.keys()
    for key, tensor in tensors.items():
        assert tensor.dtype == expected[key].dtype
        assert torch.equal(tensor, expected[key])


def test_the_copy_drafts_as_the_head_does(run: Run, tiny: Path, head: Path, tmp_path: Path) -> None:
    assert run("export", head, "-o", tmp_path / "out", "-m", tiny).exit_code == 0
    drafted = [
        steps(run, tiny, folder, tmp_path / "trace.json") for folder in (head, tmp_path / "out")
    ]
    assert drafted[0] == drafted[1]
    assert any(drafted[0])


def steps(run: Run, tiny: Path, head: Path, file: Path) -> list[list[int]]:
    call = ["generate", "hello", "-m", tiny, "--method", "eagle", "--draft-model", head]
    config = '{"controller": "fixed"}'
    run.done(
        *call, "--speculative-config", config, "--max-tokens", 12, "--no-chat", "--trace", file
    )
    return [step["drafted"] for step in json.loads(file.read_text())["steps"]]


# Wrong use


def test_a_folder_that_is_not_there(run: Run, tiny: Path, tmp_path: Path) -> None:
    assert f"there is no folder {tmp_path / 'none'}" in run.refused(
        "export", tmp_path / "none", "--out", tmp_path / "out", "-m", tiny
    )


def test_the_folder_of_the_head_itself(run: Run, tiny: Path, head: Path) -> None:
    """Nor is a model overwritten."""
    for to in (head, tiny):
        before = {path: path.read_bytes() for path in to.iterdir() if path.is_file()}
        assert "has a model already: give another folder" in run.refused(
            "export", head, "--out", to / ".." / to.name, "-m", tiny, code=1
        )
        assert {path: path.read_bytes() for path in to.iterdir() if path.is_file()} == before


def test_a_head_of_another_kind(run: Run, tiny: Path, tmp_path: Path) -> None:
    save_head(tmp_path / "medusa", state_net("medusa", state_config("medusa")))
    assert "is this the folder of a trained EAGLE-3 head?" in run.refused(
        "export", tmp_path / "medusa", "--out", tmp_path / "out", "-m", tiny, code=1
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("other", [{"hidden_size": 128}, {"num_hidden_layers": 3}], ids=str)
def test_another_model(run: Run, head: Path, other: dict[str, Any], tmp_path: Path) -> None:
    tiny_model(vocab_size=97, **other).save_pretrained(tmp_path / "other")
    assert "this head was trained for some/model with" in run.refused(
        "export", head, "--out", tmp_path / "out", "-m", tmp_path / "other"
    )
    assert not (tmp_path / "out").exists()


def test_a_place_that_cannot_be_written(run: Run, tiny: Path, head: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "cannot be written" in run.refused(
        "export", head, "--out", tmp_path / "file", "-m", tiny, code=1
    )


# Checking a head


def test_a_record_is_kept(run: Run, tiny: Path, model: PreTrainedModel, tmp_path: Path) -> None:
    """With it, another model of the same sizes is refused."""
    head = tmp_path / "own"
    save_head(head, tiny_net(tiny_config(model.config.vocab_size), model))
    before = (head / "config.json").read_text()
    shown = run.done("check", head, "-m", tiny)
    assert "% of the model's most probable tokens" in shown.stdout
    assert (head / "config.json").read_text() == before
    kept = run.done("check", head, "-m", tiny, "--record")
    assert str(head / "config.json") in kept.stdout
    assert "probe" in json.loads((head / "config.json").read_text())["tokenleap"]
    assert run("check", head, "-m", tiny).stdout == shown.stdout
    sizes = {"vocab_size": model.config.vocab_size, "num_hidden_layers": 2}
    other = tiny_model(seed=1, **sizes)
    other.save_pretrained(tmp_path / "other")
    for file in tiny.glob("*token*"):
        (tmp_path / "other" / file.name).write_bytes(file.read_bytes())
    assert "this is another model" in run.refused("check", head, "-m", tmp_path / "other")


def test_check_without_a_head(run: Run, tiny: Path, tmp_path: Path) -> None:
    assert "there is no folder" in run.refused("check", tmp_path / "none", "-m", tiny)
