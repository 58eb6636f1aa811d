"""The states of an EAGLE head's committed tokens, from the target's hidden states.

A state has the same bits for any number of tokens that are computed with it. So drafts do not
depend on how the tokens came to be committed (invariant 4).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokenleap.drafters.heads.eagle_layer import RMSNorm
from tokenleap.drafters.heads.eagle_net import EagleNet
from tokenleap.drafters.heads.feature_net import FeatureNet
from tokenleap.runtime.cpu import linear_layer
from tokenleap.runtime.lean import DenseLinear, LinearLayer
from tokenleap.runtime.native.fusion import NativeFusion

__all__ = ["Fusion"]


class Fusion:
    """`EagleNet.fuse` for serving, in the target's dtype.

    Args:
        net: the head.
        dtype: of the target's hidden states.
        device: where they are.
        native: whether native code computes it.

    Attributes:
        layers: ids of the layers whose hidden states it reads.
    """

    def __init__(
        self, net: EagleNet, dtype: torch.dtype, device: torch.device, *, native: bool = False
    ) -> None:
        self.layers = net.config.aux_layers
        if isinstance(net, FeatureNet):
            self._fuse: Callable[[Sequence[Tensor]], Tensor] = _Features(net.final_norm)
            return
        norms = [
            n.weight.detach().to(device, dtype) for n in cast("list[RMSNorm]", list(net.fc_norm))
        ]
        kind = NativeFusion if native else _Fusion
        self._fuse = kind(net.fc.weight.detach().to(device, dtype), norms, net.config.rms_norm_eps)

    def __call__(self, hidden: Mapping[int, Tensor]) -> Tensor:
        """Layer id -> [n, E] hidden states of n tokens -> [n, E] their states."""
        return self.of_parts([hidden[layer] for layer in self.layers])

    def of_parts(self, hidden: Sequence[Tensor]) -> Tensor:
        """[A] of [n, E] hidden states, in the order of the layers -> [n, E] states."""
        return self._fuse(hidden)


class _Features:
    """The states of EAGLE-1: hidden states after the target's final norm."""

    def __init__(self, norm: nn.Module) -> None:
        self._norm = norm

    def __call__(self, hidden: Sequence[Tensor]) -> Tensor:
        """[1] of [n, E] hidden states -> [n, E] features."""
        (last,) = hidden
        features: Tensor = self._norm(last)
        return features


class _Fusion:
    """`NativeFusion` in PyTorch's operations."""

    def __init__(self, fc: Tensor, norms: Sequence[Tensor], epsilon: float) -> None:
        kind: type[LinearLayer] = linear_layer(fc.dtype, fc.device, None) or DenseLinear
        self._least_rows = kind.LEAST_ROWS
        self._fc = kind(fc, None).forward
        self.norms, self._epsilon = norms, epsilon

    def __call__(self, hidden: Sequence[Tensor]) -> Tensor:
        """[A] of [n, E] hidden states -> [n, E] states."""
        parts = hidden
        if self.norms:
            parts = [self._normed(*each) for each in zip(hidden, self.norms, strict=True)]
        joined = torch.cat(list(parts), dim=-1)
        missing = self._least_rows - len(joined)
        if missing > 0:
            joined = F.pad(joined, (0, 0, 0, missing))
        return self._fc(joined)[: len(parts[0])]

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self._epsilon)
