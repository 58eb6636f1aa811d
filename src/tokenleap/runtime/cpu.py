"""Linear layers for PyTorch's operations on a CPU: packed once, in the model's dtype or in int8.

`F.linear` reorders a weight into oneDNN's blocked layout at every call. With weights packed once, a
pass is two to three times faster. Its bits also do not depend on the number of input rows, if there
are at least two (invariant 7). For a single row, oneDNN may take another kernel, which sums in
another order. The int8 kernel gives the same bits for any number of rows.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, ClassVar, TypeGuard

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from tokenleap.errors import CompatibilityError, ConfigError
from tokenleap.runtime.choices import DRAFTING, QUANTIZATION_OPTIONS, QUANTIZATIONS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_INT8_WIDTH = 16
"""The input width must be a multiple of this: the kernel reads past the end of other rows."""

_PACK_HINT_ROWS = 8  # number of input rows that oneDNN chooses the layout for


class PackedLinear(nn.Module):
    """`nn.Linear` with its weight [out, in], float32 or bfloat16, in oneDNN's blocked layout."""

    LEAST_ROWS: ClassVar[int] = 2
    """See `Network.least_nodes`: a single row may get another kernel, and other bits."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(
            weight.detach().contiguous(), _PACK_HINT_ROWS
        )
        self.bias = None if bias is None else bias.detach()
        self.out_features, self.in_features = weight.shape

    weight: None = None
    """T5's MLP looks for a dtype to convert its input to. There is nothing to convert."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return y


class Int8Linear(nn.Module):
    """`y = x W^T + b` with W in int8 and one scale per output; x keeps its dtype (W8A16).

    It reads half the bytes of bfloat16. It is faster for up to about four input rows, and slower
    for many. `in` is a multiple of 16.
    """

    LEAST_ROWS: ClassVar[int] = 1

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        if self.in_features % _INT8_WIDTH:
            raise CompatibilityError(
                "int8 weights need linear layers whose input width is a multiple of "
                f"{_INT8_WIDTH}, and this model has one of width {self.in_features}: leave it out."
            )
        largest = weight.detach().float().abs().amax(dim=1).clamp(min=1e-12)  # [out]
        self.scales = (largest / 127).to(weight.dtype)
        # Weights are divided by the scale as stored, so that rounding a scale adds no error.
        steps = weight.detach().float() / self.scales.float()[:, None]
        self.quantized = steps.round().clamp(-127, 127).to(torch.int8).contiguous()
        self.bias = None if bias is None else bias.detach()

    weight: None = None  # see `PackedLinear.weight`

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, self.in_features)
        y = torch._weight_int8pack_mm(flat, self.quantized, self.scales)
        y = y.view(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias


def linear_layer(
    dtype: torch.dtype, device: torch.device, quantization: str | None
) -> type[PackedLinear | Int8Linear] | None:
    """The class that replaces `nn.Linear`; None if nothing faster is available."""
    if quantization is None:
        return PackedLinear if _can_pack(dtype, device) else None
    return Int8Linear


def check_quantization(
    quantization: str | None, device: torch.device, option: str = "quantization"
) -> None:
    if quantization is None:
        return
    if quantization not in (*QUANTIZATIONS, DRAFTING):
        raise ConfigError(
            f"{option}: must be one of {', '.join(QUANTIZATION_OPTIONS)}, got '{quantization}'."
        )
    if device.type != "cpu":
        name = quantization
        if quantization == DRAFTING:
            option, name = "draft_quantization", "int4"
        raise ConfigError(
            f"{option}: {name} runs on CPUs only, not on {device.type}: leave it out."
        )


def _can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether oneDNN has packed kernels for this dtype here."""
    if device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def pack(model: PreTrainedModel, linear: type[PackedLinear | Int8Linear]) -> PreTrainedModel:
    """A copy of the model with linear layers of this class; all other weights are shared."""
    packed = share(model)
    _pack_children(packed, linear)
    return packed


def is_plain_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether a module is a linear layer, and no subclass that computes more (some routers do)."""
    kind = type(module)
    same = kind.forward is nn.Linear.forward or kind.__name__ == "FalconLinear"
    return isinstance(module, nn.Linear) and same


def _pack_children(module: nn.Module, linear: type[PackedLinear | Int8Linear]) -> None:
    for name, child in module.named_children():
        if is_plain_linear(child):
            setattr(module, name, linear(child.weight, child.bias))
        elif isinstance(child, Conv1D):  # GPT-2's linear layer, with a transposed weight
            setattr(module, name, linear(child.weight.T, child.bias))
        else:
            _pack_children(child, linear)


# Copies of a model's module tree that share its weights.
#
# In such a copy, `cpu.py` and `module.py` replace attention, linear layers or the list of layers.
# The user's model is not changed, and the weights are in memory only once.


def share(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of the model's module tree over the same tensors, to replace modules in."""
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    for module in model.modules():  # packed weights are attributes, not parameters
        shared.update((id(x), x) for x in vars(module).values() if isinstance(x, Tensor))
    copied: PreTrainedModel = copy.deepcopy(model, shared)
    return copied


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The list of decoder layers, wherever the architecture keeps it."""
    count = model.config.get_text_config().num_hidden_layers
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise CompatibilityError(
        f"{type(model).__name__} has no list of its {count} layers, so they can neither be skipped "
        "nor give their hidden states."
    )


# Makes PyTorch's elementwise functions exact from their first call on (invariant 7).
#
# On Intel processors, PyTorch computes them by MKL, which looks for the best code for this
# processor when a function is called first. If several threads make that call together, one of them
# may run other code this once, with errors of 1e-4
# (https://github.com/pytorch/pytorch/issues/188792). One number is computed by one thread.
#
# A table of rotary angles, say, stays as it was first computed: with such an error in its second
# half, a process would write other tokens than the next one.


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
