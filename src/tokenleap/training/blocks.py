"""Blocks of padding behind many places of a text, in one pass of a language model.

`pad` and `pass` train on them. Behind the text up to a root stand k padding tokens. Each of them
sees the text up to the root and the padding before it, as it will when it drafts. A pass has blocks
behind some of the roots, so that they are together about as long as the text.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from tokenleap.drafters.pad import block_nodes
from tokenleap.runtime.windows import FULL, windows_by_kind
from tokenleap.training.batches import Batch, Levels
from tokenleap.training.method import TrainingMethod

__all__ = ["BlockTraining", "States", "block_levels", "pass_with_blocks", "some_blocks"]


class States(Protocol):
    """A language model: [B, N] tokens -> [B, N, E] hidden states after the final norm."""

    def __call__(self, tokens: Tensor, **arguments: Any) -> Tensor:
        """Compute them; `arguments` are those of Transformers' models."""
        ...


class BlockTraining(TrainingMethod):
    """A method whose drafter drafts by blocks of padding."""

    @property
    @abstractmethod
    def block_length(self) -> int:
        """Tokens of a block, as it is trained."""

    @property
    def nodes_per_token(self) -> int:
        """See `TrainingMethod.nodes_per_token`: a block stands behind the root and every token."""
        return block_nodes(self.served_tokens) // self.served_tokens

    def serving(self, folder: Path) -> dict[str, Any]:
        """See `TrainingMethod.serving`: blocks as long as those that were learnt."""
        nodes = block_nodes(self.block_length)
        return {**super().serving(folder), "num_speculative_tokens": nodes}


def block_levels(
    states: States, config: PreTrainedConfig, batch: Batch, padding: Tensor
) -> Iterator[Tensor]:
    """The states at the padding behind every root, computed in several passes.

    Args:
        states: the model.
        config: of the model, whose layers may have windows.
        batch: B texts with Q roots each.
        padding: [k] the tokens of a block.

    Yields:
        [B, Q, E] for each of the k tokens.
    """
    apart = _apart(batch, len(padding))
    passes = [
        pass_with_blocks(states, config, _some(batch, n, apart), padding)[1] for n in range(apart)
    ]
    found = passes[0].new_zeros(*batch.roots.shape, *passes[0].shape[2:])
    for first, each in enumerate(passes):
        found[:, first::apart] = each
    yield from found.unbind(2)


def some_blocks(batch: Batch, num_pads: int) -> Batch:
    """The same text with as many of its roots, drawn at random, as one pass has blocks for."""
    apart = _apart(batch, num_pads)
    return _some(batch, int(torch.randint(apart, ())), apart)


def pass_with_blocks(
    states: States, config: PreTrainedConfig, batch: Batch, padding: Tensor
) -> tuple[Tensor, Tensor]:
    """[B, T + 1, E] states of the text, and [B, Q, k, E] of the blocks [k] behind the roots."""
    size, (rows, blocks) = batch.tokens.shape[1], batch.roots.shape
    own = torch.arange(size, device=batch.tokens.device)
    ahead = 1 + torch.arange(len(padding), device=own.device)
    # Beyond the last token there is nothing to learn, and perhaps no position.
    behind = (batch.roots.unsqueeze(-1) + ahead).clamp(max=size - 1).flatten(1)
    pads = padding.to(own.device).repeat(blocks).expand(rows, -1)
    positions = torch.cat([own.expand(rows, -1), behind], dim=1)
    found = states(
        torch.cat([batch.tokens, pads], dim=1),
        position_ids=positions,
        attention_mask=_masks(_mask(batch.roots, size, len(padding)), positions, config),
    )
    padded = found[:, size:]
    return found[:, :size], padded.reshape(rows, blocks, len(padding), padded.shape[-1])


def _apart(batch: Batch, num_pads: int) -> int:
    """How many roots apart the blocks of a pass are: so that they are as long as the text."""
    return max(1, min(num_pads, batch.roots.shape[1]))


def _some(batch: Batch, first: int, apart: int) -> Batch:
    """The same text with some of its roots."""
    levels = Levels(*(each[:, :, first::apart] for each in batch.levels))
    return batch._replace(roots=batch.roots[:, first::apart], levels=levels)


def _masks(mask: Tensor, positions: Tensor, config: PreTrainedConfig) -> Tensor | dict[str, Tensor]:
    """A mask for layers that see everything, or one for each kind of layers.

    Args:
        mask: [B, 1, S, S] who sees whom without windows.
        positions: [B, S] of all tokens.
        config: of the model.
    """
    windows = windows_by_kind(config)
    if not windows:
        return mask
    keys = positions[:, None, None, :]
    near = {
        kind: mask & (keys >= window.first(positions)[:, None, :, None])
        for kind, window in windows.items()
    }
    kinds = getattr(config, "layer_types", None)
    if kinds is None:  # all layers have the same window
        (found,) = near.values()
        return found
    return {kind: near.get(kind, mask) for kind in (FULL, *kinds)}


def _mask(roots: Tensor, size: int, num_pads: int) -> Tensor:
    """Who sees whom: [B, 1, S, S] for a text of `size` tokens and the blocks behind its roots."""
    own = torch.arange(size, device=roots.device)
    text = (own <= own.unsqueeze(-1)).expand(len(roots), -1, -1)  # [B, T + 1, T + 1]
    to_text = (own <= roots.unsqueeze(-1)).repeat_interleave(num_pads, dim=1)
    pads = torch.arange(to_text.shape[1], device=roots.device)
    same = pads // num_pads == (pads // num_pads).unsqueeze(-1)
    to_pads = (same & (pads <= pads.unsqueeze(-1))).expand(len(roots), -1, -1)
    above = torch.cat([text, text.new_zeros(len(roots), size, len(pads))], dim=2)
    below = torch.cat([to_text, to_pads], dim=2)
    return torch.cat([above, below], dim=1).unsqueeze(1)
