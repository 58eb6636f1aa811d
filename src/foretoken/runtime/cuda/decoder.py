"""What computes a pass on a GPU: the lean decoder for the Llama family, else the module itself."""

from __future__ import annotations

from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from foretoken.runtime.lean import LeanDecoder
from foretoken.runtime.llama import is_llama
from foretoken.runtime.module import ModuleNetwork
from foretoken.runtime.network import Network

__all__ = ["DenseLinear", "DeviceDecoder", "decoder_for"]


class DenseLinear:
    """`y = x W^T + b` as PyTorch computes it: cuBLAS needs no packing.

    Args:
        weight: [out, in].
        bias: [out] or None.
    """

    LEAST_ROWS: ClassVar[int] = 1

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight.detach(), bias

    def forward(self, x: Tensor) -> Tensor:
        """[T, in] -> [T, out]."""
        return F.linear(x, self._weight, self._bias)


class DeviceDecoder(LeanDecoder):
    """The lean decoder without transfers to the host.

    Args:
        model: see `LeanDecoder`.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model, cast("Any", DenseLinear))
        self._turn: Any = cast("Any", model.model).rotary_emb

    def _angles_at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """As the tables of `LeanDecoder` have them, whose size depends on the largest position."""
        cos, sin = self._turn(self._embedding, positions[None])  # [1, T, D]
        first, second = sin[0].chunk(2, dim=-1)
        return cos[0][:, None], torch.cat([-first, second], dim=-1)[:, None]


def decoder_for(model: PreTrainedModel) -> Network:
    """The network that graphs are captured of; the model is left as it is."""
    if not is_llama(model):
        return ModuleNetwork.sharing(model)
    decoder: Any = DeviceDecoder(model)  # whose parts are `DeviceDecoder`s, as `_with` copies it
    return cast("Network", decoder)
