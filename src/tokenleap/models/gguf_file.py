"""Reading a GGUF file, or all parts of a split one: is it complete, and can it be converted?

A setting or a tensor that conversion dropped could change what the model computes. A file with an
unknown one is therefore refused. `resolver` opens files to convert, and `tokenleap bench` compares
a peer's file with the target.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from tokenleap.errors import ModelError
from tokenleap.models.gguf_architectures import (
    ARCHITECTURES,
    REQUIRED_SETTINGS,
    Architecture,
    named,
)

__all__ = ["GgufFile", "GgufTensor", "gguf_parts"]

Bytes = npt.NDArray[np.uint8]

_MAGIC = b"GGUF"
_HINT = "use the model's safetensors folder instead"
_PART = re.compile(r"(.*-)(\d{5})(-of-(\d{5})\.gguf)", re.IGNORECASE)
_BLOCK = re.compile(r"blk\.(\d+)\.")
_FLOATS = {
    gguf.GGMLQuantizationType.F32,
    gguf.GGMLQuantizationType.F16,
    gguf.GGMLQuantizationType.BF16,
}


def gguf_parts(path: Path) -> list[Path]:
    """All files of a GGUF model in order: the file, or the parts of a split one.

    Raises:
        ModelError: A part is missing.
    """
    match = _PART.fullmatch(path.name)
    if match is None:
        return [path]
    start, _, end, count = match.groups()
    parts = [path.with_name(f"{start}{number:05d}{end}") for number in range(1, int(count) + 1)]
    if missing := [part.name for part in parts if not part.is_file()]:
        raise ModelError(
            f"{path} is one of {count} parts, and {missing[0]} is not beside it; get all parts"
        )
    return parts


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor of a GGUF file.

    Attributes:
        file: The file, or the part, that has it.
        name: GGUF's name.
        kind: How its numbers are stored.
        shape: In PyTorch's order.
        offset: Where it begins in the file, in bytes.
        num_bytes: Its size in the file.
    """

    file: Path
    name: str
    kind: gguf.GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int
    num_bytes: int

    @property
    def elements(self) -> int:
        """The number of elements."""
        return int(np.prod(self.shape))

    @property
    def is_float(self) -> bool:
        """Whether its numbers are not quantized."""
        return self.kind in _FLOATS

    def rows(self, first: int = 0, stop: int | None = None) -> Bytes:
        """The bytes of some rows, or all, [rows, bytes of a row].

        They are read, not mapped: pages of a mapped file would count as memory.

        Raises:
            ModelError: The file cannot be read any more.
        """
        count = self.shape[0]
        width, stop = self.num_bytes // count, count if stop is None else stop
        size = (stop - first) * width
        try:
            found = np.fromfile(self.file, np.uint8, size, offset=self.offset + first * width)
        except OSError as error:
            raise ModelError(f"cannot read {self.file}: {error.strerror or error}") from error
        if len(found) != size:
            raise ModelError(f"{self.file} is truncated; get the file again")
        return found.reshape(stop - first, width)

    def values(self, first: int = 0, stop: int | None = None) -> npt.NDArray[np.float32]:
        """The dequantized values of some rows, or all, in GGUF's order.

        Raises:
            ModelError: The file cannot be read any more, or a value is not finite.
        """
        rows = self.rows(first, stop)
        flat = gguf.dequantize(rows, self.kind).astype(np.float32, copy=False)
        values = flat.reshape(len(rows), *self.shape[1:])
        if not np.isfinite(values).all():
            raise ModelError(
                f"{self.file} is damaged: {self.name} has weights that are not finite; get the "
                f"file again"
            )
        return values


class _Reader(gguf.GGUFReader):
    """The package's reader, which takes seconds for a vocabulary, with arrays read at once."""

    def _get_field_parts(
        self, orig_offs: int, raw_type: int
    ) -> tuple[int, list[npt.NDArray[Any]], list[int], list[gguf.GGUFValueType]]:
        if raw_type != gguf.GGUFValueType.ARRAY or self.byte_order != "I":
            return super()._get_field_parts(orig_offs, raw_type)
        data = self.data.view(np.ndarray)
        kind, count = struct.unpack_from("<IQ", data.data, orig_offs)
        parts: list[npt.NDArray[Any]] = [data[orig_offs : orig_offs + 4]]
        at = orig_offs + 12
        types = [gguf.GGUFValueType.ARRAY, gguf.GGUFValueType(kind)]
        if kind == gguf.GGUFValueType.STRING:
            content = data.data
            for _ in range(count):
                (length,) = struct.unpack_from("<Q", content, at)
                parts.append(data[at + 8 : at + 8 + length])
                at += 8 + length
            return at - orig_offs, parts, list(range(1, len(parts))), types
        if kind not in self.gguf_scalar_to_np:
            return super()._get_field_parts(orig_offs, raw_type)
        numbers = self._get(at, self.gguf_scalar_to_np[types[1]], count)
        if len(numbers) != count:
            raise ValueError("an array that goes on after the end of the file")
        return at - orig_offs + numbers.nbytes, [*parts, numbers], [1], types


@dataclass(frozen=True, slots=True)
class GgufFile:
    """An open GGUF file.

    Attributes:
        path: The file; the first part of a split one.
        reader: Its metadata.
        tensors: The tensors of all parts.
    """

    path: Path
    reader: gguf.GGUFReader
    tensors: tuple[GgufTensor, ...]

    @classmethod
    def open(cls, path: Path) -> GgufFile:
        """Open a file and check that all of it can be converted.

        Raises:
            ModelError: If it is not a GGUF file, is truncated, lacks a part, or has an
                architecture, a setting or a quantization that cannot be converted.
        """
        file = cls.read(path)
        file._check_content()
        return file

    @classmethod
    def read(cls, path: Path) -> GgufFile:
        """Open a file of any architecture, without the checks of `open`.

        Raises:
            ModelError: If it is not a GGUF file, is truncated, lacks a part, or has a quantization
                that is not known.
        """
        parts = gguf_parts(path)
        readers = [_reader(part) for part in parts]
        tensors = [each for part in zip(parts, readers, strict=True) for each in _tensors(*part)]
        file = cls(parts[0], readers[0], tuple(tensors))
        count = file.get("split.count") or 1
        if not isinstance(count, int):
            raise file.wrong("split.count")
        if count != len(parts):
            raise ModelError(
                f"{path} is one of {count} parts, but is not named like NAME-00001-of-"
                f"{count:05d}.gguf, so the others cannot be found; give the parts their names back"
            )
        return file

    @property
    def architecture(self) -> str:
        """GGUF's name of the model's architecture."""
        return str(self.get("general.architecture"))

    @property
    def elements(self) -> int:
        """The number of elements of all tensors."""
        return sum(tensor.elements for tensor in self.tensors)

    def get(self, key: str) -> Any:
        """The value of a metadata key, or None if the file does not have it.

        Raises:
            ModelError: It cannot be read.
        """
        field = self.reader.get_field(key)
        try:
            return None if field is None else field.contents()
        except (ValueError, TypeError, IndexError) as error:
            raise self.wrong(key) from error

    def wrong(self, key: str) -> ModelError:
        """The error for a metadata key whose value no model has."""
        return ModelError(f"{self.path} has a wrong value for {key}; get the file again")

    def token_id(self, name: str) -> int | None:
        """The id of a special token such as "eos", or None if the file does not have it.

        Raises:
            ModelError: It is not in the vocabulary.
        """
        key = f"tokenizer.ggml.{name}_token_id"
        found = self.get(key)
        tokens = self.reader.get_field("tokenizer.ggml.tokens")
        count = 0 if tokens is None else len(tokens.data)
        if found is not None and not (isinstance(found, int) and 0 <= found < count):
            raise self.wrong(key)
        return found

    def setting(self, name: str) -> Any:
        """The value of one of the architecture's settings, or None."""
        return self.get(f"{self.architecture}.{name}")

    def has(self, name: str) -> bool:
        """Whether the file has one of the architecture's settings."""
        return f"{self.architecture}.{name}" in self.reader.fields

    @property
    def settings(self) -> set[str]:
        """The architecture's settings that the file has."""
        prefix = f"{self.architecture}."
        return {key.removeprefix(prefix) for key in self.reader.fields if key.startswith(prefix)}

    @property
    def about(self) -> Architecture:
        """Its architecture.

        Raises:
            ModelError: It is not known.
        """
        found = named(self.architecture, self.settings)
        if found is None:
            supported = ", ".join(dict.fromkeys(each.name for each in ARCHITECTURES))
            raise ModelError(
                f"{self.path} has the GGUF architecture {self.architecture!r}, which cannot be "
                f"converted (supported: {supported}); {_HINT}"
            )
        return found

    def _check_content(self) -> None:
        about = self.about
        for tensor in self.tensors:
            if not tensor.is_float and tensor.kind not in gguf.quants._type_traits:
                raise ModelError(
                    f"{self.path} has {tensor.name} in {tensor.kind.name}, a quantization that "
                    f"cannot be read; get the model in another one"
                )
        names = self.settings
        if missing := sorted({*REQUIRED_SETTINGS, *about.required} - names):
            raise ModelError(f"{self.path} lacks settings of its model: {', '.join(missing)}")
        if unknown := sorted(names - about.known):
            raise ModelError(
                f"{self.path} has settings that cannot be converted: {', '.join(unknown)}; {_HINT}"
            )
        blocks = {match[1] for each in self.tensors if (match := _BLOCK.match(each.name))}
        if self.setting("block_count") != len(blocks):
            raise ModelError(
                f"{self.path} has the tensors of {len(blocks)} blocks, and its block_count is "
                f"{self.setting('block_count')!r:.30}; get the file again"
            )


def _reader(path: Path) -> gguf.GGUFReader:
    _check_magic(path)
    try:
        return _Reader(path)
    # The reader trusts its file: a damaged one can raise any exception.
    except Exception as error:
        unknown = re.search(r"(\d+)\)? is not a valid GGMLQuantizationType", str(error))
        if unknown is not None:
            raise ModelError(
                f"{path} has tensors of the unknown quantization {unknown[1]}; get the model in "
                f"another one"
            ) from error
        size = path.stat().st_size
        raise ModelError(
            f"{path} is truncated or damaged: its {size} bytes do not hold what its head "
            f"describes; get the file again"
        ) from error


def _tensors(path: Path, reader: gguf.GGUFReader) -> Iterator[GgufTensor]:
    for each in reader.tensors:
        shape = tuple(reversed(each.shape.tolist()))
        if not shape or min(shape) < 1:
            raise ModelError(f"{path} is damaged: {each.name} has no numbers; get the file again")
        yield GgufTensor(
            path, each.name, each.tensor_type, shape, int(each.data_offset), int(each.n_bytes)
        )


def _check_magic(path: Path) -> None:
    try:
        with path.open("rb") as file:
            magic = file.read(len(_MAGIC))
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error
    if magic != _MAGIC:
        raise ModelError(f"{path} is not a GGUF file: it starts with {magic!r}, not {_MAGIC!r}")
