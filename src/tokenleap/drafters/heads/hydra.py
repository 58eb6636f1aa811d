"""`hydra`: Medusa's heads, which also read the tokens drafted before (Ankner et al., 2402.05109).

The head for depth k reads the hidden state h and the embeddings of the root and of the k tokens
drafted behind it:

    x = R_k s + SiLU(U_k s + b_k),  s = [h; e(t_0); ...; e(t_k)],  then Medusa's blocks,
    logits = W_k x.

The embedding is the target's. W_k is a head's own output layer, or the target's own one over a
draft vocabulary. Hydra++ adds a decoder layer before the heads (its prefix layer), which is not
part of this: a head that wants attention is `eagle`'s.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokenleap.drafters.heads.state_net import Depth, StateConfig, StateNet, linear

__all__ = ["HydraConfig", "HydraNet"]


@dataclass(frozen=True)
class HydraConfig(StateConfig):
    """See `StateConfig`.

    Args:
        num_layers: blocks of each head, the one that reads the tokens included.
    """

    num_layers: Depth = 1


class _Head(nn.Module):
    def __init__(self, config: HydraConfig, depth: int) -> None:
        super().__init__()
        size, joined = config.hidden_size, (depth + 2) * config.hidden_size
        self.residual = linear(joined, size, bias=True)
        widths = [joined, *[size] * (config.num_layers - 1)]
        self.layers = nn.ModuleList([linear(width, size, bias=True) for width in widths])

    def forward(self, states: Tensor) -> Tensor:
        """[..., (k + 2) E] -> [..., E]."""
        first, *others = self.layers
        x: Tensor = self.residual(states) + F.silu(first(states))
        for layer in others:
            x = x + F.silu(layer(x))
        return x


class HydraNet(StateNet):
    """See `StateNet`. A state is [h; e(t_0); ...; e(t_k)]."""

    METHOD = "hydra"
    Config: ClassVar[type[StateConfig]] = HydraConfig
    reads_tokens = True

    def __init__(
        self, config: HydraConfig, embedding: Tensor, rows: Tensor, draft_tokens: Tensor
    ) -> None:
        super().__init__(config, embedding, rows, draft_tokens)
        self.heads = nn.ModuleList([_Head(config, depth) for depth in range(config.num_heads)])

    def initialise(self) -> None:
        """Every head begins as the target's own output layer on h."""
        for head in cast("list[_Head]", list(self.heads)):
            for parameter in head.parameters():
                nn.init.zeros_(parameter)
            size = self.config.hidden_size
            nn.init.eye_(head.residual.weight.data[:, :size])

    def start(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """See `StateNet.start`."""
        return self.advance(hidden, tokens, 0)

    def advance(self, states: Tensor, tokens: Tensor, depth: int) -> Tensor:
        """See `StateNet.advance`."""
        return torch.cat([states, self.embedding[tokens].to(states.dtype)], dim=-1)

    def outputs(self, states: Tensor, depth: int) -> Tensor:
        """See `StateNet.outputs`."""
        x: Tensor = self.heads[depth](states)
        return x
