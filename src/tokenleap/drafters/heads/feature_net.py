"""The network of EAGLE-1: one layer on features and tokens (Li et al., arXiv 2401.15077).

A feature is what the target's output layer reads: its last hidden state, after the final norm. From
the feature at position t and the token at t + 1, the head predicts the feature at t + 1:

    x = fc [e(t + 1); f(t)] + b,   f(t + 1) = layer(x),   logits = (target's output rows) f(t + 1).

The layer is one of the Llama family without a norm before its attention, and there is no final
norm. EAGLE-2 drafts other trees with the same heads, and HASS trains them on several levels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokenleap.drafters.heads.eagle_layer import EagleConfig, EagleLayer
from tokenleap.drafters.heads.eagle_net import EagleNet
from tokenleap.drafters.heads.state_net import linear, normed

__all__ = ["FeatureConfig", "FeatureNet"]


@dataclass(frozen=True)
class FeatureConfig(EagleConfig):
    """Sizes of an EAGLE-1 head; see `EagleConfig`, whose norms it does not have.

    Args:
        fc_bias: whether `fc` has a bias.
    """

    norm_before_residual: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    fc_bias: bool = True


class FeatureNet(EagleNet):
    """See `EagleNet`; its states are features.

    Args:
        config, embedding, head, draft_tokens: as there.
        final_norm: the target's, shared and not trained; None if no hidden states will be read.
    """

    KIND: ClassVar[str] = "an EAGLE-1 head"

    config: FeatureConfig

    def __init__(
        self,
        config: FeatureConfig,
        embedding: Tensor,
        head: Tensor,
        draft_tokens: Tensor,
        final_norm: nn.Module | None = None,
    ) -> None:
        super().__init__(config, embedding, head, draft_tokens)
        size = config.hidden_size
        self.fc = linear(2 * size, size, bias=config.fc_bias)
        layer = EagleLayer(config, joint=False)
        del layer.input_layernorm, self.norm
        self.layers = nn.ModuleList([layer])
        self._final_norm = [final_norm]  # in a list, so that its weights are not among these

    @property
    def final_norm(self) -> nn.Module:
        """The target's norm before its output layer."""
        (norm,) = self._final_norm
        assert norm is not None
        return norm

    def initialise(self) -> None:
        """See `EagleNet.initialise`."""
        super().initialise()
        if self.fc.bias is not None:
            nn.init.zeros_(self.fc.bias)

    def fuse(self, hidden: Tensor) -> Tensor:
        """The features [..., E] of the hidden states [..., 1, E] before the final norm."""
        return normed(self.final_norm, hidden.squeeze(-2))

    def joined(self, tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """See `EagleNet.joined`: the attention reads the residual stream as it is."""
        x = self.fc(torch.cat([self.embedding[tokens].to(states.dtype), states], dim=-1)).float()
        return x, x

    def next_states(self, outputs: Tensor) -> Tensor:
        """[..., E] predicted features, which the next level reads."""
        return outputs

    def logits(self, outputs: Tensor) -> Tensor:
        """[..., E] predicted features -> [..., Vd] logits, in float32."""
        return F.linear(outputs.to(self.head.dtype), self.head).float()
