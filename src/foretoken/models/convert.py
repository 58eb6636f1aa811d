"""Convert a GGUF file to a Hugging Face folder: config, weights in float32, tokenizer.

Transformers reads the config and the tokenizer from the GGUF file. This module reads the weights,
because Transformers' reader needs another package, drops tensors without a message, and fills
parameters that the file lacks with random numbers. `resolver` calls it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import numpy.typing as npt

from foretoken.errors import ModelError
from foretoken.models.gguf_file import GgufFile, GgufTensor
from foretoken.models.gguf_tokenizer import convert_tokenizer
from foretoken.models.guard import guarded
from foretoken.models.progress import progress

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

__all__ = [
    "check_shape",
    "convert_gguf",
    "convert_settings",
    "converted_bytes",
    "reordered",
    "tensor_names",
]

Array = npt.NDArray[np.float32]

_FLOAT_BYTES = 4
# Limits the memory of a conversion.
_SHARD_BYTES = 2_000_000_000
# Config and tokenizer: a few megabytes even with the largest vocabularies.
_SMALL_FILES_BYTES = 32_000_000


def converted_bytes(file: GgufFile) -> int:
    """How many bytes the Hugging Face folder of a GGUF file takes, rounded up."""
    return file.elements * _FLOAT_BYTES + _SMALL_FILES_BYTES


def convert_gguf(file: GgufFile, scratch: Path, folder: Path) -> None:
    """Convert a GGUF file to a Hugging Face folder with float32 safetensors.

    The weights are the exact dequantized values, which 16-bit formats would round.

    Args:
        file: The GGUF file.
        scratch: A folder for temporary files.
        folder: An empty folder to fill.

    Raises:
        ModelError: If the file is damaged or holds something that cannot be converted.
        OSError: If writing fails.
    """
    with progress(
        f"Converting {file.path.name}", "half a minute per GB", file.elements * 4
    ) as report:
        model = convert_settings(file, scratch, folder)
        with guarded(f"cannot convert {file.path}"):
            _write_weights(file, model, folder, report)


def convert_settings(file: GgufFile, scratch: Path, folder: Path) -> PreTrainedModel:
    """Write the configuration and the tokenizer of a GGUF file into a folder.

    Args:
        file: The GGUF file.
        scratch: A folder for temporary files.
        folder: An empty folder to fill.

    Returns:
        The file's model on the meta device.

    Raises:
        ModelError: If they cannot be converted, or do not fit the file's tensors.
        OSError: If writing fails.
    """
    # Transformers would also read other files in the GGUF file's folder.
    alone = scratch / "alone" / "model.gguf"
    alone.parent.mkdir()
    alone.symlink_to(file.path.absolute())
    with guarded(f"cannot convert {file.path}"):
        model = _empty_model(file, alone)
        _save_configs(file, model, folder)
        tensor_names(file, model)
        convert_tokenizer(file, alone, folder)
    return model


def _empty_model(file: GgufFile, alone: Path) -> PreTrainedModel:
    """The file's model on the meta device, with a corrected config."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(
        alone.parent, gguf_file=alone.name, local_files_only=True, trust_remote_code=False
    )
    _correct_config(file, config)
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    model.config.architectures = [type(model).__name__]
    model.config.dtype = torch.float32
    return model


def _correct_config(file: GgufFile, config: PretrainedConfig) -> None:
    """Correct what Transformers 5.23 gets wrong in a config from a GGUF file."""
    # It saves the model's title as if it were a path.
    vars(config).pop("_model_name_or_path", None)
    # It keeps the rounding error of float32: 1e-05 becomes 9.99999974e-06.
    config.rms_norm_eps = float(str(np.float32(config.rms_norm_eps)))
    # It looks for the output layer only in the first part of a split file.
    config.tie_word_embeddings = all(tensor.name != "output.weight" for tensor in file.tensors)
    # It drops the head size of some architectures.
    sizes = {file.setting(name) for name in ("attention.key_length", "rope.dimension_count")}
    sizes.discard(None)
    if len(sizes) > 1:
        raise ModelError(f"{file.path} rotates only a part of each head, which cannot be converted")
    if sizes:
        config.head_dim = sizes.pop()


def _save_configs(file: GgufFile, model: PreTrainedModel, folder: Path) -> None:
    from transformers import GenerationConfig

    model.config.save_pretrained(folder)
    # A chat model may end a turn and a text with different tokens.
    ends = [file.get(f"tokenizer.ggml.{end}_token_id") for end in ("eos", "eot")]
    stops = list(dict.fromkeys(end for end in ends if end is not None))
    generation = GenerationConfig(  # type: ignore[no-untyped-call]
        bos_token_id=file.get("tokenizer.ggml.bos_token_id"),
        eos_token_id=stops[0] if len(stops) == 1 else stops or None,
        pad_token_id=file.get("tokenizer.ggml.padding_token_id"),
    )
    generation.save_pretrained(folder)


def _write_weights(
    file: GgufFile, model: PreTrainedModel, folder: Path, report: Callable[[int], None]
) -> None:
    """Dequantize every tensor and write it under its Hugging Face name."""
    from safetensors.numpy import save_file

    names = tensor_names(file, model)
    shards = list(_shards(file))
    index: dict[str, str] = {}
    done = 0
    for number, shard in enumerate(shards, start=1):
        weights: dict[str, Array] = {}
        for tensor in shard:
            weight = _weight(file, tensor, model, names[tensor.name])
            weights[names[tensor.name]] = weight
            done += weight.nbytes
            report(done)
        shard_name = "model.safetensors"
        if len(shards) > 1:
            shard_name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(weights, folder / shard_name, metadata={"format": "pt"})
        index |= dict.fromkeys(weights, shard_name)
    if len(shards) > 1:
        content = json.dumps({"metadata": {"total_size": done}, "weight_map": index}, indent=2)
        (folder / "model.safetensors.index.json").write_text(content, encoding="utf-8")


def tensor_names(file: GgufFile, model: PreTrainedModel) -> dict[str, str]:
    """The Hugging Face name of every tensor, by GGUF name.

    Raises:
        ModelError: If the file lacks a tensor of the model, or has one that the model lacks.
    """
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    layers = model.config.num_hidden_layers
    gguf_names = gguf.get_tensor_name_map(kinds[file.architecture], layers)
    names: dict[str, str] = {}
    for name in model.state_dict():
        stem, _, suffix = name.rpartition(".")
        names[f"{gguf_names.get_name(stem)}.{suffix}"] = name
    if model.config.tie_word_embeddings:
        del names["output.weight"]
    present = {tensor.name for tensor in file.tensors}
    if missing := sorted(names.keys() - present):
        raise ModelError(
            f"{file.path} lacks {len(missing)} weights of its model, {missing[0]} first; "
            f"get the file again"
        )
    if unknown := sorted(present - names.keys()):
        raise ModelError(
            f"{file.path} has {len(unknown)} weights that cannot be converted, {unknown[0]} "
            f"first; use the model's safetensors folder instead"
        )
    return names


def _shards(file: GgufFile) -> Iterator[list[GgufTensor]]:
    """Groups of tensors, each of at most `_SHARD_BYTES` dequantized bytes or one tensor."""
    shard: list[GgufTensor] = []
    size = 0
    for tensor in file.tensors:
        tensor_bytes = tensor.elements * _FLOAT_BYTES
        if shard and size + tensor_bytes > _SHARD_BYTES:
            yield shard
            shard, size = [], 0
        shard.append(tensor)
        size += tensor_bytes
    yield shard


def _weight(file: GgufFile, tensor: GgufTensor, model: PreTrainedModel, name: str) -> Array:
    """One tensor's values, in the order of the Hugging Face model."""
    check_shape(file, tensor, model, name)
    return np.ascontiguousarray(reordered(file, tensor, model, tensor.values()))


def check_shape(file: GgufFile, tensor: GgufTensor, model: PreTrainedModel, name: str) -> None:
    """Check that a tensor has the shape of the model's parameter.

    Raises:
        ModelError: If it does not.
    """
    expected = tuple(model.get_parameter(name).shape)
    if tensor.shape != expected:
        raise ModelError(f"{file.path} has {tensor.name} as {tensor.shape}, expected {expected}")


def reordered(
    file: GgufFile, tensor: GgufTensor, model: PreTrainedModel, rows: npt.NDArray[Any]
) -> npt.NDArray[Any]:
    """All rows of a tensor, values or bytes, in the order of the Hugging Face model."""
    if file.architecture == "llama" and ".attn_q." in tensor.name:
        return _rotary_halves(rows, model.config.num_attention_heads)
    if file.architecture == "llama" and ".attn_k." in tensor.name:
        return _rotary_halves(rows, model.config.num_key_value_heads)
    return rows


def _rotary_halves(weight: npt.NDArray[Any], heads: int) -> npt.NDArray[Any]:
    """Reorder each head's rows from GGUF's order to Hugging Face's.

    Two rows rotate together. GGUF stores them side by side (a0 b0 a1 b1), Hugging Face half a head
    apart (a0 a1 b0 b1).

    Args:
        weight: Query or key projection, [heads * head size, anything].
        heads: The number of heads.
    """
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)
