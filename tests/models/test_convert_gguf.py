"""A converted GGUF file is the same model: same weights, same config, or it is refused."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tokenleap.errors import ModelError
from tokenleap.models import load_model, load_tokenizer, resolve
from tokenleap.models.generation import defaults_of, sampling_defaults
from tokenleap.models.gguf import _tensors

CPU = torch.device("cpu")
QUANTISED = gguf.GGMLQuantizationType.Q4_1


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_every_weight_and_logit_comes_back_bit_for_bit(
    architecture: str, tied: bool, make_model: Any, make_gguf: Any
) -> None:
    model = make_model(architecture, tied=tied)
    loaded = load_model(resolve(make_gguf(architecture, model=model)), torch.float32, CPU)
    expected = model.state_dict()
    assert loaded.state_dict().keys() == expected.keys()
    for name, weight in loaded.state_dict().items():
        assert torch.equal(weight, expected[name]), name
    token_ids = torch.arange(3, 33)[None]  # [1, 30]
    with torch.no_grad():
        assert torch.equal(loaded(token_ids).logits, model.eval()(token_ids).logits)


def test_quantized_weights_are_saved_as_their_exact_values(make_model: Any, make_gguf: Any) -> None:
    model = make_model()
    folder = resolve(make_gguf(model=model, quantize={"blk.0.ffn_up.weight": QUANTISED}))
    saved = load_file(folder / "model.safetensors")["model.layers.0.mlp.up_proj.weight"]
    weight = model.state_dict()["model.layers.0.mlp.up_proj.weight"].numpy()
    exact = gguf.dequantize(gguf.quantize(weight, QUANTISED), QUANTISED)
    assert saved.dtype == torch.float32
    assert np.array_equal(saved.numpy(), exact)
    assert not torch.equal(saved.half().float(), saved)  # 16 bits would not do


def test_weights_are_split_into_shards_when_large(
    make_model: Any, make_gguf: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenleap.models.convert._SHARD_BYTES", 100_000)
    model = make_model(tied=False)
    folder = resolve(make_gguf(model=model))
    shards = sorted(path.name for path in folder.glob("*.safetensors"))
    assert shards == [
        f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)
    ]
    assert len(shards) > 2
    loaded = load_model(folder, torch.float32, CPU)
    for name, weight in loaded.state_dict().items():
        assert torch.equal(weight, model.state_dict()[name]), name


def test_the_config_says_what_the_file_says(make_gguf: Any) -> None:
    folder = resolve(make_gguf(settings={"tokenizer.ggml.eot_token_id": 0}))
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["rms_norm_eps"] == 1e-5
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 50_000.0}
    assert config["max_position_embeddings"] == 64
    assert config["head_dim"] == 16
    assert config["tie_word_embeddings"] is True
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (1, 2, 2)
    assert "_model_name_or_path" not in config
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [2, 0]
    assert (generation["bos_token_id"], generation["pad_token_id"]) == (1, 2)


def test_files_beside_the_gguf_file_do_not_leak_in(make_gguf: Any) -> None:
    path = make_gguf()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (path.parent / name).write_text('{"tokenizer_class": "BertTokenizer", "bos_token": "!"}')
    tokenizer = load_tokenizer(resolve(path))
    assert tokenizer is not None
    assert tokenizer.bos_token == "<|im_start|>"
    assert tokenizer.tokenize("the") == ["t", "he"]


REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "encoder-decoder": ({"settings": {"architecture": "t5"}}, "architecture 't5'"),
    "rope scaling": ({"settings": {"llama.rope.scaling.type": "yarn"}}, "rope.scaling.type"),
    "missing setting": ({"settings": {"llama.context_length": None}}, "context_length"),
    "partial rotation": ({"settings": {"llama.rope.dimension_count": 8}}, "part of each head"),
    "a part of a file": ({"settings": {"split.count": 2}}, "the others cannot be found"),
    "rope factors": (
        {"tensors": {"rope_freqs.weight": np.ones(8, np.float32)}},
        "converted, rope_freqs",
    ),
    "missing weight": ({"tensors": {"blk.1.ffn_up.weight": None}}, "blk.1.ffn_up.weight"),
    "no embedding": (
        {"tensors": {"token_embd.weight": None}},
        r"tiny.*\.gguf lacks token_embd\.weight, .*; get the file again",
    ),
    "wrong shape": (
        {"tensors": {"blk.1.ffn_up.weight": np.ones((8, 64), np.float32)}},
        r"expected \(96, 64\)",
    ),
    "damaged weights": (
        {"tensors": {"blk.1.ffn_up.weight": np.full((96, 64), np.nan, np.float32)}},
        "damaged: blk.1.ffn_up.weight has weights that are not finite",
    ),
    "reloaded otherwise": (
        {"architecture": "qwen2", "settings": {"tokenizer.ggml.pre": "smollm"}},
        "Transformers changes when loading it",
    ),
    "unknown cut": ({"settings": {"tokenizer.ggml.pre": "new"}}, "pre 'new'"),
    "unknown tokenizer": ({"settings": {"tokenizer.ggml.model": "rwkv"}}, "model 'rwkv'"),
    "no tokenizer": ({"settings": {"tokenizer.ggml.model": None}}, "model None"),
    "no such layers": ({"settings": {"llama.block_count": 10**9}}, "of 2 blocks, .* 1000000000"),
    "a million layers": ({"settings": {"llama.block_count": 2**20}}, "of 2 blocks, .* 1048576"),
    "layers in words": ({"settings": {"llama.block_count": "two"}}, "of 2 blocks, .* 'two'"),
    "parts in words": ({"settings": {"split.count": "two"}}, "wrong value for split.count"),
    "no context": ({"settings": {"llama.context_length": 0}}, "max_position_embeddings: .*greater"),
    "no rotation": ({"settings": {"llama.rope.freq_base": 0.0}}, "rope_theta: .*greater than 0"),
    "infinite rotation": ({"settings": {"llama.rope.freq_base": np.inf}}, "rope_theta: .*finite"),
    "huge heads": ({"settings": {"llama.attention.head_count": 10**9}}, "of at least .* numbers"),
    "more key heads than heads": (
        {"settings": {"llama.attention.head_count_kv": 8}},
        "cannot share 8 key-value heads",
    ),
    "a quantized norm": (
        {"quantize": {"output_norm.weight": gguf.GGMLQuantizationType.Q8_0}},
        "damaged: output_norm.weight is quantized",
    ),
    "no key heads": ({"settings": {"llama.attention.head_count_kv": 0}}, "greater than 0"),
    "half an end": ({"settings": {"tokenizer.ggml.eos_token_id": 0.5}}, "eos_token_id"),
    "an end that is no token": ({"settings": {"tokenizer.ggml.eos_token_id": 999}}, "eos_token_id"),
    "fewer types than tokens": (
        {"settings": {"tokenizer.ggml.token_type": [1]}},
        "ggml.token_type",
    ),
    "a long token": (
        {"settings": {"tokenizer.ggml.tokens": ["x" * 10_000] * 3}},
        "wrong value for tokenizer.ggml.tokens",
    ),
    "a name with an escape": ({"settings": {"llama.\x1b[2J": 1}}, r"converted: \\x1b\[2J"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_would_get_lost_is_refused_in_one_line(case: str, make_gguf: Any, cache: Path) -> None:
    options, message = REFUSALS[case]
    with pytest.raises(ModelError, match=message) as raised:
        resolve(make_gguf(**options))
    assert "\n" not in str(raised.value)
    assert not list(cache.glob("models/*"))


def test_a_token_that_would_be_respelt_is_refused(
    make_gguf: Any, byte_vocabulary: list[str]
) -> None:
    tokens = ["<→end→>", *byte_vocabulary[1:]]
    with pytest.raises(ModelError, match="token 0 '<→end→>', which Transformers turns into"):
        resolve(make_gguf(settings={"tokenizer.ggml.tokens": tokens}))


@pytest.mark.parametrize("kept", [0.001, 0.01, 0.1, 0.3, 0.6, 0.9, 0.999])
def test_a_truncated_file_is_refused(kept: float, make_gguf: Any, cache: Path) -> None:
    path = make_gguf()
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * kept)])
    with pytest.raises(ModelError, match="get the file again") as raised:
        resolve(path)
    assert "\n" not in str(raised.value)
    assert not list(cache.glob("models/*"))


@pytest.mark.parametrize("content", [b"", b"GG", b"PK\x03\x04 not this"])
def test_a_file_without_the_magic_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match="is not a GGUF file"):
        resolve(path)


def test_what_a_file_recommends_for_sampling(make_gguf: Any) -> None:
    """llama.cpp's `general.sampling`; before loading and after it."""
    settings = {"temp": 0.5, "top_k": 7, "penalty_repeat": 1.25}
    path = make_gguf(settings={f"general.sampling.{name}": each for name, each in settings.items()})
    expected = {"temperature": 0.5, "top_k": 7, "repetition_penalty": 1.25}
    assert defaults_of(str(path), "auto") == expected
    assert defaults_of(str(path), "none") == {}
    model = load_model(resolve(path), torch.float32, torch.device("cpu"))
    assert sampling_defaults(model.generation_config) == expected


def test_tensors_that_share_their_numbers_are_refused(tmp_path: Path) -> None:
    """A small file would fill the disk with what is made of it."""
    path = tmp_path / "x.gguf"
    path.write_bytes(bytes(100))
    tensor = SimpleNamespace(n_bytes=64, shape=np.array([16]), name="x", data_offset=0)
    reader: Any = SimpleNamespace(tensors=[tensor, tensor])
    with pytest.raises(ModelError, match="its tensors share numbers"):
        list(_tensors(path, reader))
