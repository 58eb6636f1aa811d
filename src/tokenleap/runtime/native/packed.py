"""The packed weights of a decoder: packed from its modules' weights here, or mapped from files.

`NativeDecoder` reads either.
"""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tokenleap.errors import ModelError
from tokenleap.runtime.choices import DRAFTING
from tokenleap.runtime.llama import (
    LAYER_NORMS,
    DecoderLayer,
    DecoderSizes,
    DecoderWeights,
    LinearWeights,
    LlamaSizes,
    MixedInput,
)
from tokenleap.runtime.native.build import FORMATS
from tokenleap.runtime.native.pack import PANEL, Format, PackedWeights, in_turns, pack, panel_bytes

QUANTIZED = {"int8": Format.INT8, "int4": Format.INT4, DRAFTING: Format.INT4}
"""The format of linear layers by the name of a quantization."""


PackedLayer: TypeAlias = DecoderLayer[PackedWeights, tuple[PackedWeights, ...]]
"""A decoder layer as the kernels read it.

Query, key and value are one matrix, or several with a format each, one below the other. Gate and up
are one with their panels in turns, or two. Formats of floats do not occur beside others: they read
other inputs. Files do not hold `LlamaSizes.numbers`.
"""


class PackedDecoder(ABC):
    """A decoder whose linear layers are packed."""

    sizes: DecoderSizes

    @abstractmethod
    def head(self) -> PackedWeights: ...

    @abstractmethod
    def mix(self) -> PackedWeights | None:
        """The linear layer of a `MixedInput`."""

    @abstractmethod
    def layer(self, index: int) -> PackedLayer: ...


class Packing(PackedDecoder):
    """Packs a decoder's weights, a layer at a time."""

    sizes: DecoderWeights

    def __init__(self, sizes: DecoderWeights, quantization: str | None) -> None:
        self.sizes = sizes
        dtype = sizes.embedding.dtype
        # In int4 the head, which ranks all tokens, would lose more accuracy than the layers. That
        # of a draft model may: it is a large part of a small model.
        self._finer_head = quantization == "int4"
        self._form = FORMATS[dtype] if quantization is None else QUANTIZED[quantization]

    def head(self) -> PackedWeights:
        return self.pack_head(self.sizes.head)

    def pack_head(self, head: LinearWeights) -> PackedWeights:
        """Pack the output layer, or some of its rows."""
        return pack(head, Format.INT8 if self._finer_head else self._form)

    def mix(self) -> PackedWeights | None:
        joint = self.sizes.joint
        return self._pack(joint.linear) if isinstance(joint, MixedInput) else None

    def layer(self, index: int) -> PackedLayer:
        layer: Any = self.sizes.layer(index)
        packed = {
            "qkv": (self._pack(layer.qkv),),
            "output": self._pack(layer.output),
            "gate_up": (self._pack(in_turns(layer.gate_up)),),
            "down": self._pack(layer.down),
        }
        return cast("PackedLayer", replace(layer, **packed))

    def _pack(self, weights: LinearWeights) -> PackedWeights:
        return pack(weights, self._form)


# Files of packed weights: one per layer, and one for the rest, in safetensors.
#
#     layer-00000.safetensors, ...   a layer's linear layers as the kernels read them, and its norms
#     rest.safetensors               embedding, final norm, output layer, and reference logits
#
# Every tensor begins at a multiple of 64 bytes, so that a kernel's loads do not straddle cache
# lines. The files are mapped: the system reads what is used, and processes share its memory.
# `runtime/packed.py` keeps them in the cache.


LAYOUT_VERSION = 4
"""Increased when the files are others: in layout, in numbers, or in what is known about them."""

_ALIGNMENT = 64
_NAMES = {torch.uint8: "U8", torch.float32: "F32", torch.bfloat16: "BF16"}
_LINEAR = ("output", "down")
_IN_PARTS = {"qkv": 3, "gate_up": 2}  # and at most so many parts


def layer_file(folder: Path, index: int) -> Path:
    return folder / f"layer-{index:05d}.safetensors"


def rest_file(folder: Path) -> Path:
    return folder / "rest.safetensors"


def write_layer(folder: Path, index: int, layer: PackedLayer) -> None:
    norms = {name: getattr(layer, name) for name in LAYER_NORMS}
    given = {name: norm for name, norm in norms.items() if norm is not None}
    linear = {name: getattr(layer, name) for name in _LINEAR}
    for name in _IN_PARTS:
        linear |= {f"{name}.{place}": part for place, part in enumerate(getattr(layer, name))}
    write(layer_file(folder, index), given, linear)


def write(path: Path, tensors: Mapping[str, Tensor], linear: Mapping[str, PackedWeights]) -> None:
    """Write a file of tensors and packed linear layers.

    The library's own function would need the tensors at other places, and their bytes twice.
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

    The kernels read as many bytes as the sizes say, so whatever is asked for must have the shape
    that the model has. `store` compares the files' content with their checksums.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tensors: dict[str, Tensor] = {}
        try:
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118
                    self._tensors[name] = file.get_tensor(name)
                self._linear = file.metadata() or {}
        except (OSError, SafetensorError) as error:
            raise ModelError(f"cannot read {path}: {error}; delete it, to pack again") from error
        for name, tensor in self._tensors.items():
            if tensor.data_ptr() % _ALIGNMENT:
                raise self.damaged(name)

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        found = self._tensors.get(name)
        if found is None or found.shape != shape or not found.is_floating_point():
            raise self.damaged(name)
        return found

    def optional(self, name: str, shape: tuple[int, ...] | None) -> Tensor | None:
        """The same of a tensor that some models have; there must be none where `shape` is None."""
        if shape is not None:
            return self.tensor(name, shape)
        if name in self._tensors:
            raise self.damaged(name)
        return None

    def linear(self, name: str, shape: tuple[int, int]) -> PackedWeights:
        packed = self._part(name)
        if (packed.outputs, packed.inputs) != shape:
            raise self.damaged(name)
        return packed

    def parts(self, name: str, shape: tuple[int, int], most: int) -> tuple[PackedWeights, ...]:
        """At most so many packed linear layers that are parts of one, one below the other."""
        names = sorted(each for each in self._linear if each.startswith(f"{name}."))
        found = tuple(map(self._part, names))
        outputs, inputs = shape
        if not 1 <= len(found) <= most or sum(each.outputs for each in found) != outputs:
            raise self.damaged(name)
        for each in found:
            mixed = len(found) > 1 and each.format <= Format.BFLOAT16
            if each.inputs != inputs or each.outputs % PANEL or mixed:
                raise self.damaged(name)
        return found

    def _part(self, name: str) -> PackedWeights:
        """A packed linear layer that has as many bytes as the kernels will read."""
        try:
            form, inputs, outputs = json.loads(self._linear[name])
            panel = panel_bytes(Format(form), inputs)
            panels = -(-outputs // PANEL)
            weight, bias = self._tensors[f"{name}.weight"], self._tensors.get(f"{name}.bias")
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise self.damaged(name) from error
        whole = type(inputs) is type(outputs) is int and min(inputs, outputs) > 0
        if not whole or panel is None or weight.nbytes != panels * panel:
            raise self.damaged(name)
        if bias is not None and (bias.dtype != torch.float32 or bias.shape != (panels * PANEL,)):
            raise self.damaged(name)
        return PackedWeights(weight, bias, Format(form), inputs, outputs)

    def damaged(self, name: str) -> ModelError:
        """The error that says that a part of the file does not fit the model."""
        return ModelError(
            f"{self._path} is damaged: {name} does not fit the model; delete it, to pack again"
        )


class MappedDecoder(PackedDecoder):
    """A language model whose packed weights are files."""

    sizes: LlamaSizes

    def __init__(self, folder: Path, rest: MappedFile, sizes: LlamaSizes) -> None:
        vocabulary, size = sizes.embedding.shape
        self.sizes, self._head = sizes, rest.linear("head", (vocabulary, size))
        # All are mapped now: a folder that is out of date may be deleted at any time.
        self._layers = [
            _mapped_layer(MappedFile(layer_file(folder, index)), sizes.layer_shapes)
            for index in range(sizes.num_layers)
        ]

    def head(self) -> PackedWeights:
        return self._head

    def mix(self) -> None: ...

    def layer(self, index: int) -> PackedLayer:
        return replace(self._layers[index], **self.sizes.numbers(index))


def _mapped_layer(file: MappedFile, shapes: Mapping[str, Any]) -> PackedLayer:
    found: dict[str, Any] = {name: file.optional(name, shapes[name]) for name in LAYER_NORMS}
    found |= {name: file.linear(name, shapes[name]) for name in _LINEAR}
    found |= {name: file.parts(name, shapes[name], most) for name, most in _IN_PARTS.items()}
    if len(found["gate_up"]) == 2 and found["gate_up"][0].outputs != found["gate_up"][1].outputs:
        raise file.damaged("gate_up")
    return PackedLayer(**found)
