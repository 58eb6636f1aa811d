"""The networks that CUDA graphs capture: `LeanDecoder` for the Llama family, else the module."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tokenleap.runtime.lean import DenseLinear, LeanDecoder
from tokenleap.runtime.llama import LlamaWeights, is_llama
from tokenleap.runtime.module import ModuleNetwork
from tokenleap.runtime.network import Network

__all__ = ["DeviceDecoder", "decoder_for"]


class DeviceDecoder(LeanDecoder):
    """`LeanDecoder` without transfers to the host, which a graph cannot capture."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(LlamaWeights(model), DenseLinear)
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
