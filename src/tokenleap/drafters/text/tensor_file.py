"""Safetensors files of one format: written atomically, and mapped into memory when read.

`ngrams` and `datastore` save their arrays with it. The metadata name the format and its version.
An error can therefore say whether a file is of another version or damaged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tokenleap.core.files import renamed, write_whole
from tokenleap.errors import TokenleapError

__all__ = ["TensorFile"]


@dataclass(frozen=True)
class TensorFile:
    """A kind of file.

    Args:
        format: the value of `format` in the metadata.
        version: the value of `version` in the metadata.
        what: the name of such a file in messages, such as "datastore".
        made_by: the command that makes such a file.
    """

    format: str
    version: int
    what: str
    made_by: str

    def save(
        self, path: str | Path, arrays: Mapping[str, NDArray[Any]], metadata: Mapping[str, str]
    ) -> None:
        """Write a file atomically.

        Args:
            path: the file.
            arrays: the arrays by name.
            metadata: metadata besides `format` and `version`.

        Raises:
            TokenleapError: the file cannot be written. An existing file then stays as it was.
        """
        path = Path(path)
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        named = {"format": self.format, "version": str(self.version), **metadata}
        try:
            write_whole(path, lambda beside: save_file(tensors, beside, named))
        except (OSError, SafetensorError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise TokenleapError(f"cannot write {path}: {reason}") from error

    def load(
        self, path: str | Path, names: Iterable[str]
    ) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Map a file into memory.

        Args:
            path: the file.
            names: names of the tensors to read; those that the file lacks are left out.

        Returns:
            The tensors by name, and the metadata.

        Raises:
            TokenleapError: the file cannot be read, is damaged, or is of another kind or version.
        """
        try:
            with safe_open(path, framework="pt") as file:
                metadata = renamed(file.metadata() or {})
                self._check(path, metadata)
                present = set(file.keys())
                tensors = {name: file.get_tensor(name) for name in names if name in present}
            if any(each.data_ptr() % each.element_size() for each in tensors.values()):
                raise self.damaged(path)  # unaligned: a memoryview cannot read it
        except OSError as error:
            raise TokenleapError(f"cannot read {path}: {error.strerror or error}") from error
        except (SafetensorError, RuntimeError) as error:  # of PyTorch: unaligned tensors
            raise TokenleapError(
                f"{path} is not a valid {self.what}: make one with '{self.made_by}'."
            ) from error
        return tensors, metadata

    def _check(self, path: str | Path, metadata: Mapping[str, str]) -> None:
        if metadata.get("format") != self.format:
            raise TokenleapError(
                f"{path} is not a valid {self.what}: make one with '{self.made_by}'."
            )
        if metadata.get("version") != str(self.version):
            raise TokenleapError(
                f"{path} has version {metadata.get('version')} of the format, and this Tokenleap "
                f"reads version {self.version}: build it again with '{self.made_by}'."
            )

    def damaged(self, path: str | Path) -> TokenleapError:
        """The error for a file whose tensors are inconsistent."""
        return TokenleapError(f"{path} is damaged: build it again with '{self.made_by}'.")
