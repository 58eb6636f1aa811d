"""`blockwise`: heads that extend the target's output layer (Stern et al., arXiv 1811.03115).

Section 4 of the paper puts one feed-forward layer with a residual connection for each of the next
positions between the decoder's output h and the output layer, which all positions share:

    logits_k = W (h + V_k relu(U_k h + a_k) + b_k),  W the target's output rows.

The paper counts the target's own prediction as p_1; the heads here are its p_2 to p_(K+1). The
target's pass that verifies a block also gives the h for the next one, so prediction and
verification are one pass (section 4, "combined scoring and proposal model").
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, cast

import torch.nn.functional as F
from torch import Tensor, nn

from tokenleap.drafters.heads.state_net import Size, StateConfig, StateNet, linear

__all__ = ["BlockwiseConfig", "BlockwiseNet"]


@dataclass(frozen=True)
class BlockwiseConfig(StateConfig):
    """See `StateConfig`.

    Args:
        inner_size: I, of each head's hidden layer.
    """

    inner_size: Size = 1024


class _Head(nn.Module):
    def __init__(self, config: BlockwiseConfig) -> None:
        super().__init__()
        self.hidden = linear(config.hidden_size, config.inner_size, bias=True)
        self.output = linear(config.inner_size, config.hidden_size, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        """[..., E] -> [..., E]."""
        y: Tensor = x + self.output(F.relu(self.hidden(x)))
        return y


class BlockwiseNet(StateNet):
    """See `StateNet`. A state is the hidden state itself."""

    METHOD = "blockwise"
    Config: ClassVar[type[StateConfig]] = BlockwiseConfig
    reads_tokens = False

    def __init__(
        self, config: BlockwiseConfig, embedding: Tensor, rows: Tensor, draft_tokens: Tensor
    ) -> None:
        super().__init__(config, embedding, rows, draft_tokens)
        self.heads = nn.ModuleList([_Head(config) for _ in range(config.num_heads)])

    def initialise(self) -> None:
        """Random hidden layers behind zeros, so that every head begins as the target's own."""
        for head in cast("list[_Head]", list(self.heads)):
            nn.init.normal_(head.hidden.weight, std=self.config.hidden_size**-0.5)
            for zero in (head.hidden.bias, head.output.weight, head.output.bias):
                nn.init.zeros_(zero)

    def start(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """See `StateNet.start`."""
        return hidden

    def advance(self, states: Tensor, tokens: Tensor, depth: int) -> Tensor:
        """See `StateNet.advance`."""
        return states

    def outputs(self, states: Tensor, depth: int) -> Tensor:
        """See `StateNet.outputs`."""
        x: Tensor = self.heads[depth](states)
        return x
