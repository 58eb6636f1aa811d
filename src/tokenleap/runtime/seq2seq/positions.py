"""How the decoder of an encoder-decoder knows the positions of a pass's nodes.

Transformers' decoders count positions from the length of the cache, the same for a whole batch.
Nodes of trees, and rows of different length, need positions of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.t5.modeling_t5 import T5Attention

from tokenleap.runtime.inputs import PassInputs

__all__ = ["Positions", "RelativePositions", "TablePositions"]


class Positions(Protocol):
    """What positions add to a pass."""

    def embedding(self, inputs: PassInputs) -> Tensor | None:
        """[T, E] added to the embeddings of the nodes; None if nothing is."""
        ...

    def bias(self, positions: Tensor, mask: Tensor) -> Tensor | None:
        """What is added to the scores of self-attention; None if nothing is.

        Args:
            positions: [B, N] of the nodes.
            mask: [B, 1, padded_rows(N), S], 0 where a node sees a slot.

        Returns:
            [L, B, H, padded_rows(N), S]; L is 1 if all layers have the same.
        """
        ...


@dataclass(frozen=True)
class TablePositions:
    """An embedding per position.

    Args:
        table: [positions, E].
        without: a token that gets no such embedding (M2M100's padding); None if all get one.
    """

    table: Tensor
    without: int | None = None

    def embedding(self, inputs: PassInputs) -> Tensor:
        """See `Positions.embedding`."""
        positions = inputs.flat(inputs.positions)
        # The padding of a row at the end of the context may have positions behind the table.
        found = F.embedding(positions.clamp(max=len(self.table) - 1), self.table)
        if self.without is None:
            return found
        bare = inputs.flat(inputs.tokens) == self.without
        return found.masked_fill(bare[:, None], 0)

    def bias(self, positions: Tensor, mask: Tensor) -> None:
        """See `Positions.bias`."""


@dataclass(frozen=True)
class RelativePositions:
    """A bias on attention scores for each distance between a node and what it sees (T5).

    Args:
        by_distance: [L, H, distances] the bias of each head; the last one holds for larger
            distances. L is 1 if all layers have the same, and the number of layers in UMT5.
        behind: how many of them, the first, are for what comes behind a node.
    """

    by_distance: Tensor
    behind: int = 0

    @classmethod
    def of(cls, attentions: Sequence[Any], *, both_ways: bool = False) -> RelativePositions:
        """The biases of T5's self-attention: those of the first layer, or each layer's own.

        Args:
            attentions: the module of each layer.
            both_ways: whether nodes see what comes behind them, as in an encoder.
        """
        first, own = (
            attentions[0],
            [each for each in attentions if each.has_relative_attention_bias],
        )
        if len(own) not in (1, len(attentions)):
            raise TypeError("some of its layers share their relative positions")
        largest = int(first.relative_attention_max_distance)
        behind = largest if both_ways else 0
        buckets = T5Attention._relative_position_bucket(  # type: ignore[no-untyped-call]
            -torch.arange(-behind, largest + 1),
            bidirectional=both_ways,
            num_buckets=first.relative_attention_num_buckets,
            max_distance=largest,
        )
        weights = [each.relative_attention_bias.weight.detach() for each in own]
        by_layer = torch.stack([weight[buckets.to(weight.device)].T for weight in weights])
        return cls(by_layer.contiguous(), behind)

    def embedding(self, inputs: PassInputs) -> None:
        """See `Positions.embedding`."""

    def bias(self, positions: Tensor, mask: Tensor) -> Tensor:
        """See `Positions.bias`.

        What a node sees is a path, in order. So the position of a slot is the number of slots that
        the node sees before it, wherever the slots of other branches lie.
        """
        ranks = (mask[:, 0] == 0).cumsum(-1) - 1  # [B, padded N, S]
        padded = F.pad(positions, (0, ranks.shape[1] - positions.shape[1]))
        distances = padded[:, :, None] - ranks + self.behind
        distances = distances.clamp(0, self.by_distance.shape[2] - 1)
        return self.by_distance[:, :, distances].transpose(1, 2)
