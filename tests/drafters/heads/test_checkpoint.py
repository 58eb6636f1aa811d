"""Folders of trained heads: what is written is read, and what does not fit is refused in a line."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.drafters.heads.folders import FAULTS as FOLDER_FAULTS
from tests.drafters.heads.folders import (
    Fault,
    assert_refused,
    change_config,
    change_inside,
    change_tensors,
    load_head,
)
from tests.heads import save_head, tiny_config, tiny_net
from tests.tiny import tiny_model
from tokenleap import LLM, CompatibilityError, ConfigError, SamplingParams, TokenleapError
from tokenleap.drafters.heads.layouts import EagleFolder, Verifier, write_head
from tokenleap.runtime.target import vocabulary_weights

LINE = SamplingParams(temperature=0, max_tokens=6)


VERIFIER = Verifier("tiny", ("LlamaForCausalLM",), 2)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "head"
    net = tiny_net(tiny_config(), tiny_model())
    write_head(path, net, VERIFIER, {"seed": 3})
    return path


load = partial(load_head, method="eagle")


def test_what_is_written_is_read(folder: Path) -> None:
    net = tiny_net(tiny_config(), tiny_model())
    found = EagleFolder.read(folder, "eagle")
    assert (found.config, found.verifier, found.notes) == (net.config, VERIFIER, {"seed": 3})
    for name, tensor in net.state_dict().items():
        expected = tensor.bfloat16() if tensor.is_floating_point() else tensor
        assert torch.equal(found.tensors[name], expected)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]


def test_it_drafts(folder: Path) -> None:
    (output,) = load(folder).generate([[1, 2, 3]], LINE, speculative_config=None)
    (plain,) = LLM(tiny_model()).generate([[1, 2, 3]], LINE)
    assert output.token_ids == plain.token_ids


def test_files_of_older_versions_are_read(folder: Path) -> None:
    """Without the fields of EAGLE-3.1, and with the rotation beside its scaling."""
    path = folder / "config.json"
    fields = json.loads(path.read_text())
    for name in ("fc_norm", "norm_output", "norm_before_fc", "embed_requires_grad"):
        del fields[name]
    del fields["transformer_layer_config"]["rope_parameters"]
    path.write_text(json.dumps({**fields, "speculators_version": "0.3.0"}))
    scaling = {"rope_type": "linear", "factor": 2.0}
    change_layer(folder, rope_theta=500.0, rope_scaling=scaling)
    rotation = {**scaling, "rope_theta": 500.0}
    expected = tiny_config(fc_norm=False, norm_output=False, rope_parameters=rotation)
    assert EagleFolder.read(folder, "eagle").config == expected


VOCABULARY = {"embed_tokens.weight": (96, 64), "lm_head.weight": (48, 64)}


@pytest.mark.parametrize("name", VOCABULARY)
def test_a_head_s_own_embedding_and_rows_count(folder: Path, name: str) -> None:
    own = torch.randn(VOCABULARY[name])
    change_tensors(folder, lambda t: t.update({name: own}))
    model = tiny_model()
    theirs = tiny_net(tiny_config(), model)
    net = EagleFolder.read(folder, "eagle").net(*weights_of(model))
    for key, found, shared in (
        ("embed_tokens.weight", net.embedding, theirs.embedding),
        ("lm_head.weight", net.head, theirs.head),
    ):
        assert torch.equal(found, own if key == name else shared)
    (output,) = load(folder).generate([[1, 2, 3]], LINE)
    assert output.metrics.drafter_failure is None


def test_the_target_s_are_shared_where_they_are_the_same(folder: Path) -> None:
    """Also if the file holds them in fewer bits."""
    model = tiny_model()
    embedding, rows = weights_of(model)
    same = {"embed_tokens.weight": embedding.bfloat16(), "lm_head.weight": rows[::2].bfloat16()}
    change_tensors(folder, lambda t: t.update(same))
    net = EagleFolder.read(folder, "eagle").net(embedding, rows)
    assert net.embedding.data_ptr() == embedding.data_ptr()
    assert torch.equal(net.head, rows[::2])


def weights_of(model: PreTrainedModel) -> tuple[Tensor, Tensor]:
    weights = vocabulary_weights(model)
    assert weights is not None
    return weights


def test_what_is_computed_from_the_target_is_not_read(folder: Path) -> None:
    rows = torch.full((48, 64), torch.nan)
    change_tensors(folder, lambda t: t.update({"verifier_lm_head.weight": rows}))
    load(folder)


def test_a_head_for_a_model_without_a_name(folder: Path) -> None:
    nameless: dict[str, Any] = {"verifier": {"name_or_path": None, "architectures": []}}
    change_config(folder, speculators_config=nameless)
    load(folder)
    with pytest.raises(CompatibilityError, match="trained for another model with"):
        load(folder, vocab_size=100)


def test_without_a_map_the_draft_vocabulary_is_the_target_s(tmp_path: Path) -> None:
    net = tiny_net(tiny_config(draft_vocab_size=96), tiny_model())
    save_head(tmp_path, net)

    def drop_maps(tensors: dict[str, Tensor]) -> None:
        del tensors["d2t"], tensors["t2d"]

    change_tensors(tmp_path, drop_maps)
    assert EagleFolder.read(tmp_path, "eagle").draft_tokens.tolist() == list(range(96))
    load(tmp_path)


def change_layer(folder: Path, **fields: Any) -> None:
    change_inside(folder, "transformer_layer_config", **fields)


FAULTS: dict[str, Fault] = {
    **FOLDER_FAULTS,
    "another kind": (lambda f: change_config(f, speculators_model_type="dflash"), "'dflash'"),
    "a language model": (lambda f: change_config(f, speculators_model_type=None), "None"),
    "no layer": (
        lambda f: change_config(f, transformer_layer_config={}),
        "hidden_size: .*required",
    ),
    "no layer ids": (
        lambda f: change_config(f, eagle_aux_hidden_state_layer_ids=None),
        "eagle_aux_hidden_state_layer_ids",
    ),
    "a negative layer id": (
        lambda f: change_config(f, eagle_aux_hidden_state_layer_ids=[0, -1]),
        "eagle_aux_hidden_state_layer_ids.1: input should be greater than or equal to 0",
    ),
    "no verifier": (lambda f: change_config(f, speculators_config=3), "speculators_config"),
    "notes of another kind": (lambda f: change_config(f, tokenleap="x"), "tokenleap"),
    "no tokens": (lambda f: change_config(f, draft_vocab_size=0), "draft_vocab_size"),
    "a size in words": (lambda f: change_layer(f, hidden_size="x"), "hidden_size: .*integer"),
    "a size of 0": (lambda f: change_layer(f, num_attention_heads=0), "num_attention_heads"),
    "an infinite number": (lambda f: change_layer(f, rms_norm_eps=1e999), "rms_norm_eps"),
    "another activation": (lambda f: change_layer(f, hidden_act="gelu"), "hidden_act"),
    "two layers": (lambda f: change_layer(f, num_hidden_layers=2), "num_hidden_layers"),
    "an unknown rotation": (
        lambda f: change_layer(f, rope_parameters={"rope_type": "dynamic"}),
        "rope_type",
    ),
    "a partial rotation": (
        lambda f: change_layer(f, rope_parameters={"partial_rotary_factor": 0.5}),
        "partial_rotary_factor",
    ),
    "rotations for each type of layer": (
        lambda f: change_layer(f, rope_parameters={"sliding_attention": {"rope_theta": 5.0}}),
        "rope_parameters.sliding_attention",
    ),
    "a sliding window": (
        lambda f: change_layer(f, layer_types=["sliding_attention"], sliding_window=8),
        "layer_types.0: input should be 'full_attention'",
    ),
    "key heads that do not divide": (
        lambda f: change_layer(f, num_attention_heads=3, num_key_value_heads=2),
        "not a multiple",
    ),
    "a missing tensor": (
        lambda f: change_tensors(f, lambda t: t.pop("fc.weight")),
        "'fc.weight' is missing",
    ),
    "a foreign tensor": (
        lambda f: change_tensors(f, lambda t: t.update(x=torch.zeros(1))),
        "'x' is not part of",
    ),
    "a wrong shape": (
        lambda f: change_tensors(f, lambda t: t.update({"norm.weight": torch.zeros(3)})),
        r"'norm.weight' has shape \[3\]",
    ),
    "a NaN": (
        lambda f: change_tensors(
            f, lambda t: t.update({"norm.weight": torch.full((64,), torch.nan)})
        ),
        "'norm.weight' has numbers that are not finite",
    ),
    "own rows of a wrong shape": (
        lambda f: change_tensors(f, lambda t: t.update({"lm_head.weight": torch.zeros(96, 64)})),
        r"'lm_head.weight' has shape \[96, 64\]",
    ),
    "own rows with a NaN": (
        lambda f: change_tensors(
            f, lambda t: t.update({"lm_head.weight": torch.full((48, 64), torch.nan)})
        ),
        "'lm_head.weight' has numbers that are not finite",
    ),
    "a map of negative tokens": (
        lambda f: change_tensors(f, lambda t: t.update(d2t=t["d2t"] - 5)),
        "ascending",
    ),
    "a map of fractions": (
        lambda f: change_tensors(f, lambda t: t.update(d2t=t["d2t"].float())),
        "ascending",
    ),
    "a square map": (
        lambda f: change_tensors(f, lambda t: t.update(d2t=t["d2t"].view(6, 8))),
        "ascending",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_refused(folder: Path, fault: str) -> None:
    assert_refused(folder, FAULTS[fault], load)


@pytest.mark.parametrize(
    "other", [{"num_hidden_layers": 3}, {"vocab_size": 100}, {"hidden_size": 128}], ids=str
)
def test_another_target_is_refused(folder: Path, other: dict[str, Any]) -> None:
    with pytest.raises(CompatibilityError, match="trained for tiny"):
        load(folder, **other)


def test_layers_that_the_target_does_not_have_are_refused(folder: Path) -> None:
    change_config(folder, eagle_aux_hidden_state_layer_ids=[0, 1, 9])
    with pytest.raises(CompatibilityError, match="layer 9"):
        load(folder)


@pytest.mark.parametrize("model", [None, 3, tiny_model()], ids=["nothing", "a number", "a module"])
def test_a_head_is_given_by_its_folder(model: Any) -> None:
    with pytest.raises(ConfigError, match="needs a trained head"):
        LLM(tiny_model(), speculative_config={"method": "eagle", "model": model})


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TokenleapError, match="cannot be written"):
        save_head(tmp_path / "file" / "head", tiny_net(tiny_config(), tiny_model()))
