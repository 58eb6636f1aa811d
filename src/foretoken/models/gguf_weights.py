"""The weights of a GGUF file, by their Hugging Face names: as they are stored, or as values.

`runtime/packed.py` packs them. `convert` writes the values of all of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import gguf
import numpy as np
import torch
from torch import Tensor

from foretoken.models.convert import check_shape, reordered, tensor_names
from foretoken.models.gguf_file import Bytes, GgufFile, GgufTensor
from foretoken.models.identity import identity_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["GgufWeights"]

_PIECE_ELEMENTS = 2**23
"""Values that are dequantized at once."""


class GgufWeights:
    """The weights of a GGUF file (see `WeightSource`).

    Args:
        file: the file, of which everything can be converted.
        model: its modules, on any device.
        folder: a folder with its configuration and tokenizer.

    Raises:
        ModelError: the file lacks a tensor of the model, or has another one, or one of a wrong
            shape.
    """

    def __init__(self, file: GgufFile, model: PreTrainedModel, folder: Path) -> None:
        self.folder, self.title = folder, file.path.stem
        self._file, self._model = file, model
        names = tensor_names(file, model)
        self._tensors = {names[tensor.name]: tensor for tensor in file.tensors}
        for name, tensor in self._tensors.items():
            check_shape(file, tensor, model, name)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """See `WeightSource.shapes`."""
        return {name: tensor.shape for name, tensor in self._tensors.items()}

    @property
    def num_bytes(self) -> int:
        """See `WeightSource.num_bytes`."""
        return sum(tensor.num_bytes for tensor in self._tensors.values())

    def identity(self) -> str:
        """See `WeightSource.identity`."""
        return identity_of(list(dict.fromkeys(each.file for each in self._file.tensors)))

    def kind(self, name: str) -> gguf.GGMLQuantizationType:
        """How a tensor's numbers are stored."""
        return self._tensors[name].kind

    def is_float(self, name: str) -> bool:
        """Whether a tensor's numbers are not quantized."""
        return self._tensors[name].is_float

    def blocks(self, name: str) -> Bytes:
        """The bytes of all rows of a tensor [rows, bytes of a row], in the model's order."""
        tensor = self._tensors[name]
        return np.ascontiguousarray(reordered(self._file, tensor, self._model, tensor.rows()))

    def read(self, name: str, dtype: torch.dtype, rows: tuple[int, int] | None = None) -> Tensor:
        """See `WeightSource.read`."""
        tensor = self._tensors[name]
        first, stop = rows or (0, tensor.shape[0])
        values = torch.empty(stop - first, *tensor.shape[1:], dtype=dtype, device="cpu")
        for start, end in _pieces(tensor, first, stop):
            values[start - first : end - first] = torch.from_numpy(tensor.values(start, end))
        if rows is not None:
            return values  # of the embedding or the output layer, which are never reordered
        given = np.arange(stop)[:, None]
        order = reordered(self._file, tensor, self._model, given)
        return values if order is given else values[torch.from_numpy(order[:, 0])]


def _pieces(tensor: GgufTensor, first: int, stop: int) -> list[tuple[int, int]]:
    """Rows from `first` to `stop` in pieces of a limited size."""
    rows = max(1, _PIECE_ELEMENTS * tensor.shape[0] // max(1, tensor.elements))
    return [(start, min(start + rows, stop)) for start in range(first, stop, rows)]
