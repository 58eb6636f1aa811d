"""The weights of a GGUF file, by their Hugging Face names: as they are stored, or as values.

`runtime/packed.py` packs them. `convert` writes the values of all of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import gguf
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tokenleap.errors import ModelError
from tokenleap.models.gguf_file import Bytes, GgufFile, GgufTensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["GgufWeights"]

_Sources: TypeAlias = tuple[GgufTensor, ...]
"""The tensors that make up a weight: one, or the gates and the ups of all experts."""

_PIECE_ELEMENTS = 2**23
"""Values that are dequantized at once."""

_EXPERTS = ".experts."
_GATE_UP = "gate_up_proj"


class GgufWeights:
    """The weights of a GGUF file (see `WeightSource`).

    Args:
        file: the file, of which everything can be converted.
        model: its modules, on any device.

    Raises:
        ModelError: the file lacks a tensor of the model, or has another one, or one of a wrong
            shape.
    """

    def __init__(self, file: GgufFile, model: PreTrainedModel) -> None:
        self.title = file.path.stem
        self._file, self._model = file, model
        self._sources = _sources(file, model)
        state = model.state_dict()
        self._shapes = {name: tuple(state[name].shape) for name in self._sources}
        for name, sources in self._sources.items():
            _check_shape(file, sources, self._shapes[name])

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """See `WeightSource.shapes`."""
        return self._shapes

    @property
    def num_bytes(self) -> int:
        """See `WeightSource.num_bytes`."""
        return sum(tensor.num_bytes for tensor in self._file.tensors)

    def kind(self, name: str) -> gguf.GGMLQuantizationType:
        """How a weight's numbers are stored."""
        return self._sources[name][0].kind

    def is_float(self, name: str) -> bool:
        """Whether a weight's numbers are not quantized."""
        return self._sources[name][0].is_float

    def blocks(self, name: str) -> Bytes:
        """The bytes of all rows of a weight [rows, bytes of a row], in the model's order."""
        (tensor,) = self._sources[name]
        return np.ascontiguousarray(self._reordered(tensor, tensor.rows()))

    def read(self, name: str, dtype: torch.dtype, rows: tuple[int, int] | None = None) -> Tensor:
        """See `WeightSource.read`."""
        sources = self._sources[name]
        if len(sources) > 1:  # [experts, I, E] each
            assert rows is None
            return torch.cat([_values(tensor, dtype) for tensor in sources], dim=1)
        (tensor,) = sources
        if self._file.about.norms_from_one and name.endswith("norm.weight"):
            return (_values(tensor, torch.float32) - 1).to(dtype)
        if rows is not None:  # of the embedding or the output layer, which are never reordered
            return _values(tensor, dtype, *rows)
        values = _values(tensor, dtype)
        given = np.arange(len(values))[:, None]
        order = self._reordered(tensor, given)
        if order is not given:
            values = values[torch.from_numpy(order[:, 0])]
        return values.view(self._shapes[name])

    def _reordered(self, tensor: GgufTensor, rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """All rows of a tensor, values or bytes, in the order of the Hugging Face model."""
        config = self._model.config
        if self._file.about.pairs and ".attn_q." in tensor.name:
            return _rotary_halves(rows, config.num_attention_heads)
        if self._file.about.pairs and ".attn_k." in tensor.name:
            return _rotary_halves(rows, config.num_key_value_heads)
        return rows


def _sources(file: GgufFile, model: PreTrainedModel) -> dict[str, _Sources]:
    """The tensors of every weight, by Hugging Face name.

    Raises:
        ModelError: The file lacks a tensor of the model, or has one that the model lacks.
    """
    wanted = _gguf_names(file, model)
    present = {tensor.name: tensor for tensor in file.tensors}
    needed = {each for names in wanted.values() for each in names}
    if missing := sorted(needed - present.keys()):
        raise ModelError(
            f"{file.path} lacks {len(missing)} weights of its model, {missing[0]} first; "
            f"get the file again"
        )
    if unknown := sorted(present.keys() - needed):
        raise ModelError(
            f"{file.path} has {len(unknown)} weights that cannot be converted, {unknown[0]} "
            f"first; use the model's safetensors folder instead"
        )
    return {name: tuple(present[each] for each in names) for name, names in wanted.items()}


def _gguf_names(file: GgufFile, model: PreTrainedModel) -> dict[str, list[str]]:
    """GGUF's names of the tensors of every weight, by Hugging Face name."""
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    layers = model.config.num_hidden_layers
    gguf_names = gguf.get_tensor_name_map(kinds[file.architecture], layers)
    names: dict[str, list[str]] = {}
    for name in model.state_dict():
        stem, _, suffix = name.rpartition(".")
        if _EXPERTS in name:  # one parameter for all experts, without "weight"
            parts = ("gate_proj", "up_proj") if suffix == _GATE_UP else (suffix,)
            names[name] = [f"{gguf_names.get_name(f'{stem}.{part}')}.weight" for part in parts]
        else:
            names[name] = [f"{gguf_names.get_name(stem)}.{suffix}"]
    if model.config.tie_word_embeddings:
        del names["lm_head.weight"]
    return names


def _check_shape(file: GgufFile, sources: _Sources, expected: tuple[int, ...]) -> None:
    """Check that tensors have the shape of the model's parameter.

    Raises:
        ModelError: If they do not.
    """
    tensor = sources[0]
    shapes = [source.shape for source in sources]
    if len(sources) > 1:
        experts, outputs, *inputs = expected
        fits = shapes == len(sources) * [(experts, outputs // len(sources), *inputs)]
    else:  # a single row is stored as a vector
        fits = tensor.shape == expected or (1, *tensor.shape) == expected
    if not fits:
        found = shapes[0] if len(shapes) == 1 else shapes
        raise ModelError(f"{file.path} has {tensor.name} as {found}, expected {expected}")


def _values(
    tensor: GgufTensor, dtype: torch.dtype, first: int = 0, stop: int | None = None
) -> Tensor:
    """Some rows of a tensor, or all, in GGUF's order."""
    stop = tensor.shape[0] if stop is None else stop
    values = torch.empty(stop - first, *tensor.shape[1:], dtype=dtype, device="cpu")
    for start, end in _pieces(tensor, first, stop):
        values[start - first : end - first] = torch.from_numpy(tensor.values(start, end))
    return values


def _pieces(tensor: GgufTensor, first: int, stop: int) -> list[tuple[int, int]]:
    """Rows from `first` to `stop` in pieces of a limited size."""
    rows = max(1, _PIECE_ELEMENTS * tensor.shape[0] // max(1, tensor.elements))
    return [(start, min(start + rows, stop)) for start in range(first, stop, rows)]


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
