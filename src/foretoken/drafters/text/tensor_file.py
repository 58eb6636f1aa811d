"""A safetensors file of one format: written whole or not at all, mapped into memory when read.

Its metadata name the format and its version, so that a file of another kind, or of another
Foretoken, is told from a damaged one.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from foretoken.errors import ForetokenError

__all__ = ["TensorFile"]


@dataclass(frozen=True)
class TensorFile:
    """A kind of file.

    Args:
        format: `format` in the metadata.
        version: `version` in the metadata.
        what: what users call such a file.
        made_by: the command that makes one.
    """

    format: str
    version: int
    what: str
    made_by: str

    def save(
        self, path: str | Path, arrays: Mapping[str, NDArray[Any]], metadata: Mapping[str, str]
    ) -> None:
        """Write a file, whole or not at all.

        Raises:
            ForetokenError: it cannot be written; what was there before is untouched.
        """
        path = Path(path)
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        named = {"format": self.format, "version": str(self.version), **metadata}
        beside = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            beside.touch()
            mode = beside.stat().st_mode  # safetensors makes its files private
            save_file(tensors, beside, named)
            beside.chmod(mode)
            beside.replace(path)
        except (OSError, SafetensorError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise ForetokenError(f"cannot write {path}: {reason}") from error
        finally:
            beside.unlink(missing_ok=True)

    def load(
        self, path: str | Path, names: Iterable[str]
    ) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Those of the named tensors that are there, mapped into memory, and the metadata.

        Raises:
            ForetokenError: there is no such file, or it is damaged, of another kind or another
                version.
        """
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                self._check(path, metadata)
                here = set(file.keys())
                tensors = {name: file.get_tensor(name) for name in names if name in here}
        except OSError as error:
            raise ForetokenError(f"cannot read {path}: {error.strerror or error}") from error
        except SafetensorError as error:
            raise ForetokenError(
                f"{path} is damaged or no {self.what}: make one with '{self.made_by}'."
            ) from error
        return tensors, metadata

    def _check(self, path: str | Path, metadata: Mapping[str, str]) -> None:
        if metadata.get("format") != self.format:
            raise ForetokenError(f"{path} is no {self.what}: make one with '{self.made_by}'.")
        if metadata.get("version") != str(self.version):
            raise ForetokenError(
                f"{path} has version {metadata.get('version')} of the format and this Foretoken "
                f"reads version {self.version}: build it again with '{self.made_by}'."
            )

    def damaged(self, path: str | Path) -> ForetokenError:
        """The error for a file whose content does not fit together."""
        return ForetokenError(f"{path} is damaged: build it again with '{self.made_by}'.")
