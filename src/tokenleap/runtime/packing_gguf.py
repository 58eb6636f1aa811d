"""Packs a GGUF file in its own numbers (`native/gguf_blocks.py`), layer by layer.

A layer whose numbers no format has is dequantized and rounded to int8. Layers that are one in the
native runtime (query, key and value; gate and up) are several if their kinds differ. Beside one in
floats, they are all dequantized. `packed.py` keeps the files.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from tokenleap.errors import ModelError
from tokenleap.models.gguf_weights import GgufWeights
from tokenleap.runtime.families import FAMILIES
from tokenleap.runtime.llama import LinearWeights
from tokenleap.runtime.native.gguf_blocks import FORMAT_OF, pack_blocks
from tokenleap.runtime.native.pack import (
    PANEL,
    Format,
    PackedWeights,
    halves,
    joined,
    pack,
    packed_in_turns,
)
from tokenleap.runtime.native.packed import PackedLayer
from tokenleap.runtime.native.packed_files import rest_file, write, write_layer
from tokenleap.runtime.native.support import FORMATS
from tokenleap.runtime.packing import HEAD_ROWS, packing_progress

__all__ = ["GgufPacker"]


class GgufPacker:
    """Writes the packed files of a GGUF file.

    Args:
        source: its weights.
        module: its modules, on the meta device.
        folder: a folder to write to.
    """

    def __init__(self, source: GgufWeights, module: PreTrainedModel, folder: Path) -> None:
        self._source, self._module, self._folder = source, module, folder
        self._tied = bool(module.config.tie_word_embeddings)
        self._floats = FORMATS[module.dtype]
        self._family = FAMILIES[type(module).__name__]
        self._runs: dict[str, set[str]] = {}
        self._elements = sum(torch.Size(shape).numel() for shape in source.shapes.values())

    def run(self) -> str:
        """Write the files.

        Returns:
            What runs, for people: how each kind of numbers in the file is stored.

        Raises:
            ModelError: the file cannot be read, or is damaged.
            OSError: a file cannot be written.
        """
        done = 0.0
        with packing_progress(self._source, "its own numbers") as report:
            for index in range(self._module.config.num_hidden_layers):
                prefix = f"model.layers.{index}."
                write_layer(self._folder, index, self._layer(prefix))
                shapes = self._source.shapes
                names = [name for name in shapes if name.startswith(prefix)]
                done += sum(torch.Size(shapes[name]).numel() for name in names)
                report(int(done / self._elements * self._source.num_bytes))
            self._write_rest()
        return "; ".join(f"{kind} {' and '.join(sorted(how))}" for kind, how in self._runs.items())

    def _layer(self, prefix: str) -> PackedLayer:
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        family, norms = self._family, self._family.norms
        return PackedLayer(
            attention_norm=self._norm(prefix, norms.attention),
            qkv=self._parts(*(f"{attention}{name}" for name in family.qkv)),
            query_norm=self._norm(attention, "q_norm"),
            key_norm=self._norm(attention, "k_norm"),
            output=self._alone(f"{attention}o_proj"),
            mlp_norm=self._norm(prefix, norms.mlp),
            gate_up=self._gate_up(*(f"{mlp}{name}" for name in family.gate_up)),
            down=self._alone(f"{mlp}down_proj"),
            attention_after=self._norm(prefix, norms.attention_after),
            mlp_after=self._norm(prefix, norms.mlp_after),
        )

    def _write_rest(self) -> None:
        dtype = self._module.dtype
        embedding = "model.embed_tokens.weight"
        head = embedding if self._tied else "lm_head.weight"
        tensors = {
            "embedding": self._source.read(embedding, dtype),
            "norm": self._read("model.norm.weight"),
        }
        write(rest_file(self._folder), tensors, {"head": self._linear(head, self._form(head))})

    def _alone(self, name: str) -> PackedWeights:
        (packed,) = self._parts(name)
        return packed

    def _parts(self, *names: str) -> tuple[PackedWeights, ...]:
        """Linear layers with the same input; neighbours in one format are one matrix."""
        runs = groupby(zip(names, self._forms(*names), strict=True), key=itemgetter(1))
        return tuple(self._merged(form, *(name for name, _ in run)) for form, run in runs)

    def _gate_up(self, *names: str) -> tuple[PackedWeights, ...]:
        forms = self._forms(*names)
        parts = [self._linear(f"{n}.weight", form) for n, form in zip(names, forms, strict=True)]
        gate, up = halves(*parts) if len(parts) == 1 else parts
        return (packed_in_turns(gate, up),) if gate.format is up.format else (gate, up)

    def _merged(self, form: Format, *names: str) -> PackedWeights:
        """Linear layers with the same input, one below the other, with their biases."""
        parts = [self._linear(f"{name}.weight", form) for name in names]
        biases = [self._found(f"{name}.bias") for name in names]
        if all(bias is None for bias in biases):
            return joined(parts)
        sizes = [part.outputs for part in parts]
        both = zip(biases, sizes, strict=True)
        bias = torch.cat([torch.zeros(size) if each is None else each for each, size in both])
        whole = joined(parts)
        return replace(whole, bias=F.pad(bias, (0, -len(bias) % PANEL)))

    def _forms(self, *names: str) -> list[Format]:
        """The formats of layers with the same input, which is either of floats or of int8."""
        forms, floats = [self._form(f"{name}.weight") for name in names], self._floats
        return [floats] * len(forms) if floats in forms else forms

    def _form(self, name: str) -> Format:
        """The format that holds a weight best."""
        if self._source.is_float(name):
            return self._floats
        kind = self._source.kind(name)
        return FORMAT_OF.get(kind, Format.INT8)

    def _linear(self, name: str, form: Format) -> PackedWeights:
        kind = self._source.kind(name)
        packed = self._repacked(name) if FORMAT_OF.get(kind) is form else None
        exact = packed or form is Format.FLOAT32 or (kind.name, form) == ("BF16", Format.BFLOAT16)
        self._say(kind.name, form, "" if exact else ", rounded")
        return packed or self._rounded(name, form)

    def _repacked(self, name: str) -> PackedWeights | None:
        """A weight in its own numbers, a piece at a time; None if one is not finite."""
        kind, rows = self._source.kind(name), torch.from_numpy(self._source.blocks(name))
        parts = []
        for piece in torch.split(rows, HEAD_ROWS):
            packed = pack_blocks(kind, piece, self._source.shapes[name][1])
            if packed is None:
                return None
            parts.append(packed)
        return joined(parts)

    def _rounded(self, name: str, form: Format) -> PackedWeights:
        """A weight that is dequantized, a piece at a time if that is possible, and packed.

        Raises:
            ModelError: it was to keep its own numbers, and one of them is not finite.
        """
        if form not in (self._floats, Format.INT8, Format.INT4):
            raise ModelError(
                f"{self._source.title}: {name} has numbers that are not finite: the file is "
                "damaged; get it again."
            )
        outputs = self._source.shapes[name][0]
        whole = name.startswith("model.layers.")  # rows may be in another order in the file
        size = outputs if whole else HEAD_ROWS
        dtype = torch.float32 if form is Format.INT8 else self._module.dtype
        parts = []
        for start in range(0, outputs, size):
            rows = None if whole else (start, min(start + size, outputs))
            parts.append(pack(LinearWeights(self._source.read(name, dtype, rows), None), form))
        return joined(parts)

    def _say(self, kind: str, form: Format, how: str) -> None:
        self._runs.setdefault(kind, set()).add(f"as {form.name.lower()}{how}")

    def _read(self, name: str) -> Tensor:
        return self._source.read(name, torch.float32)

    def _norm(self, prefix: str, name: str | None) -> Tensor | None:
        """What a norm multiplies by; None if the model has none of this name."""
        weight = None if name is None else self._found(f"{prefix}{name}.weight")
        return None if weight is None else self._family.norm(weight)

    def _found(self, name: str) -> Tensor | None:
        return self._read(name) if name in self._source.shapes else None
