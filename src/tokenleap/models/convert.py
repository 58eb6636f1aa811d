"""Convert a GGUF file to a Hugging Face folder: config, weights in float32, tokenizer.

Transformers' own reader drops tensors without a message, and fills parameters that the file lacks
with random numbers. `resolver` calls this module.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tokenleap.models.gguf_config import config_of, sampling_of
from tokenleap.models.gguf_file import GgufFile
from tokenleap.models.gguf_tokenizer import convert_tokenizer
from tokenleap.models.gguf_weights import GgufWeights
from tokenleap.models.guard import guarded
from tokenleap.models.progress import progress

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

__all__ = ["convert_gguf", "convert_settings", "converted_bytes", "empty_model"]

_FLOAT_BYTES = 4
# Limits the memory of a conversion.
_SHARD_BYTES = 2_000_000_000
# Config and tokenizer: a few megabytes even with the largest vocabularies.
_SMALL_FILES_BYTES = 32_000_000


def converted_bytes(file: GgufFile) -> int:
    """How many bytes the Hugging Face folder of a GGUF file takes, rounded up."""
    return file.elements * _FLOAT_BYTES + _SMALL_FILES_BYTES


def convert_gguf(file: GgufFile, folder: Path) -> None:
    """Convert a GGUF file to a Hugging Face folder with float32 safetensors.

    The weights are the exact dequantized values, which 16-bit formats would round.

    Args:
        file: The GGUF file.
        folder: An empty folder to fill.

    Raises:
        ModelError: If the file is damaged or holds something that cannot be converted.
        OSError: If writing fails.
    """
    with progress(
        f"Converting {file.path.name}", "half a minute per GB", file.elements * 4
    ) as report:
        model = convert_settings(file, folder)
        with guarded(f"cannot convert {file.path}"):
            _write_weights(GgufWeights(file, model), folder, report)


def convert_settings(file: GgufFile, folder: Path) -> PreTrainedModel:
    """Write the configuration and the tokenizer of a GGUF file into a folder.

    Args:
        file: The GGUF file.
        folder: An empty folder to fill.

    Returns:
        The file's model on the meta device.

    Raises:
        ModelError: If they cannot be converted, or do not fit the file's tensors.
        OSError: If writing fails.
    """
    with guarded(f"cannot convert {file.path}"):
        model = empty_model(file)
        _save_configs(file, model, folder)
        GgufWeights(file, model)  # checks the tensors
        convert_tokenizer(file, folder)
    return model


def empty_model(file: GgufFile) -> PreTrainedModel:
    """The file's model on the meta device.

    Raises:
        ModelError: If its configuration cannot be converted.
    """
    from transformers import AutoModelForCausalLM

    config = config_of(file)
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    model.config.architectures = [type(model).__name__]
    model.config.dtype = torch.float32
    return model


def _save_configs(file: GgufFile, model: PreTrainedModel, folder: Path) -> None:
    from transformers import GenerationConfig

    model.config.save_pretrained(folder)
    # A chat model may end a turn and a text with different tokens.
    ends = [file.token_id(end) for end in ("eos", "eot")]
    stops = list(dict.fromkeys(end for end in ends if end is not None))
    generation = GenerationConfig(  # type: ignore[no-untyped-call]
        bos_token_id=file.token_id("bos"),
        eos_token_id=stops[0] if len(stops) == 1 else stops or None,
        pad_token_id=file.token_id("padding"),
        **sampling_of(file),
    )
    generation.save_pretrained(folder)


def _write_weights(weights: GgufWeights, folder: Path, report: Callable[[int], None]) -> None:
    """Dequantize every weight and write it under its Hugging Face name."""
    from safetensors.torch import save_file

    shards = list(_shards(weights.shapes))
    index: dict[str, str] = {}
    done = 0
    for number, shard in enumerate(shards, start=1):
        tensors: dict[str, Tensor] = {}
        for name in shard:
            tensors[name] = weights.read(name, torch.float32).contiguous()
            done += tensors[name].nbytes
            report(done)
        shard_name = "model.safetensors"
        if len(shards) > 1:
            shard_name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(tensors, folder / shard_name, metadata={"format": "pt"})
        index |= dict.fromkeys(tensors, shard_name)
    if len(shards) > 1:
        content = json.dumps({"metadata": {"total_size": done}, "weight_map": index}, indent=2)
        (folder / "model.safetensors.index.json").write_text(content, encoding="utf-8")


def _shards(shapes: dict[str, tuple[int, ...]]) -> Iterator[list[str]]:
    """Groups of weights, each of at most `_SHARD_BYTES` dequantized bytes or one weight."""
    shard: list[str] = []
    size = 0
    for name, shape in shapes.items():
        num_bytes = torch.Size(shape).numel() * _FLOAT_BYTES
        if shard and size + num_bytes > _SHARD_BYTES:
            yield shard
            shard, size = [], 0
        shard.append(name)
        size += num_bytes
    yield shard
