"""Tiny models made on the spot, and a cache of their own for every test."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers

HEADS, KEY_HEADS, HEAD_SIZE, LAYERS, CONTEXT = 4, 2, 16, 2, 64

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["Ġ Ġ", "ĠĠ ĠĠ", "Ġ t", "h e", "Ġt he", "i n", "1 2"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}"
)

GGUF_ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
}

MakeModel = Callable[..., transformers.PreTrainedModel]
MakeGguf = Callable[..., Path]
MakeWheel = Callable[..., Path]


@pytest.fixture(autouse=True)
def cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Path | None:
    """An empty cache folder; tests of the real default model keep the real one."""
    if request.node.get_closest_marker("model"):
        return None
    folder = tmp_path / "cache"
    monkeypatch.setenv("TOKENLEAP_CACHE", str(folder))
    return folder


@pytest.fixture(scope="session")
def bytes_as_letters() -> dict[int, str]:
    """GPT-2's printable letter for every byte, as the paper's code defines it."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {
        byte: chr(256 + number) for number, byte in enumerate(others)
    }


@pytest.fixture(scope="session")
def byte_merges() -> list[str]:
    """The merges of the tiny byte-level vocabulary, best first."""
    return MERGES


@pytest.fixture(scope="session")
def byte_vocabulary(bytes_as_letters: dict[int, str]) -> list[str]:
    """The tiny byte-level vocabulary: specials, all bytes, all merges."""
    merged = [merge.replace(" ", "") for merge in MERGES]
    return [*SPECIALS, *(bytes_as_letters[byte] for byte in range(256)), *merged]


@pytest.fixture(scope="session")
def make_model(byte_vocabulary: list[str]) -> MakeModel:
    """Makes a tiny random causal language model."""

    def make(
        architecture: str = "llama", *, tied: bool = True, vocabulary: int = len(byte_vocabulary)
    ) -> transformers.PreTrainedModel:
        config = transformers.AutoConfig.for_model(
            architecture,
            vocab_size=vocabulary,
            hidden_size=HEADS * HEAD_SIZE,
            intermediate_size=96,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=KEY_HEADS,
            head_dim=HEAD_SIZE,
            max_position_embeddings=CONTEXT,
            rms_norm_eps=1e-5,
            rope_theta=50_000.0,
            tie_word_embeddings=tied,
            pad_token_id=None,
        )
        torch.manual_seed(0)
        build: Any = transformers.AutoModelForCausalLM.from_config
        model: transformers.PreTrainedModel = build(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0, 0.1)  # norms and biases too, so that none goes unnoticed
        return model

    return make


@pytest.fixture
def make_gguf(tmp_path: Path, make_model: MakeModel, byte_vocabulary: list[str]) -> MakeGguf:
    """Writes a tiny model as a GGUF file, the way llama.cpp's converter does.

    Options: `settings` overrides metadata (None leaves a key out), `tensors` overrides tensors by
    GGUF name likewise, `quantize` gives a quantization type by GGUF name.
    """

    def make(
        architecture: str = "llama",
        name: str = "tiny.gguf",
        *,
        model: transformers.PreTrainedModel | None = None,
        settings: dict[str, Any] | None = None,
        tensors: dict[str, np.ndarray[Any, Any] | None] | None = None,
        quantize: dict[str, gguf.GGMLQuantizationType] | None = None,
    ) -> Path:
        model = make_model(architecture) if model is None else model
        metadata = _metadata(architecture, byte_vocabulary) | (settings or {})
        weights = {**_gguf_tensors(architecture, model), **(tensors or {})}
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_gguf(path, metadata.pop("architecture"), metadata, weights, quantize or {})
        return path

    return make


def write_gguf(
    path: Path,
    architecture: str,
    metadata: Mapping[str, Any],
    weights: Mapping[str, np.ndarray[Any, Any] | None],
    kinds: Mapping[str, gguf.GGMLQuantizationType],
) -> None:
    """Write a GGUF file, without the fields and tensors that are None."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        if value is not None:
            _add_field(writer, key, value)
    for key, weight in weights.items():
        if weight is not None and (kind := kinds.get(key)) is not None:
            writer.add_tensor(key, gguf.quantize(weight, kind), raw_dtype=kind)
        elif weight is not None:
            writer.add_tensor(key, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def make_wheel(tmp_path: Path) -> MakeWheel:
    """Packs files into a wheel that pip accepts, in a folder of its own."""

    def make(files: dict[str, bytes], name: str = "tiny_model", version: str = "1.0") -> Path:
        folder = tmp_path / "index"
        folder.mkdir(exist_ok=True)
        wheel = folder / f"{name}-{version}-py3-none-any.whl"
        about = f"{name}-{version}.dist-info"
        with zipfile.ZipFile(wheel, "w") as archive:
            for path, content in files.items():
                archive.writestr(path, content)
            archive.writestr(
                f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
            )
            archive.writestr(
                f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            )
            archive.writestr(f"{about}/RECORD", "")
        return wheel

    return make


def _metadata(architecture: str, vocabulary: list[str]) -> dict[str, Any]:
    specials = len(SPECIALS)
    return {
        "architecture": architecture,
        "general.name": "Tiny",
        f"{architecture}.block_count": LAYERS,
        f"{architecture}.context_length": CONTEXT,
        f"{architecture}.embedding_length": HEADS * HEAD_SIZE,
        f"{architecture}.feed_forward_length": 96,
        f"{architecture}.attention.head_count": HEADS,
        f"{architecture}.attention.head_count_kv": KEY_HEADS,
        f"{architecture}.attention.key_length": HEAD_SIZE,
        f"{architecture}.attention.value_length": HEAD_SIZE,
        f"{architecture}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{architecture}.rope.dimension_count": HEAD_SIZE,
        f"{architecture}.rope.freq_base": 50_000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2" if architecture == "qwen2" else "smollm",
        "tokenizer.ggml.tokens": vocabulary,
        "tokenizer.ggml.token_type": [3] * specials + [1] * (len(vocabulary) - specials),
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def _add_field(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Write a field of a GGUF file, with the type of its value."""
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_string(key, value)


def _gguf_tensors(
    architecture: str, model: transformers.PreTrainedModel
) -> dict[str, np.ndarray[Any, Any]]:
    """The model's weights by GGUF name, query and key rows in pairs for llama."""
    names = gguf.get_tensor_name_map(GGUF_ARCHITECTURES[architecture], LAYERS)
    tensors = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        stem, _, suffix = name.rpartition(".")
        weight = tensor.numpy()
        if architecture == "llama" and stem.endswith(("q_proj", "k_proj")):
            heads = HEADS if stem.endswith("q_proj") else KEY_HEADS
            halves = weight.reshape(heads, 2, HEAD_SIZE // 2, weight.shape[1])
            weight = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))
        tensors[f"{names.get_name(stem)}.{suffix}"] = weight
    return tensors
