"""A GGUF file and a folder: the same model or not, by what they say of themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest

from tokenleap.bench.contestants import check_same_model
from tokenleap.errors import ConfigError, ModelError

SIZES = {"num_hidden_layers": 2, "hidden_size": 64, "vocab_size": 97}


def folder_of(path: Path, **config: Any) -> Path:
    (path / "config.json").write_text(json.dumps(config))
    return path


def gguf_of(path: Path, architecture: str = "llama", tokens: int = 97) -> Path:
    file = path / "model.gguf"
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_block_count(2)
    writer.add_embedding_length(64)
    writer.add_token_list([str(number) for number in range(tokens)])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.mark.parametrize(
    ("architecture", "config"),
    [
        ("llama", {"model_type": "llama", **SIZES}),
        ("llama", {"model_type": "mistral", **SIZES}),
        ("gptneox", {"model_type": "gpt_neox", **SIZES}),
        ("gpt2", {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "vocab_size": 97}),
        ("gemma3", {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", **SIZES}}),
        ("whatever", {"model_type": "something_new", **SIZES}),
        ("llama", {"model_type": "llama"}),
    ],
)
def test_the_same_model(tmp_path: Path, architecture: str, config: dict[str, Any]) -> None:
    check_same_model(gguf_of(tmp_path, architecture), folder_of(tmp_path, **config))


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"model_type": "qwen2", **SIZES}, "architecture llama, not qwen2"),
        ({"model_type": "llama", **SIZES, "num_hidden_layers": 30}, "layers 2, not 30"),
        ({"model_type": "llama", **SIZES, "hidden_size": 576}, "hidden size 64, not 576"),
        ({"model_type": "llama", **SIZES, "vocab_size": 49152}, "vocabulary 97, not 49152"),
    ],
)
def test_another_model(tmp_path: Path, config: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=rf"is another model than the one in .*: {told}[.]$"):
        check_same_model(gguf_of(tmp_path), folder_of(tmp_path, **config))


def test_a_file_that_ends_too_soon(tmp_path: Path) -> None:
    file = gguf_of(tmp_path)
    file.write_bytes(file.read_bytes()[:60])
    with pytest.raises(
        ModelError, match=r"damaged: its 60 bytes do not hold .*; get the file again$"
    ):
        check_same_model(file, folder_of(tmp_path, model_type="llama", **SIZES))
