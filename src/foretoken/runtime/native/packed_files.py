"""Files of packed weights: one per layer, and one for the rest, in safetensors.

    layer-00000.safetensors, ...   a layer's linear layers as the kernels read them, and its norms
    rest.safetensors               embedding, final norm, output layer, and reference logits

Every tensor begins at a multiple of 64 bytes, so that a kernel's loads do not straddle cache lines.
The files are mapped: the system reads what is used, and processes share its memory.
`runtime/packed.py` keeps them in the cache.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from foretoken.errors import ModelError
from foretoken.runtime.llama import LlamaWeights
from foretoken.runtime.native.pack import Format, PackedWeights
from foretoken.runtime.native.packed import PackedDecoder, PackedLayer

__all__ = ["LAYOUT_VERSION", "MappedDecoder", "MappedFile", "layer_file", "rest_file", "write"]

LAYOUT_VERSION = 3
"""Increased when the kernels read another layout, or packing rounds to other numbers."""

_ALIGNMENT = 64
_NAMES = {torch.uint8: "U8", torch.float32: "F32", torch.bfloat16: "BF16"}
_LINEAR = ("output", "down")
_IN_PARTS = ("qkv", "gate_up")
_NORMS = ("attention_norm", "query_norm", "key_norm", "mlp_norm")


def layer_file(folder: Path, index: int) -> Path:
    """The file of a layer."""
    return folder / f"layer-{index:05d}.safetensors"


def rest_file(folder: Path) -> Path:
    """The file of what belongs to no layer."""
    return folder / "rest.safetensors"


def write_layer(folder: Path, index: int, layer: PackedLayer) -> None:
    """Write the file of a layer.

    Raises:
        OSError: it cannot be written.
    """
    norms = {name: getattr(layer, name) for name in _NORMS}
    given = {name: norm for name, norm in norms.items() if norm is not None}
    linear = {name: getattr(layer, name) for name in _LINEAR}
    for name in _IN_PARTS:
        linear |= {f"{name}.{place}": part for place, part in enumerate(getattr(layer, name))}
    write(layer_file(folder, index), given, linear)


def write(path: Path, tensors: Mapping[str, Tensor], linear: Mapping[str, PackedWeights]) -> None:
    """Write a file of tensors and packed linear layers.

    The library's own function would need the tensors at other places, and their bytes twice.

    Args:
        path: the file.
        tensors: contiguous; the sizes of all but the last are multiples of 64 bytes.
        linear: the linear layers by name.

    Raises:
        OSError: it cannot be written.
    """
    whole = {f"{name}.weight": packed.weight for name, packed in linear.items()}
    whole |= {f"{name}.bias": x.bias for name, x in linear.items() if x.bias is not None}
    whole |= tensors
    about = {name: [int(x.format), x.inputs, x.outputs] for name, x in linear.items()}
    header: dict[str, object] = {
        "__metadata__": {name: json.dumps(numbers) for name, numbers in about.items()}
    }
    end = 0
    for name, tensor in whole.items():
        assert end % _ALIGNMENT == 0
        assert tensor.is_contiguous()
        start, end = end, end + tensor.nbytes
        shape = list(tensor.shape)
        offsets = {"data_offsets": [start, end]}
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": shape, **offsets}
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in whole.values():
            file.write(tensor.flatten().view(torch.uint8).numpy().data)
        if hasattr(os, "posix_fadvise"):  # the system writes it to disk while others are packed
            file.flush()
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class MappedFile:
    """A file that `write` wrote, mapped into memory.

    Raises:
        ModelError: it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        try:
            with safe_open(path, "pt") as file:
                self.tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                self._linear = file.metadata() or {}
        except (OSError, SafetensorError) as error:
            raise ModelError(f"cannot read {path}: {error}; delete it, to pack again") from error

    def linear(self, name: str) -> PackedWeights:
        """A packed linear layer."""
        form, inputs, outputs = json.loads(self._linear[name])
        weight, bias = self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias")
        return PackedWeights(weight, bias, Format(form), inputs, outputs)

    def parts(self, name: str) -> tuple[PackedWeights, ...]:
        """The packed linear layers that are parts of one."""
        found = sorted(each for each in self._linear if each.startswith(f"{name}."))
        return tuple(map(self.linear, found))


class MappedDecoder(PackedDecoder):
    """A language model whose packed weights are files.

    Args:
        folder: the files.
        rest: that of `rest_file`.
        sizes: everything but the linear layers.

    Raises:
        ModelError: a file cannot be read.
    """

    def __init__(self, folder: Path, rest: MappedFile, sizes: LlamaWeights) -> None:
        self.sizes, self._rest = sizes, rest
        # All are mapped now: a folder that is out of date may be deleted at any time.
        self._layers = [MappedFile(layer_file(folder, x)) for x in range(sizes.num_layers)]
        self._windows = sizes.windows

    def head(self) -> PackedWeights:
        """See `PackedDecoder.head`."""
        return self._rest.linear("head")

    def mix(self) -> None:
        """None: a language model reads no states."""

    def layer(self, index: int) -> PackedLayer:
        """See `PackedDecoder.layer`."""
        file = self._layers[index]
        norms = {name: file.tensors.get(name) for name in _NORMS}
        linear = {name: file.linear(name) for name in _LINEAR}
        parts = {name: file.parts(name) for name in _IN_PARTS}
        window = self._windows[index]
        return PackedLayer(**norms, **linear, **parts, window=window)  # type: ignore[arg-type]
