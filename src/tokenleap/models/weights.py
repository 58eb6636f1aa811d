"""The weights of a model on disk, read one tensor at a time.

Packing reads a model with it, so that the model is never in memory as a whole. `load` reads whole
models.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tokenleap.core.files import parsed_json
from tokenleap.errors import ModelError
from tokenleap.models.folder import weight_files
from tokenleap.models.store import identity_of

__all__ = ["FolderWeights", "WeightSource"]

_PIECE_BYTES = 64 * 2**20
"""Read and converted at once. A file is not mapped: pages that were read would count as memory."""

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Those that the header of a safetensors file names, and that weights are converted from."""


class WeightSource(Protocol):
    """Where packing reads a model's tensors."""

    title: str
    """A short name for the model."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor, by its name in the Hugging Face model."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors on disk."""
        ...

    def read(self, name: str, dtype: torch.dtype, rows: tuple[int, int] | None = None) -> Tensor:
        """A tensor, converted to a dtype."""
        ...


@dataclass(frozen=True)
class _Place:
    """Where a tensor lies in a safetensors file."""

    file: Path
    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Its size on disk."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class FolderWeights:
    """The weights of a Hugging Face folder."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.title = folder, _title(folder)
        self._places: dict[str, _Place] = {}
        for file in weight_files(folder):
            self._places |= _places(file)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: place.shape for name, place in self._places.items()}

    @property
    def num_bytes(self) -> int:
        return sum(place.num_bytes for place in self._places.values())

    def identity(self) -> str:
        """Text that differs when the files have changed."""
        return identity_of([self._folder / "config.json", *weight_files(self._folder)])

    def read(self, name: str, dtype: torch.dtype, rows: tuple[int, int] | None = None) -> Tensor:
        place = self._places[name]
        first, stop = rows or (0, place.shape[0])
        converted = torch.empty(stop - first, *place.shape[1:], dtype=dtype, device="cpu")
        flat, piece = converted.flatten(), _PIECE_BYTES // place.dtype.itemsize
        try:
            with place.file.open("rb") as file:
                file.seek(place.start + first * (place.num_bytes // place.shape[0]))
                for start in range(0, len(flat), piece):
                    part = flat[start : start + piece]
                    content = bytearray(len(part) * place.dtype.itemsize)
                    if file.readinto(content) != len(content):
                        raise ModelError(f"{place.file} is truncated; get it again")
                    part.copy_(torch.frombuffer(content, dtype=place.dtype))
        except OSError as error:
            raise ModelError(f"cannot read {place.file}: {error.strerror or error}") from error
        return converted


def _title(folder: Path) -> str:
    """A folder's name; of the Hub's cache, whose folders are named by their commit, the model's."""
    path = folder.resolve()
    return path.parent.parent.name if path.parent.name == "snapshots" else path.name


def _places(file: Path) -> dict[str, _Place]:
    """Where the tensors of a safetensors file lie, by name."""
    try:
        with safe_open(file, "pt"):  # checks the header and the file's length
            pass
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            header = parsed_json(opened.read(length))
    except (OSError, SafetensorError, ValueError) as error:
        raise ModelError(f"{file} is truncated or damaged ({error}); get it again") from error
    header.pop("__metadata__", None)
    if other := {entry["dtype"] for entry in header.values()} - _DTYPES.keys():
        raise ModelError(f"{file} has weights of the dtype {min(other)}, which cannot be packed")
    return {
        name: _Place(
            file,
            8 + length + entry["data_offsets"][0],
            _DTYPES[entry["dtype"]],
            tuple(entry["shape"]),
        )
        for name, entry in header.items()
    }
