"""Values that users may choose. This file needs no PyTorch, so that help pages are quick."""

from __future__ import annotations

__all__ = ["QUANTIZATIONS", "RUNTIMES"]

QUANTIZATIONS = ("int8", "int4")
RUNTIMES = ("auto", "native", "torch", "cuda", "compiled")
