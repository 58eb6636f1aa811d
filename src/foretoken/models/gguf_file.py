"""Reading a GGUF file: is it complete, and can all of it be converted?

A setting or a tensor that conversion dropped could change what the model computes. A file with an
unknown one is therefore refused. `resolver` opens files to convert, and `foretoken bench` compares
a peer's file with the target.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf

from foretoken.errors import ModelError

__all__ = ["GgufFile"]

_MAGIC = b"GGUF"
# Decoders whose tensors only need new names; "llama" also reorders query and key rows.
_ARCHITECTURES = ("llama", "qwen2", "qwen3")
# Settings for which Transformers would otherwise use another model's value.
_REQUIRED_SETTINGS = {
    "context_length",
    "block_count",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "attention.layer_norm_rms_epsilon",
}
# Settings that are converted, or follow from the tensors' shapes.
_KNOWN_SETTINGS = _REQUIRED_SETTINGS | {
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "rope.dimension_count",
    "rope.freq_base",
    "vocab_size",
}
_HINT = "use the model's safetensors folder instead"


@dataclass(frozen=True, slots=True)
class GgufFile:
    """An open GGUF file.

    Attributes:
        path: The file.
        reader: Its metadata, and its tensors, which are memory-mapped.
    """

    path: Path
    reader: gguf.GGUFReader

    @classmethod
    def open(cls, path: Path) -> GgufFile:
        """Open a file and check that all of it can be converted.

        Raises:
            ModelError: If it is not a GGUF file, is truncated, is one of several parts, or has an
                architecture or a setting that cannot be converted.
        """
        file = cls.read(path)
        file._check_content()
        return file

    @classmethod
    def read(cls, path: Path) -> GgufFile:
        """Open a file of any architecture, without the checks of `open`.

        Raises:
            ModelError: If it is not a GGUF file, or is truncated.
        """
        _check_magic(path)
        try:
            return cls(path, gguf.GGUFReader(path))
        # The reader trusts its file: a damaged one can raise any exception.
        except Exception as error:
            size = path.stat().st_size
            raise ModelError(
                f"{path} is truncated or damaged ({size} bytes: {error}); get the file again"
            ) from error

    @property
    def architecture(self) -> str:
        """GGUF's name of the model's architecture."""
        return str(self.get("general.architecture"))

    @property
    def elements(self) -> int:
        """The number of elements of all tensors."""
        return sum(int(tensor.n_elements) for tensor in self.reader.tensors)

    def get(self, key: str) -> Any:
        """The value of a metadata key, or None if the file does not have it."""
        field = self.reader.get_field(key)
        return None if field is None else field.contents()

    def setting(self, name: str) -> Any:
        """The value of one of the architecture's settings, or None."""
        return self.get(f"{self.architecture}.{name}")

    def _check_content(self) -> None:
        if self.architecture not in _ARCHITECTURES:
            raise ModelError(
                f"{self.path} has the GGUF architecture {self.architecture!r}, which cannot be "
                f"converted (supported: {', '.join(_ARCHITECTURES)}); {_HINT}"
            )
        if (self.get("split.count") or 1) > 1:
            raise ModelError(f"{self.path} is one part of a split GGUF file; merge the parts first")
        prefix = f"{self.architecture}."
        keys = self.reader.fields
        names = {key.removeprefix(prefix) for key in keys if key.startswith(prefix)}
        if missing := sorted(_REQUIRED_SETTINGS - names):
            raise ModelError(f"{self.path} lacks settings of its model: {', '.join(missing)}")
        if unknown := sorted(names - _KNOWN_SETTINGS):
            raise ModelError(
                f"{self.path} has settings that cannot be converted: {', '.join(unknown)}; {_HINT}"
            )


def _check_magic(path: Path) -> None:
    try:
        with path.open("rb") as file:
            magic = file.read(len(_MAGIC))
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error
    if magic != _MAGIC:
        raise ModelError(f"{path} is not a GGUF file: it starts with {magic!r}, not {_MAGIC!r}")
