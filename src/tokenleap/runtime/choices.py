"""Values that users may pass as `quantization` and `runtime`.

This file does not import PyTorch, so that the command line's help pages appear at once.
"""

from __future__ import annotations

QUANTIZATIONS = ("int8", "int4")
AUTO = "auto"  # a GGUF file keeps its quantization, and other weights stay as they are
NONE = "none"  # weights as they are, those of a GGUF file dequantized
QUANTIZATION_OPTIONS = (AUTO, NONE, *QUANTIZATIONS)
OWN = "gguf"  # `Target.quantization` of a GGUF file that keeps its quantization
DRAFTING = "int4-draft"
"""`Target.quantization` of a draft model in int4 whose output layer is in int4, too.
Users write "int4" as `draft_quantization`."""
TORCH_RUNTIMES = {
    "lean": "PyTorch operations",
    "module": "the Transformers module",
    "compiled": "the Transformers module, its MLPs under torch.compile",
}
"""The meaning of "torch": names that `LLM.runtime` has, and their descriptions."""
RUNTIMES = ("auto", "native", "torch", *TORCH_RUNTIMES)
