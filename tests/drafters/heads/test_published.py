"""Layouts of EAGLE's authors: EAGLE-1 and EAGLE-3 heads as they publish them."""

from __future__ import annotations

import json
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from tests.drafters.heads.folders import (
    Fault,
    assert_drafts,
    assert_refused,
    config,
    deleted,
    load_head,
    without,
)
from tests.heads import feature_config, save_head, tiny_config, tiny_net
from tests.tiny import VOCAB_SIZE, tiny_model
from tokenleap import TokenleapError
from tokenleap.drafters.heads.eagle import export_head
from tokenleap.drafters.heads.eagle_net import EagleConfig, EagleNet, FeatureConfig
from tokenleap.drafters.heads.folder import read_tensors
from tokenleap.drafters.heads.layouts import EagleFolder
from tokenleap.errors import ModelError
from tokenleap.runtime.target import Target, vocabulary_weights

EAGLE1 = feature_config()
EAGLE3 = tiny_config(
    fc_norm=False, norm_output=False, norm_before_residual=False, aux_layers=(0, 1)
)
LAYER = {
    *(f"layers.0.self_attn.{name}_proj.weight" for name in "qkvo"),
    *(f"layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    "layers.0.post_attention_layernorm.weight",
}


def llama_fields(config: EagleConfig) -> dict[str, Any]:
    """As in their repository, with the fields that their classes take as given left out."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "num_hidden_layers": 1,
        "rms_norm_eps": config.rms_norm_eps,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": config.vocab_size,
    }


def published(folder: Path, net: EagleNet, *, pickled: bool = False, **fields: Any) -> Path:
    """A head as its authors publish it, in bfloat16."""
    folder.mkdir()
    tensors = dict(net.state_dict())
    if isinstance(net.config, FeatureConfig):
        del tensors["d2t"], tensors["t2d"]
        tensors["embed_tokens.weight"] = net.embedding
    else:
        tensors = {n.replace("layers.0.", "midlayer."): x for n, x in tensors.items()}
        tensors["lm_head.weight"] = net.head
        if net.config.draft_vocab_size == net.config.vocab_size:
            del tensors["d2t"], tensors["t2d"]
    narrow = {
        name: x.to(torch.bfloat16).contiguous() if x.is_floating_point() else x
        for name, x in tensors.items()
    }
    if pickled:
        old = {"midlayer.self_attn.rotary_emb.inv_freq": torch.ones(16)}
        torch.save({**narrow, **old}, folder / "pytorch_model.bin")
    else:
        save_file(narrow, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**llama_fields(net.config), **fields}))
    return folder


def loaded(folder: Path) -> EagleNet:
    model = tiny_model()
    return EagleFolder.read(folder, "eagle").load(Target(model))


def same(found: EagleNet, expected: EagleNet) -> None:
    assert found.config == expected.config
    for name, tensor in expected.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor.to(torch.bfloat16).to(tensor.dtype))


@pytest.mark.parametrize("pickled", [False, True], ids=["safetensors", "bin"])
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "a bias"])
def test_eagle1(bias: bool, pickled: bool, tmp_path: Path) -> None:
    net = tiny_net(feature_config(fc_bias=bias, max_position_embeddings=2048), tiny_model())
    given = {} if bias else {"bias": False}  # theirs leave it out if there is one
    folder = published(tmp_path / "head", net, pickled=pickled, **given)
    same(loaded(folder), net)
    assert_drafts(folder, "eagle", [1, 2, 3])


class Bomb:
    """A pickle that makes a file when it is loaded."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> Any:
        return Path.touch, (self.place,)


@pytest.mark.parametrize("bare", [False, True], ids=["of PyTorch", "bare"])
@pytest.mark.parametrize("suffix", ["pt", "bin", "safetensors"])
def test_a_pickle_that_runs_code_is_refused(suffix: str, bare: bool, tmp_path: Path) -> None:
    """Under every name that the weights of heads may have."""
    path, proof = tmp_path / f"weights.{suffix}", tmp_path / "it ran"
    if bare:
        path.write_bytes(pickle.dumps({"weight": Bomb(proof)}))
    else:
        torch.save({"weight": Bomb(proof)}, path)
    with pytest.raises(ModelError, match="cannot be read") as caught:
        read_tensors(path)
    assert ("never loaded; save its tensors" in str(caught.value)) == (suffix != "safetensors")
    assert "\n" not in str(caught.value)
    assert not proof.exists()


@pytest.mark.parametrize("pickled", [False, True], ids=["safetensors", "bin"])
@pytest.mark.parametrize("size", [48, VOCAB_SIZE])
def test_eagle3(size: int, pickled: bool, tmp_path: Path) -> None:
    """Without maps where the draft vocabulary is the target's."""
    sizes = {**vars(EAGLE3), "draft_vocab_size": size, "max_position_embeddings": 2048}
    net = tiny_net(EagleConfig(**sizes), tiny_model())
    fields = {} if size == VOCAB_SIZE else {"draft_vocab_size": size}
    folder = published(tmp_path / "head", net, pickled=pickled, **fields)
    same(loaded(folder), net)
    assert_drafts(folder, "eagle", [1, 2, 3])


@pytest.mark.parametrize("inside", [False, True])
def test_named_layers(inside: bool, tmp_path: Path) -> None:
    named: dict[str, Any] = {"eagle_aux_hidden_state_layer_ids": [2, 0]}
    fields = {"eagle_config": named} if inside else named
    net = tiny_net(EAGLE3, tiny_model())
    folder = published(tmp_path / "head", net, draft_vocab_size=48, **fields)
    assert EagleFolder.read(folder, "eagle").config.aux_layers == (2, 0)


def test_old_names_of_scaled_rotations(tmp_path: Path) -> None:
    scaling = {"type": "linear", "factor": 2.0}
    net = tiny_net(EAGLE1, tiny_model())
    folder = published(tmp_path / "head", net, rope_scaling=scaling, rope_theta=500.0)
    found = EagleFolder.read(folder, "eagle").config.rope_parameters
    assert {name: found[name] for name in ("rope_type", "factor", "rope_theta")} == {
        "rope_type": "linear",
        "factor": 2.0,
        "rope_theta": 500.0,
    }


# What we write


def test_an_eagle1_head_is_written_as_they_publish_it(tmp_path: Path) -> None:
    net = tiny_net(EAGLE1, tiny_model())
    save_head(tmp_path, net, seed=3)
    assert load_file(tmp_path / "model.safetensors").keys() == {
        *LAYER,
        "fc.weight",
        "fc.bias",
    }
    fields = json.loads((tmp_path / "config.json").read_text())
    left_out = {"pad_token_id", "use_cache"}
    assert {*llama_fields(EAGLE1)} - {*fields} == left_out
    found = EagleFolder.read(tmp_path, "eagle")
    assert (found.verifier.name_or_path, found.notes) == ("tiny", {"seed": 3})
    same(loaded(tmp_path), net)


def test_an_exported_eagle1_head_has_the_embedding(tmp_path: Path) -> None:
    model = tiny_model()
    weights = vocabulary_weights(model)
    assert weights is not None
    save_head(tmp_path / "head", tiny_net(EAGLE1, model))
    export_head(tmp_path / "head", tmp_path / "out", *weights, 2, "their/name")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert tensors.keys() == {*LAYER, "fc.weight", "fc.bias", "embed_tokens.weight"}
    assert torch.equal(tensors["embed_tokens.weight"], weights[0].to(torch.bfloat16))
    few = feature_config(draft_vocab_size=48)
    save_head(tmp_path / "few", tiny_net(few, model))
    with pytest.raises(TokenleapError, match="draft_vocab_size=null"):
        export_head(tmp_path / "few", tmp_path / "no", *weights, 2, "their/name")


@torch.inference_mode()
def test_the_network_is_a_llama_layer_without_its_first_norm() -> None:
    """Against the layer of Transformers, as EAGLE's authors change it."""
    model = tiny_model()
    net = tiny_net(EAGLE1, model)
    config = LlamaConfig(**llama_fields(EAGLE1))
    config._attn_implementation = "eager"
    layer: Any = LlamaDecoderLayer(config, layer_idx=0)
    layer.input_layernorm = nn.Identity()
    given = {name.removeprefix("layers.0."): x for name, x in net.state_dict().items()}
    layer.load_state_dict(
        {n: x for n, x in given.items() if n.startswith(("self_attn", "mlp", "post"))}
    )
    tokens = torch.randint(0, VOCAB_SIZE, (20,))
    hidden = torch.randn(20, 1, 64)
    body: Any = model.base_model
    features = body.norm(hidden[:, 0])
    x = net.fc(torch.cat([body.embed_tokens(tokens), features], dim=-1))[None]
    positions = torch.arange(20)[None]
    mask = torch.full((20, 20), -torch.inf).triu(1)[None, None]
    expected = layer(x, attention_mask=mask, position_embeddings=net.rotary(x, positions))
    expected = expected[0] if isinstance(expected, tuple) else expected
    outputs, _ = net(tokens[None], net.fuse(hidden[None]), positions, mask == 0)
    logits = model.get_output_embeddings()(outputs)  # type: ignore[no-untyped-call]
    torch.testing.assert_close(net.logits(outputs), logits)
    torch.testing.assert_close(outputs, expected, atol=1e-4, rtol=1e-4)


# Bad input


FAULTS: dict[str, Fault] = {
    "a language model": (config(num_hidden_layers=2), "num_hidden_layers"),
    "another activation": (config(hidden_act="gelu"), "hidden_act"),
    "a size in words": (config(hidden_size="x"), "hidden_size: .*integer"),
    "another vocabulary": (config(vocab_size=100), "vocabulary of 100"),
    "layer ids in words": (
        config(eagle_aux_hidden_state_layer_ids=["x"]),
        "eagle_aux_hidden_state_layer_ids",
    ),
    "notes of another kind": (config(tokenleap="x"), "tokenleap"),
    "no weights": (deleted("model.safetensors"), "pytorch_model.bin does not"),
    "a missing tensor": (without("fc.weight"), "'fc.weight' is missing"),
    "a bias that is not said": (config(bias=False), "'fc.bias' is not part of an EAGLE-1"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_refused(fault: str, tmp_path: Path) -> None:
    folder = published(tmp_path / "head", tiny_net(EAGLE1, tiny_model()))
    assert_refused(folder, FAULTS[fault], partial(load_head, method="eagle"))
