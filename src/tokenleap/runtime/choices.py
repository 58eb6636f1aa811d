"""What users may pass as `quantization` and `runtime`.

This file does not import PyTorch, so that the command line's help pages appear at once.
"""

from __future__ import annotations

__all__ = [
    "AUTO",
    "DRAFTING",
    "NONE",
    "OWN",
    "QUANTIZATIONS",
    "QUANTIZATION_OPTIONS",
    "RUNTIMES",
    "TORCH_RUNTIMES",
]

QUANTIZATIONS = ("int8", "int4")
AUTO = "auto"
"""A GGUF file in its own numbers, and other weights as they are."""
NONE = "none"
"""Weights as they are, those of a GGUF file dequantized."""
QUANTIZATION_OPTIONS = (AUTO, NONE, *QUANTIZATIONS)
OWN = "gguf"
"""What `Target.quantization` says of a GGUF file in its own numbers."""
DRAFTING = "int4-draft"
"""What `Target.quantization` says of a draft model in int4 whose output layer is in int4, too.
Users write "int4" as `draft_quantization`."""
TORCH_RUNTIMES = {
    "lean": "PyTorch operations",
    "module": "the Transformers module",
    "compiled": "the Transformers module, its MLPs under torch.compile",
}
"""What "torch" stands for: names that `LLM.runtime` has, and what they mean."""
RUNTIMES = ("auto", "native", "torch", *TORCH_RUNTIMES)
