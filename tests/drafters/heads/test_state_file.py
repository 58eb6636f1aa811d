"""Folders of heads without attention: what is written is read, and what does not fit is refused."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.drafters.heads.folders import FAULTS as FOLDER_FAULTS
from tests.drafters.heads.folders import (
    Fault,
    assert_refused,
    change_config,
    change_inside,
    change_tensors,
    load_head,
)
from tests.heads import STATE_NETS, save_state_head, state_config, state_net
from tests.tiny import tiny_model
from tokenleap import LLM, CompatibilityError, ConfigError, SamplingParams, TokenleapError
from tokenleap.core.files import FIRST_NAME
from tokenleap.drafters.heads.folder import Verifier
from tokenleap.drafters.heads.layouts import StateFolder, write_head

METHODS = list(STATE_NETS)
VERIFIER = Verifier("tiny", ("LlamaForCausalLM",), 2)
LINE = SamplingParams(temperature=0, max_tokens=6)


def written(method: str, folder: Path, **fields: Any) -> Path:
    net = state_net(method, state_config(method, **fields), tiny_model())
    write_head(folder, net, VERIFIER, {"seed": 3})
    return folder


load = partial(load_head, method="medusa")


@pytest.mark.parametrize("own_rows", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_what_is_written_is_read(method: str, own_rows: bool, tmp_path: Path) -> None:
    folder = written(method, tmp_path / "head", own_rows=own_rows)
    net = state_net(method, state_config(method, own_rows=own_rows), tiny_model())
    found = StateFolder.read(folder, method)
    assert (found.config, found.verifier, found.notes) == (net.config, VERIFIER, {"seed": 3})
    assert found.draft_tokens.tolist() == list(range(0, 96, 2))
    wanted = net.wanted()
    assert found.tensors.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found.tensors[name], tensor.bfloat16())
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert any(name.startswith("lm_heads") for name in wanted) == own_rows


@pytest.mark.parametrize("method", METHODS)
def test_a_folder_with_the_projects_first_name(method: str, tmp_path: Path) -> None:
    now = StateFolder.read(written(method, tmp_path / "head"), method)
    config = tmp_path / "head" / "config.json"
    config.write_text(config.read_text().replace("tokenleap", FIRST_NAME))
    assert json.loads(config.read_text())["model_type"] == f"{FIRST_NAME}_head"
    then = StateFolder.read(tmp_path / "head", method)
    assert (then.config, then.verifier, then.notes) == (now.config, now.verifier, now.notes)


@pytest.mark.parametrize("method", METHODS)
def test_it_drafts(method: str, tmp_path: Path) -> None:
    (output,) = load_head(written(method, tmp_path), method).generate([[1, 2, 3]], LINE)
    (plain,) = LLM(tiny_model()).generate([[1, 2, 3]], LINE)
    assert output.token_ids == plain.token_ids
    assert output.metrics.drafter_failure is None


def test_other_fields_of_the_configuration_are_ignored(tmp_path: Path) -> None:
    folder = written("medusa", tmp_path)
    change_sizes(folder, comment="x")
    load(folder)


def change_sizes(folder: Path, **fields: Any) -> None:
    change_inside(folder, "config", **fields)


WEIGHT = "blocks.0.layers.0.weight"
FAULTS: dict[str, Fault] = {
    **FOLDER_FAULTS,
    "deep JSON": (lambda f: (f / "config.json").write_text("[" * 200000), "cannot be read"),
    "another model": (lambda f: change_config(f, model_type="llama"), "does not describe a head"),
    "another method": (lambda f: change_config(f, method="hydra"), "of method 'hydra'"),
    "no method": (lambda f: change_config(f, method=None), "of method None"),
    "no sizes": (lambda f: change_config(f, config=None), "config.json: "),
    "no hidden size": (
        lambda f: change_config(f, config={"vocab_size": 96}),
        "hidden_size: field required",
    ),
    "no heads": (lambda f: change_sizes(f, num_heads=0), "num_heads: .*greater than 0"),
    "a size in words": (lambda f: change_sizes(f, num_heads="many"), "num_heads: .*integer"),
    "a large draft vocabulary": (lambda f: change_sizes(f, draft_vocab_size=97), "above the"),
    "no notes": (lambda f: change_config(f, tokenleap=None), "config.json: "),
    "no verifier": (lambda f: change_config(f, tokenleap={}), "verifier: field required"),
    "more heads than tensors": (lambda f: change_sizes(f, num_heads=5), "blocks.4.*is missing"),
    "fewer heads than tensors": (lambda f: change_sizes(f, num_heads=3), "blocks.3.*not part of"),
    "a missing tensor": (
        lambda f: change_tensors(f, lambda t: t.pop(WEIGHT)),
        f"'{WEIGHT}' is missing",
    ),
    "a foreign tensor": (
        lambda f: change_tensors(f, lambda t: t.update(x=torch.zeros(1))),
        "'x' is not part of a head of method 'medusa'",
    ),
    "a wrong shape": (
        lambda f: change_tensors(f, lambda t: t.update({WEIGHT: torch.zeros(3)})),
        r"has shape \[3\]",
    ),
    "a NaN": (
        lambda f: change_tensors(f, lambda t: t.update({WEIGHT: torch.full((64, 64), torch.nan)})),
        "numbers that are not finite",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_refused(fault: str, tmp_path: Path) -> None:
    assert_refused(written("medusa", tmp_path / "head"), FAULTS[fault], load)


@pytest.mark.parametrize(
    "other", [{"num_hidden_layers": 3}, {"vocab_size": 100}, {"hidden_size": 128}], ids=str
)
@pytest.mark.parametrize("method", METHODS)
def test_another_target_is_refused(method: str, other: dict[str, Any], tmp_path: Path) -> None:
    folder = written(method, tmp_path)
    with pytest.raises(CompatibilityError, match="trained for tiny"):
        load_head(folder, method, **other)


@pytest.mark.parametrize("method", METHODS)
def test_a_head_of_another_method_is_refused(method: str, tmp_path: Path) -> None:
    other = METHODS[METHODS.index(method) - 1]
    if other == method:
        other = "eagle"
    with pytest.raises(TokenleapError, match=f"{method}|eagle3"):
        load_head(written(method, tmp_path), other)


def test_there_is_a_folder(tmp_path: Path) -> None:
    with pytest.raises(TokenleapError, match="there is no folder"):
        load(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="needs a trained head"):
        LLM(tiny_model(), speculative_config={"method": "medusa"})


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    net = state_net("medusa", state_config("medusa"))
    with pytest.raises(TokenleapError, match="cannot be written"):
        save_state_head(tmp_path / "file" / "head", net)


def test_the_output_rows_must_be_in_memory(tmp_path: Path) -> None:
    """A head may be named for a single request; the rows of untied models are gone by then."""
    folder = written("medusa", tmp_path)
    request = {"method": "medusa", "model": str(folder)}
    llm = LLM(tiny_model(tie_word_embeddings=False))
    with pytest.raises(CompatibilityError, match="not in memory"):
        llm.generate([[1, 2]], LINE, speculative_config=request)
    LLM(tiny_model(tie_word_embeddings=True)).generate([[1, 2]], LINE, speculative_config=request)


def test_the_configuration_is_plain(tmp_path: Path) -> None:
    """Other programs can rely on these fields."""
    fields = json.loads((written("medusa", tmp_path) / "config.json").read_text())
    assert fields == {
        "model_type": "tokenleap_head",
        "method": "medusa",
        "config": asdict(state_config("medusa")),
        "tokenleap": {
            "seed": 3,
            "verifier": {"name_or_path": "tiny", "architectures": ["LlamaForCausalLM"]},
            "verifier_layers": 2,
        },
    }
