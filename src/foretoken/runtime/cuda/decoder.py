"""The networks that CUDA graphs capture: `LeanDecoder` for the Llama family, else the module."""

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
    """`y = x W^T + b` through `F.linear`: cuBLAS needs no packed weights.

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
    """`LeanDecoder` without transfers to the host, which a graph cannot capture.

    Args:
        model: see `LeanDecoder`.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model, cast("Any", DenseLinear))
        self._turn: Any = cast("Any", model.model).rotary_emb

    def _angles_at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """See `LeanDecoder`; its table needs to know the largest position on the host."""
        cos, sin = self._turn(self._embedding, positions[None])  # [1, T, D]
        first, second = sin[0].chunk(2, dim=-1)
        return cos[0][:, None], torch.cat([-first, second], dim=-1)[:, None]


def decoder_for(model: PreTrainedModel) -> Network:
    """The network whose passes are captured. The model is not changed."""
    if not is_llama(model):
        return ModuleNetwork.sharing(model)
    decoder: Any = DeviceDecoder(model)  # `_with` copies it, so its parts are `DeviceDecoder`s
    return cast("Network", decoder)
