"""Peak bytes of a process, and bytes of weights and KV computed from their shapes.

Tables 8 and 9 of Xia et al., "Speculative Decoding" (2023), give peak memory by parts.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tokenleap.runtime.choices import DRAFTING

__all__ = ["BYTES", "kv_bytes", "peak_bytes", "weight_bytes"]


BYTES = {"int8": 34 / 32, "int4": 20 / 32, DRAFTING: 20 / 32}
"""Per quantized weight. Groups of 32 share a scale of 16 bits; int4 groups an offset, too."""


_DTYPE_BYTES = {"U8": 1, "BF16": 2, "F32": 4}


def peak_bytes(device: str) -> int:
    """Peak memory of this process: of the GPU if it computes there, else resident memory."""
    if device.startswith("cuda"):
        import torch

        return int(torch.cuda.max_memory_allocated(device))
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def weight_bytes(folder: Path, itemsize: int, quantization: str | None = None) -> int:
    """Bytes of the weights that one forward pass reads.

    An input embedding that is not tied to the output layer is left out, because a pass reads only
    a few of its rows. Quantized matrices count with the scales of their groups.

    Args:
        folder: a Hugging Face folder with safetensors, one of packed weights, or a trained head's.
        itemsize: bytes of a weight as it is in memory.
        quantization: "int8", "int4" or None; packed weights tell theirs.
    """
    from safetensors import safe_open

    from tokenleap.drafters.heads.folder import first_of, read_tensors

    if (folder / "rest.safetensors").is_file():
        return _packed_bytes(folder)
    shapes: dict[str, list[int]] = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "np") as tensors:
            shapes |= {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118
    if not shapes:  # a published head
        path = first_of(folder, "pytorch_model.bin", "medusa_lm_head.pt")
        shapes = {name: list(tensor.shape) for name, tensor in read_tensors(path).items()}
    untied = any(name.endswith("lm_head.weight") for name in shapes)
    total = 0.0
    for name, shape in shapes.items():
        if untied and name.endswith(("embed_tokens.weight", "wte.weight", "embed_in.weight")):
            continue
        quantized = len(shape) > 1 and quantization is not None
        # With int4 the output layer stays in int8, and so does the embedding tied to it.
        is_head = name.endswith(("lm_head.weight", "embed_tokens.weight"))
        form = "int8" if is_head else str(quantization)
        total += _product(shape) * (BYTES[form] if quantized else itemsize)
    return int(total)


def _packed_bytes(folder: Path) -> int:
    """Bytes that a pass reads of packed weights (`runtime/native/packed_files.py`)."""
    from safetensors import safe_open

    total = 0
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "np") as tensors:
            for name in set(tensors.keys()) - {"embedding", "logits"}:
                part = tensors.get_slice(name)
                total += _product(part.get_shape()) * _DTYPE_BYTES[part.get_dtype()]
    return total


def _product(shape: list[int]) -> int:
    size = 1
    for length in shape:
        size *= length
    return size


def kv_bytes(folder: Path, itemsize: int) -> int | None:
    """Bytes of one position's keys and values in all layers; None if config.json lacks sizes."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    layers = config.get("num_hidden_layers", config.get("n_layer"))
    heads = config.get("num_attention_heads", config.get("n_head"))
    hidden = config.get("hidden_size", config.get("n_embd"))
    if not (layers and heads and hidden):
        return None
    width = config.get("head_dim") or hidden // heads
    groups = config.get("num_key_value_heads") or heads
    return int(2 * layers * groups * width * itemsize)
