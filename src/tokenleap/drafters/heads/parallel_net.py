"""The network of P-EAGLE: an EAGLE-3 head that drafts a block in one pass (arXiv 2602.01469).

The tokens of a block do not depend on each other. Behind the pair of the last committed token, with
the target's own state, stand pairs of a mask token and a learnt state:

    f_mask = fc [norm(m^1); ...; norm(m^A)],   m = `mask_hidden`.

The d-th of them sees the committed pairs and the d - 1 before it, and predicts the token d places
behind the first drafted one. The first layer is EAGLE-3's; ordinary ones may follow it. Tensor
names are those of the `speculators` format ("peagle").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from tokenleap.drafters.heads.eagle_layer import EagleConfig, EagleLayer, at, attend
from tokenleap.drafters.heads.eagle_net import EagleNet

__all__ = ["ParallelConfig", "ParallelNet"]


@dataclass(frozen=True)
class ParallelConfig(EagleConfig):
    """See `EagleConfig`.

    Args:
        num_layers: N, decoder layers.
        mask_token_id: the token of the pairs behind the last committed one.
        depths: most tokens of a draft, as many as were learnt.
    """

    num_layers: int = 1
    mask_token_id: int = 0
    depths: int = 8


@dataclass
class _Level:
    """Pairs of one level of all drafts; level 0 has those of the text.

    Args:
        stream: [B, n, E] the residual stream.
        read: [B, n, 2 E] or [B, n, E] what the next attention reads.
        angles: cosines and sines [B, n, D] of the positions.
        mask: [B, 1, n, T] which pairs of the text each of them sees.
    """

    stream: Tensor
    read: Tensor
    angles: tuple[Tensor, Tensor]
    mask: Tensor

    @property
    def turns(self) -> tuple[Tensor, Tensor]:
        """[B, 1, n, D] each."""
        cos, sin = self.angles
        return cos[:, None], sin[:, None]

    def at(self, roots: Tensor) -> _Level:
        """Only the pairs [B, Q]."""
        cos, sin = (at(each, roots) for each in self.angles)
        mask = self.mask.expand(len(roots), -1, -1, -1)
        seen = at(mask.squeeze(1), roots).unsqueeze(1)
        return _Level(at(self.stream, roots), at(self.read, roots), (cos, sin), seen)


class ParallelNet(EagleNet):
    """See `EagleNet`; `block` takes the place of `forward`."""

    config: ParallelConfig

    def __init__(
        self, config: ParallelConfig, embedding: Tensor, head: Tensor, draft_tokens: Tensor
    ) -> None:
        super().__init__(config, embedding, head, draft_tokens)
        more = [EagleLayer(config, joint=False) for _ in range(config.num_layers - 1)]
        self.layers.extend(more)
        size = len(config.aux_layers) * config.hidden_size
        self.mask_hidden = nn.Parameter(torch.zeros(1, 1, size))

    def initialise(self) -> None:
        """See `EagleNet.initialise`."""
        super().initialise()
        nn.init.normal_(self.mask_hidden)

    def mask_features(self) -> Tensor:
        """[A, E] what stands for the hidden states of the target's layers."""
        return self.mask_hidden.view(len(self.config.aux_layers), -1)

    def block(
        self, tokens: Tensor, states: Tensor, roots: Tensor, sizes: Sequence[int]
    ) -> list[Tensor]:
        """All levels of drafts from many pairs of texts at once.

        Args:
            tokens: [B, T] the token of each pair.
            states: [B, T, E] its state: `fuse`.
            roots: [B, Q] the pairs from which drafts start.
            sizes: [L] how many of the Q drafts have each level, not ascending; the first is Q.

        Returns:
            [L] outputs [B, sizes[l], E] before the final norm.
        """
        levels = self._levels(tokens, states, roots, sizes)
        for index, layer in enumerate(cast("list[EagleLayer]", list(self.layers))):
            if index:
                for level in levels:
                    level.read = layer.input_layernorm(level.stream)
            last = index + 1 == len(self.layers)
            self._advance(layer, levels, roots if last else None)
        return [level.stream for level in levels]

    def _levels(
        self, tokens: Tensor, states: Tensor, roots: Tensor, sizes: Sequence[int]
    ) -> list[_Level]:
        """The inputs of the first layer."""
        places = torch.arange(tokens.shape[1], device=tokens.device)[None]  # [1, T]
        levels = [self._level(tokens, states, places.expand_as(tokens), places)]
        mask_state = self.fuse(self.mask_features())
        for depth, size in enumerate(sizes[1:], 1):
            seeing = roots[:, :size]
            masks = torch.full_like(seeing, self.config.mask_token_id)
            state = mask_state.expand(*masks.shape, -1)
            levels.append(self._level(masks, state, seeing + depth, places, seeing))
        return levels

    def _level(
        self,
        tokens: Tensor,
        states: Tensor,
        positions: Tensor,
        places: Tensor,
        seeing: Tensor | None = None,
    ) -> _Level:
        """Pairs [B, n] at positions [B, n] that see the pairs of the text up to `seeing` [B, n]."""
        layer = self.layer
        normed = layer.hidden_norm(states)
        read = torch.cat([layer.input_layernorm(self.embedding[tokens]), normed], dim=-1)
        cos, sin = self.rotary(normed, positions)
        up_to = (positions if seeing is None else seeing).unsqueeze(-1)
        mask = (places <= up_to).unsqueeze(1)
        return _Level(normed if layer.norm_before_residual else states, read, (cos, sin), mask)

    def _advance(self, layer: EagleLayer, levels: list[_Level], roots: Tensor | None) -> None:
        """Compute a layer; of the pairs of the text, only the roots if these are given."""
        attention = layer.self_attn
        keys_values = [attention.keys_values(level.read, *level.turns) for level in levels]
        if roots is not None:
            levels[0] = levels[0].at(roots)
        for depth, level in enumerate(levels):
            size = level.read.shape[1]
            above = [
                (keys[:, :, :size], values[:, :, :size])
                for keys, values in keys_values[1 : depth + 1]
            ]
            query = attention.queries(level.read, *level.turns)
            mixed = attend(query, [keys_values[0], *above], level.mask, attention.scaling)
            level.stream = layer.finish(level.stream, mixed)
