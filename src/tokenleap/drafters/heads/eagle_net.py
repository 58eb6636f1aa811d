"""The network of EAGLE-3: fused hidden states and one decoder layer (Li et al., arXiv 2503.01840).

The head reads pairs: the hidden states of the target at position t, and the token at t + 1. It
predicts the token at t + 2. For committed tokens the state is

    f_t = fc [norm(h_t^1); ...; norm(h_t^A)],   h_t^a entering layer `aux_layers[a]` of the target.

Behind the last committed token the state is the head's own output of the pair before. One layer of
the Llama family computes on such pairs; its attention reads [norm(e); norm(f)], twice as wide as
the residual stream. Tensor names are those of the `speculators` format, so `state_dict()` is what a
checkpoint holds.

Checkpoints are read into this module, and it is the oracle of what drafts: `runtime/` computes the
same with the kernels of its decoders (see `eagle.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokenleap.drafters.heads.eagle_layer import (
    EagleConfig,
    EagleLayer,
    KeysValues,
    RMSNorm,
    at,
    attend,
)
from tokenleap.drafters.heads.state_net import linear

__all__ = ["EagleNet", "default_layers"]


def default_layers(num_layers: int) -> tuple[int, ...]:
    """The layers whose inputs are fused if nothing is said: a low, a middle and a high one.

    Args:
        num_layers: of the target.
    """
    middle, high = num_layers // 2, max(0, num_layers - 3)
    return tuple(sorted({min(2, num_layers - 1), middle, high}))


class EagleNet(nn.Module):
    """The head as a PyTorch module, in float32.

    Args:
        config: its sizes.
        embedding: [V, E] the target's, shared and not trained.
        head: [Vd, E] the target's output rows of the draft vocabulary, shared and not trained.
        draft_tokens: [Vd] the target's ids of the draft vocabulary, ascending.
    """

    KIND: ClassVar[str] = "an EAGLE-3 head"
    """What messages call it."""

    d2t: Tensor
    t2d: Tensor
    embedding: Tensor
    head: Tensor

    def __init__(
        self, config: EagleConfig, embedding: Tensor, head: Tensor, draft_tokens: Tensor
    ) -> None:
        super().__init__()
        size, epsilon, count = config.hidden_size, config.rms_norm_eps, len(config.aux_layers)
        self.config = config
        self.layers = nn.ModuleList([EagleLayer(config)])
        self.fc = linear(count * size, size)
        norms = [RMSNorm(size, epsilon) for _ in range(count if config.fc_norm else 0)]
        self.fc_norm = nn.ModuleList(norms)
        self.norm = RMSNorm(size, epsilon)
        self.register_buffer("embedding", embedding, persistent=False)
        self.register_buffer("head", head, persistent=False)
        self.register_buffer("d2t", draft_tokens - torch.arange(len(draft_tokens)))
        known = torch.zeros(config.vocab_size, dtype=torch.bool)
        known[draft_tokens] = True
        self.register_buffer("t2d", known)
        self.rotary = config.rotary()

    def initialise(self) -> None:
        """Draw random weights, for training; without it those of linear layers are undefined."""
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    @property
    def layer(self) -> EagleLayer:
        """The only layer."""
        return cast("EagleLayer", self.layers[0])

    @property
    def draft_tokens(self) -> Tensor:
        """[Vd] the target's ids of the draft vocabulary, ascending."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def fuse(self, hidden: Tensor) -> Tensor:
        """The states of committed tokens.

        Args:
            hidden: [..., A, E] the target's hidden states of `aux_layers`.

        Returns:
            [..., E].
        """
        if self.config.fc_norm:
            parts = [norm(hidden[..., i, :]) for i, norm in enumerate(self.fc_norm)]
            fused: Tensor = self.fc(torch.cat(parts, dim=-1))
        else:
            fused = self.fc(hidden.float().flatten(-2))
        return fused.float()

    def joined(self, tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Pairs [B, T] and [B, T, E] -> what the attention reads, and the residual stream."""
        layer = self.layer
        state = layer.hidden_norm(states)
        x = torch.cat([layer.input_layernorm(self.embedding[tokens]), state], dim=-1)
        return x, state if layer.norm_before_residual else states

    def forward(
        self,
        tokens: Tensor,
        states: Tensor,
        positions: Tensor,
        mask: Tensor,
        earlier: Sequence[KeysValues] = (),
        roots: Tensor | None = None,
    ) -> tuple[Tensor, list[KeysValues]]:
        """One level of drafting from many pairs at once (training-time test).

        At level k, index r stands for the k-th token drafted behind a root, a pair of level 0. It
        sees the pairs up to the root, and of levels 1 to k its own index only.

        Args:
            tokens: [B, T] the token of each pair at level 0, [B, Q] of each root's draft at the
                others.
            states: [B, T, E] at level 0: `fuse`; else [B, Q, E]: the states that the level before
                left.
            positions: [B, T] or [B, Q] of the tokens.
            mask: [B, 1, Q, T] which pairs of level 0 each root sees.
            earlier: the keys and values of the levels before.
            roots: [B, Q] at level 0 the pairs from which drafts start; None means all, so Q = T.

        Returns:
            The outputs [B, Q, E] before the final norm, and the keys and values of all levels.
        """
        layer = self.layer
        attention = layer.self_attn
        x, residual = self.joined(tokens, states)
        cos, sin = self.rotary(residual, positions)
        own = attention.keys_values(x, cos[:, None], sin[:, None])
        if roots is not None:
            x, residual, cos, sin = (at(each, roots) for each in (x, residual, cos, sin))
        query = attention.queries(x, cos[:, None], sin[:, None])
        levels = [*earlier, own]
        mixed = attend(query, levels, mask, attention.scaling)
        return layer.finish(residual, mixed), levels

    def next_states(self, outputs: Tensor) -> Tensor:
        """[..., E] outputs of a level -> the states of the next one."""
        normed: Tensor = self.norm(outputs)
        return normed if self.config.norm_output else outputs

    def logits(self, outputs: Tensor) -> Tensor:
        """[..., E] outputs of a level -> [..., Vd] logits of the draft vocabulary, in float32."""
        normed: Tensor = self.norm(outputs)
        return F.linear(normed.to(self.head.dtype), self.head).float()
