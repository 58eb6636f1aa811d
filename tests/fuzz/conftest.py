"""The tiny GGUF files of the tests of models."""

from __future__ import annotations

from tests.models.conftest import (
    byte_vocabulary,
    bytes_as_letters,
    make_gguf,
    make_model,
)

__all__ = ["byte_vocabulary", "bytes_as_letters", "make_gguf", "make_model"]
