"""What users may choose, in a file that needs no PyTorch: help pages are to be quick."""

from __future__ import annotations

__all__ = ["QUANTIZATIONS", "RUNTIMES"]

QUANTIZATIONS = ("int8", "int4")
RUNTIMES = ("auto", "native", "torch", "cuda", "compiled")
