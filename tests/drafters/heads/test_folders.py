"""Folders of trained heads: what is written is read, and what does not fit is refused in a line."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from tests.drafters.heads.folders import (
    FAULTS as FOLDER_FAULTS,
)
from tests.drafters.heads.folders import (
    Damage,
    Fault,
    assert_drafts,
    assert_refused,
    change_config,
    change_inside,
    config,
    layer,
    load_head,
    tensors,
    text,
    truncate,
    without,
)
from tests.heads import STATE_NETS, parallel_config, state_config, state_net, tiny_config, tiny_net
from tests.tiny import VOCAB_SIZE, tiny_model
from tokenleap import LLM, CompatibilityError, ConfigError, SamplingParams, TokenleapError
from tokenleap.core.files import FIRST_NAME
from tokenleap.drafters.heads.eagle_net import EagleNet
from tokenleap.drafters.heads.folder import Verifier
from tokenleap.drafters.heads.layouts import EagleFolder, HeadFolder, StateFolder, write_head
from tokenleap.drafters.heads.state_net import StateNet
from tokenleap.runtime.target import vocabulary_weights

STATE = list(STATE_NETS)
METHODS = ["eagle", "parallel", *STATE]
VERIFIER = Verifier("tiny", ("LlamaForCausalLM",), 2)
LINE = SamplingParams(temperature=0, max_tokens=6)


def net_of(method: str, **fields: Any) -> EagleNet | StateNet:
    if method in STATE:
        return state_net(method, state_config(method, **fields), tiny_model())
    kind = parallel_config if method == "parallel" else tiny_config
    return tiny_net(kind(**fields), tiny_model())


def written(method: str, folder: Path, **fields: Any) -> Path:
    write_head(folder, net_of(method, **fields), VERIFIER, {"seed": 3})
    return folder


@pytest.fixture
def eagle(tmp_path: Path) -> Path:
    return written("eagle", tmp_path / "head")


def fields_of(folder: Path) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return fields


@pytest.mark.parametrize(
    ("method", "fields"),
    [*((method, {}) for method in METHODS), *((method, {"own_rows": True}) for method in STATE)],
)
def test_what_is_written_is_read(method: str, fields: dict[str, Any], tmp_path: Path) -> None:
    folder, net = written(method, tmp_path / "head", **fields), net_of(method, **fields)
    found = HeadFolder.read(folder, method)
    assert (found.config, found.verifier, found.notes) == (net.config, VERIFIER, {"seed": 3})
    assert found.draft_tokens.tolist() == list(range(0, 96, 2))
    wanted = {name: x for name, x in net.state_dict().items() if name not in ("d2t", "t2d")}
    assert found.tensors.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found.tensors[name], tensor.bfloat16())
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    for name in {"d2t", "t2d"} & net.state_dict().keys():  # for other programs
        assert torch.equal(load_file(folder / "model.safetensors")[name], net.state_dict()[name])
    assert any(name.startswith("lm_heads") for name in wanted) == bool(fields)


def test_the_configuration_of_heads_without_attention_is_plain(tmp_path: Path) -> None:
    """Other programs can rely on these fields."""
    assert fields_of(written("medusa", tmp_path)) == {
        "model_type": "tokenleap_head",
        "method": "medusa",
        "config": asdict(state_config("medusa")),
        "tokenleap": {
            "seed": 3,
            "verifier": {"name_or_path": "tiny", "architectures": ["LlamaForCausalLM"]},
            "verifier_layers": 2,
        },
    }


def test_other_programs_tell_a_parallel_head(tmp_path: Path) -> None:
    fields = fields_of(written("parallel", tmp_path))
    assert fields["speculators_model_type"] == fields["speculators_config"]["algorithm"] == "peagle"
    assert fields["mask_token_id"] == VOCAB_SIZE - 1
    assert fields["transformer_layer_config"]["num_hidden_layers"] == 2


def test_other_fields_of_the_configuration_are_ignored(tmp_path: Path) -> None:
    folder = written("medusa", tmp_path)
    change_inside(folder, "config", comment="x")
    load_head(folder, "medusa")


@pytest.mark.parametrize("method", STATE)
def test_a_folder_with_the_projects_first_name(method: str, tmp_path: Path) -> None:
    now = StateFolder.read(written(method, tmp_path), method)
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace("tokenleap", FIRST_NAME))
    assert fields_of(tmp_path)["model_type"] == f"{FIRST_NAME}_head"
    then = StateFolder.read(tmp_path, method)
    assert (then.config, then.verifier, then.notes) == (now.config, now.verifier, now.notes)


def test_files_of_older_versions_are_read(eagle: Path) -> None:
    """Without the fields of EAGLE-3.1, and with the rotation beside its scaling."""
    fields = fields_of(eagle)
    for name in ("fc_norm", "norm_output", "norm_before_fc", "embed_requires_grad"):
        del fields[name]
    del fields["transformer_layer_config"]["rope_parameters"]
    text(json.dumps({**fields, "speculators_version": "0.3.0"}))(eagle)
    scaling = {"rope_type": "linear", "factor": 2.0}
    layer(rope_theta=500.0, rope_scaling=scaling)(eagle)
    rotation = {**scaling, "rope_theta": 500.0}
    expected = tiny_config(fc_norm=False, norm_output=False, rope_parameters=rotation)
    assert EagleFolder.read(eagle, "eagle").config == expected


# What of the target's a file may hold


VOCABULARY = {"embed_tokens.weight": (96, 64), "lm_head.weight": (48, 64)}


@pytest.mark.parametrize("name", VOCABULARY)
def test_a_head_s_own_embedding_and_rows_count(eagle: Path, name: str) -> None:
    own = torch.randn(VOCABULARY[name])
    tensors({name: own})(eagle)
    model = tiny_model()
    theirs = tiny_net(tiny_config(), model)
    net = EagleFolder.read(eagle, "eagle").net(*weights_of(model))
    for key, found, shared in (
        ("embed_tokens.weight", net.embedding, theirs.embedding),
        ("lm_head.weight", net.head, theirs.head),
    ):
        assert torch.equal(found, own if key == name else shared)
    assert_drafts(eagle, "eagle", [1, 2, 3])


def test_the_target_s_are_shared_where_they_are_the_same(eagle: Path) -> None:
    """Also if the file holds them in fewer bits."""
    embedding, rows = weights_of(tiny_model())
    same = {"embed_tokens.weight": embedding.bfloat16(), "lm_head.weight": rows[::2].bfloat16()}
    tensors(same)(eagle)
    net = EagleFolder.read(eagle, "eagle").net(embedding, rows)
    assert net.embedding.data_ptr() == embedding.data_ptr()
    assert torch.equal(net.head, rows[::2])


def weights_of(model: PreTrainedModel) -> tuple[Tensor, Tensor]:
    weights = vocabulary_weights(model)
    assert weights is not None
    return weights


def test_what_is_computed_from_the_target_is_not_read(eagle: Path) -> None:
    tensors({"verifier_lm_head.weight": torch.full((48, 64), torch.nan)})(eagle)
    load_head(eagle, "eagle")


def test_without_a_map_the_draft_vocabulary_is_the_target_s(tmp_path: Path) -> None:
    written("eagle", tmp_path, draft_vocab_size=96)
    without("d2t", "t2d")(tmp_path)
    assert EagleFolder.read(tmp_path, "eagle").draft_tokens.tolist() == list(range(96))
    load_head(tmp_path, "eagle")


def test_the_output_rows_must_be_in_memory(tmp_path: Path) -> None:
    """A head may be named for a single request; the rows of untied models are gone by then."""
    request = {"method": "medusa", "model": str(written("medusa", tmp_path))}
    llm = LLM(tiny_model(tie_word_embeddings=False))
    with pytest.raises(CompatibilityError, match="not in memory"):
        llm.generate([[1, 2]], LINE, speculative_config=request)
    LLM(tiny_model(tie_word_embeddings=True)).generate([[1, 2]], LINE, speculative_config=request)


# What is refused


def sizes(**fields: Any) -> Damage:
    return lambda folder: change_inside(folder, "config", **fields)


def proposals(*tokens: Any) -> Damage:
    methods = [{"speculative_tokens": each} for each in tokens]
    verifier = {"name_or_path": "tiny", "architectures": []}
    return config(speculators_config={"verifier": verifier, "proposal_methods": methods})


NAN = torch.full((64,), torch.nan)
WEIGHT = "blocks.0.layers.0.weight"
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
FAULTS: dict[str, dict[str, Fault]] = {
    "eagle": {
        **FOLDER_FAULTS,
        "another kind": (config(speculators_model_type="dflash"), "'dflash'"),
        "a language model": (config(speculators_model_type=None), "None"),
        "no layer": (config(transformer_layer_config={}), "hidden_size: .*required"),
        "no layer ids": (config(eagle_aux_hidden_state_layer_ids=None), LAYER_IDS),
        "a negative layer id": (
            config(eagle_aux_hidden_state_layer_ids=[0, -1]),
            f"{LAYER_IDS}.1: input should be greater than or equal to 0",
        ),
        "too many layer ids": (
            config(eagle_aux_hidden_state_layer_ids=[0] * 65),
            f"{LAYER_IDS}: .* at most 64 items",
        ),
        "bytes of a kind of their own": (
            tensors({"norm.weight": torch.zeros(64, dtype=torch.float8_e4m3fn)}),
            "'norm.weight' is torch.float8_e4m3fn",
        ),
        "whole numbers": (
            tensors({"norm.weight": torch.zeros(64, dtype=torch.int32)}),
            "'norm.weight' is torch.int32",
        ),
        "a map that overflows": (
            tensors({"d2t": torch.tensor([0, 2**62, -(2**63), -(2**62), *range(44)])}),
            "'d2t' does not map 48 draft tokens to ascending",
        ),
        "no verifier": (config(speculators_config=3), "speculators_config"),
        "notes of another kind": (config(tokenleap="x"), "tokenleap"),
        "no tokens": (config(draft_vocab_size=0), "draft_vocab_size"),
        "a size in words": (layer(hidden_size="x"), "hidden_size: .*integer"),
        "a size of 0": (layer(num_attention_heads=0), "num_attention_heads"),
        "an infinite number": (layer(rms_norm_eps=1e999), "rms_norm_eps"),
        "another activation": (layer(hidden_act="gelu"), "hidden_act"),
        "two layers": (layer(num_hidden_layers=2), "num_hidden_layers"),
        "an unknown rotation": (layer(rope_parameters={"rope_type": "dynamic"}), "rope_type"),
        "a partial rotation": (
            layer(rope_parameters={"partial_rotary_factor": 0.5}),
            "partial_rotary_factor",
        ),
        "rotations for each type of layer": (
            layer(rope_parameters={"sliding_attention": {"rope_theta": 5.0}}),
            "rope_parameters.sliding_attention",
        ),
        "a sliding window": (
            layer(layer_types=["sliding_attention"], sliding_window=8),
            "layer_types.0: input should be 'full_attention'",
        ),
        "key heads that do not divide": (
            layer(num_attention_heads=3, num_key_value_heads=2),
            "not a multiple",
        ),
        "a missing tensor": (without("fc.weight"), "'fc.weight' is missing"),
        "a foreign tensor": (tensors({"x": torch.zeros(1)}), "'x' is not part of"),
        "a wrong shape": (tensors({"norm.weight": torch.zeros(3)}), "'norm.weight' has shape .3."),
        "a NaN": (tensors({"norm.weight": NAN}), "'norm.weight' has numbers that are not finite"),
        "own rows of a wrong shape": (
            tensors({"lm_head.weight": torch.zeros(96, 64)}),
            r"'lm_head.weight' has shape \[96, 64\]",
        ),
        "own rows with a NaN": (
            tensors({"lm_head.weight": NAN.repeat(48, 1)}),
            "'lm_head.weight' has numbers that are not finite",
        ),
    },
    "parallel": {
        "truncated": (truncate, "cannot be read"),
        "a head of another kind": (
            config(speculators_model_type="eagle3"),
            "'eagle3', and method 'parallel' needs 'peagle': .* P-EAGLE head",
        ),
        "no mask token": (config(mask_token_id=None), "mask_token_id: .*integer"),
        "a mask token outside": (
            config(mask_token_id=96),
            r"mask_token_id \(96\) is not below vocab_size \(96\)",
        ),
        "no depths": (proposals(), "proposal_methods"),
        "zero depths": (
            proposals(0),
            "proposal_methods.0.speculative_tokens: .*greater than 0",
        ),
        "no layers": (layer(num_hidden_layers=0), "num_hidden_layers"),
        "a layer less": (layer(num_hidden_layers=1), r"'layers.1.\S+' is not part of"),
        "a layer more": (layer(num_hidden_layers=3), r"'layers.2.\S+' is missing"),
        "no mask": (without("mask_hidden"), "'mask_hidden' is missing"),
        "a mask of another size": (
            tensors({"mask_hidden": torch.zeros(1, 1, 64)}),
            r"'mask_hidden' has shape \[1, 1, 64\], and config.json says \[1, 1, 192\]",
        ),
    },
    "medusa": {
        **FOLDER_FAULTS,
        "deep JSON": (text("[" * 200000), "cannot be read"),
        "another model": (config(model_type="llama"), "does not describe a head"),
        "another method": (config(method="hydra"), "of method 'hydra'"),
        "no method": (config(method=None), "of method None"),
        "no sizes": (config(config=None), "config.json: "),
        "no hidden size": (config(config={"vocab_size": 96}), "hidden_size: field required"),
        "no heads": (sizes(num_heads=0), "num_heads: .*greater than 0"),
        "a size in words": (sizes(num_heads="many"), "num_heads: .*integer"),
        "a large draft vocabulary": (sizes(draft_vocab_size=97), "above the"),
        "no notes": (config(tokenleap=None), "config.json: "),
        "no verifier": (config(tokenleap={}), "verifier: field required"),
        "more heads than tensors": (sizes(num_heads=5), "blocks.4.*is missing"),
        "fewer heads than tensors": (sizes(num_heads=3), "blocks.3.*not part of"),
        "a missing tensor": (without(WEIGHT), f"'{WEIGHT}' is missing"),
        "a foreign tensor": (
            tensors({"x": torch.zeros(1)}),
            "'x' is not part of a head of method 'medusa'",
        ),
        "a wrong shape": (tensors({WEIGHT: torch.zeros(3)}), r"has shape \[3\]"),
        "a NaN": (tensors({WEIGHT: NAN.repeat(64, 1)}), "numbers that are not finite"),
    },
}


@pytest.mark.parametrize(
    ("method", "fault"), [(method, name) for method, faults in FAULTS.items() for name in faults]
)
def test_faults_are_refused(method: str, fault: str, tmp_path: Path) -> None:
    folder = written(method, tmp_path / "head")
    assert_refused(folder, FAULTS[method][fault], partial(load_head, method=method))


@pytest.mark.parametrize(
    "other", [{"num_hidden_layers": 3}, {"vocab_size": 100}, {"hidden_size": 128}], ids=str
)
@pytest.mark.parametrize("method", METHODS)
def test_another_target_is_refused(method: str, other: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(CompatibilityError, match="trained for tiny with"):
        load_head(written(method, tmp_path), method, **other)


def test_a_head_for_a_model_without_a_name(eagle: Path) -> None:
    nameless: dict[str, Any] = {"verifier": {"name_or_path": None, "architectures": []}}
    change_config(eagle, speculators_config=nameless)
    load_head(eagle, "eagle")
    with pytest.raises(CompatibilityError, match="trained for another model with"):
        load_head(eagle, "eagle", vocab_size=100)


def test_layers_that_the_target_does_not_have_are_refused(eagle: Path) -> None:
    change_config(eagle, eagle_aux_hidden_state_layer_ids=[0, 1, 9])
    with pytest.raises(CompatibilityError, match="layer 9"):
        load_head(eagle, "eagle")


@pytest.mark.parametrize(
    ("method", "other", "message"),
    [
        ("eagle", "parallel", "'eagle3', and method 'parallel' needs 'peagle'"),
        ("parallel", "eagle", "'peagle', and method 'eagle' needs 'eagle3'"),
        ("medusa", "eagle", "eagle3"),
        ("hydra", "medusa", "of method 'hydra', not 'medusa'"),
        ("blockwise", "hydra", "of method 'blockwise', not 'hydra'"),
        ("mlp_speculator", "blockwise", "of method 'mlp_speculator', not 'blockwise'"),
    ],
)
def test_a_head_of_another_method(method: str, other: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(TokenleapError, match=message):
        load_head(written(method, tmp_path), other)


@pytest.mark.parametrize("model", [None, 3, tiny_model()], ids=["nothing", "a number", "a module"])
@pytest.mark.parametrize("method", ["eagle", "medusa"])
def test_a_head_is_given_by_its_folder(method: str, model: Any) -> None:
    with pytest.raises(ConfigError, match="needs a trained head"):
        LLM(tiny_model(), speculative_config={"method": method, "model": model})


def test_there_is_a_folder(tmp_path: Path) -> None:
    with pytest.raises(TokenleapError, match="there is no folder"):
        load_head(tmp_path / "nowhere", "medusa")


@pytest.mark.parametrize("method", ["eagle", "medusa"])
def test_a_folder_that_cannot_be_written(method: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TokenleapError, match="cannot be written"):
        written(method, tmp_path / "file" / "head")
