"""`NativeFusion`: the states of a drafting head's committed tokens, by the code in this folder."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from ctypes import byref

import torch
from torch import Tensor

from tokenleap.runtime.llama import LinearWeights
from tokenleap.runtime.native.build import library
from tokenleap.runtime.native.c_structures import CFusion
from tokenleap.runtime.native.network import checked
from tokenleap.runtime.native.pack import pack
from tokenleap.runtime.native.support import FORMATS
from tokenleap.runtime.native.threads import num_threads

__all__ = ["NativeFusion"]


class NativeFusion:
    """`fc [norm(h_1); ...; norm(h_A)]` of the hidden states of A layers.

    A state has the same bits for any number of tokens.

    Args:
        fc: [E, A E] in float32 or bfloat16, the dtype of hidden states; E as in `wrong_sizes`.
        norms: [A] weights [E] of RMSNorms, or empty.
        epsilon: of the norms.
    """

    def __init__(self, fc: Tensor, norms: Sequence[Tensor], epsilon: float) -> None:
        self._library = checked(library())
        self._size, self._dtype = len(fc), fc.dtype
        self._fc = pack(LinearWeights(fc, None), FORMATS[fc.dtype])
        self._norms = torch.cat([norm.float() for norm in norms]) if norms else None
        self._row_bytes = int(self._library.tokenleap_row_bytes(byref(self._fc.c)))
        self._epsilon = epsilon

    def __call__(self, hidden: Sequence[Tensor]) -> Tensor:
        """[A] of [n, E] hidden states -> [n, E] states."""
        hidden = [states.contiguous() for states in hidden]
        addresses = array("Q", [states.data_ptr() for states in hidden])
        count = len(hidden[0])
        states = torch.empty(count, self._size, dtype=self._dtype)
        inputs = torch.empty(count * self._row_bytes, dtype=torch.uint8)
        arguments = CFusion(
            fc=self._fc.c,
            norms=None if self._norms is None else self._norms.data_ptr(),
            hidden=addresses.buffer_info()[0],
            inputs=inputs.data_ptr(),
            states=states.data_ptr(),
            layers=len(hidden),
            nodes=count,
            threads=num_threads(),
            is_bf16=self._dtype == torch.bfloat16,
            epsilon=self._epsilon,
        )
        self._library.tokenleap_fuse(byref(arguments))
        return states
