"""What users may pass as `quantization` and `runtime`.

This file does not import PyTorch, so that the command line's help pages appear at once.
"""

from __future__ import annotations

__all__ = ["QUANTIZATIONS", "RUNTIMES"]

QUANTIZATIONS = ("int8", "int4")
RUNTIMES = ("auto", "native", "torch", "cuda", "compiled")
