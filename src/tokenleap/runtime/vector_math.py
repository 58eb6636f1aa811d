"""Makes PyTorch's elementwise functions exact from their first call on (invariant 7).

On Intel processors, PyTorch computes them by MKL, which looks for the best code for this processor
when a function is called first. If several threads make that call together, one of them may run
other code this once, with errors of 1e-4 (https://github.com/pytorch/pytorch/issues/188792). One
number is computed by one thread.

A table of rotary angles, say, stays as it was first computed: with such an error in its second
half, a process would write other tokens than the next one.
"""

from __future__ import annotations

import torch

__all__ = ["prepare_vector_math"]

_FUNCTIONS = (
    *(torch.acos, torch.asin, torch.atan, torch.cos, torch.sin, torch.tan, torch.tanh),
    *(torch.exp, torch.exp2, torch.expm1, torch.log, torch.log10, torch.log1p, torch.log2),
    *(torch.erf, torch.erfc, torch.erfinv, torch.sqrt, torch.rsqrt, torch.reciprocal),
    *(torch.abs, torch.ceil, torch.floor, torch.round, torch.trunc),
)


def prepare_vector_math() -> None:
    """Call every function once on a single number. It has to be before anything is computed."""
    for dtype in (torch.float32, torch.float64):
        number = torch.full((1,), 0.5, dtype=dtype, device="cpu")
        for function in _FUNCTIONS:
            function(number)
