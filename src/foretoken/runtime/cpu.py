"""CPU runtime: linear layers with weights packed once.

`F.linear` reorders a weight into oneDNN's blocked layout on every call. Packed once, a pass is two
to three times faster, and its bits do not depend on the number of rows as long as there are at
least two (a single row may take another kernel, which sums in another order): law 7.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from foretoken.runtime.share import share

__all__ = ["PackedLinear", "can_pack", "pack"]

_PACK_HINT_ROWS = 8
"""Number of rows oneDNN is told to expect when it chooses the layout."""


class PackedLinear(nn.Module):
    """`y = x W^T + b` with W in oneDNN's blocked layout; the same mathematics as `nn.Linear`.

    Args:
        weight: [out, in], float32 or bfloat16.
        bias: [out] or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(
            weight.detach().contiguous(), _PACK_HINT_ROWS
        )
        self.bias = None if bias is None else bias.detach()
        self.out_features, self.in_features = weight.shape

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return y


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether oneDNN has packed kernels for this dtype here."""
    if device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def pack(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of the model that runs on packed weights; the rest is shared with the original."""
    packed = share(model)
    _pack_children(packed)
    return packed


def _pack_children(module: nn.Module) -> None:
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            setattr(module, name, PackedLinear(child.weight, child.bias))
        elif isinstance(child, Conv1D):
            setattr(module, name, PackedLinear(child.weight.T, child.bias))
        else:
            _pack_children(child)
