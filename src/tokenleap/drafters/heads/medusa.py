"""`medusa`: K heads on one hidden state, one for each position (Cai et al., arXiv 2401.10774).

The head for depth k predicts from the hidden state h alone (equation 1 of the paper):

    logits = W_k (x + SiLU(U_k x + b_k)),  x = h;  with several blocks, each reads the last one's x.

It does not know the tokens drafted before it, so all nodes of a depth have the same children. W_k
is a head's own output layer, as published, or the target's own one over a draft vocabulary, which
costs no space and is what we train.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, cast

import torch.nn.functional as F
from torch import Tensor, nn

from tokenleap.drafters.heads.state_net import Depth, StateConfig, StateNet, linear

__all__ = ["MedusaConfig", "MedusaNet"]


@dataclass(frozen=True)
class MedusaConfig(StateConfig):
    """See `StateConfig`.

    Args:
        num_layers: residual blocks of each head.
        bias: whether the blocks have biases.
    """

    num_layers: Depth = 1
    bias: bool = True


class _Block(nn.Module):
    """The blocks of one head; the names of its tensors are vLLM's."""

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        size = config.hidden_size
        layers = [linear(size, size, bias=config.bias) for _ in range(config.num_layers)]
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        """[..., E] -> [..., E]."""
        for layer in self.layers:
            x = x + F.silu(layer(x))
        return x


class MedusaNet(StateNet):
    """See `StateNet`. A state is the hidden state itself."""

    METHOD = "medusa"
    Config: ClassVar[type[StateConfig]] = MedusaConfig
    reads_tokens = False

    def __init__(
        self, config: MedusaConfig, embedding: Tensor, rows: Tensor, draft_tokens: Tensor
    ) -> None:
        super().__init__(config, embedding, rows, draft_tokens)
        self.blocks = nn.ModuleList([_Block(config) for _ in range(config.num_heads)])

    def initialise(self) -> None:
        """Zero the blocks, so that every head begins as the target's own output layer."""
        for block in self.blocks:
            for layer in cast("_Block", block).layers:
                for parameter in layer.parameters():
                    nn.init.zeros_(parameter)

    def start(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """See `StateNet.start`."""
        return hidden

    def advance(self, states: Tensor, tokens: Tensor, depth: int) -> Tensor:
        """See `StateNet.advance`."""
        return states

    def outputs(self, states: Tensor, depth: int) -> Tensor:
        """See `StateNet.outputs`."""
        x: Tensor = self.blocks[depth](states)
        return x
