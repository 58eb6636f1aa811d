"""Attention over the KV slab, registered with Transformers as the implementation `foretoken`.

On a CPU, scaled dot-product attention gives a query row the same bits whatever rows stand beside
it, provided that the number of rows is a multiple of 4 and the keys are whole blocks of 512
(invariant 7). The slab supplies the blocks and the mask; this function pads the rows.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from foretoken.errors import CompatibilityError

__all__ = [
    "IMPLEMENTATION",
    "KEY_BLOCK",
    "ROW_MULTIPLE",
    "attend_grouped",
    "padded_rows",
    "slab_attention",
]

IMPLEMENTATION = "foretoken"
KEY_BLOCK = 512
ROW_MULTIPLE = 4

UNSUPPORTED = ("softcap", "s_aux", "position_bias", "head_mask")
"""What some architectures add to attention; ignoring one would silently change the model."""


def padded_rows(rows: int) -> int:
    """`rows` rounded up to a multiple of `ROW_MULTIPLE`."""
    return -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE


def slab_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention as Transformers modules call it.

    Args:
        module: the attention module; not read.
        query: [B, H, N, D].
        key: [B, G, S, D], G key heads shared by H query heads, S a multiple of `KEY_BLOCK`.
        value: [B, G, S, D].
        attention_mask: [B, 1, padded_rows(N), S], additive, in the query's dtype.
        dropout: must be 0; generation never trains.
        scaling: factor on the scores; None is 1/sqrt(D).
        **kwargs: ignored, except those that would change the result.

    Returns:
        [B, N, H, D] and None in place of the attention weights.

    Raises:
        CompatibilityError: the architecture asks for something this function does not do.
    """
    for name in UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise CompatibilityError(f"attention with '{name}' is not supported.")
    assert attention_mask is not None, "the target always passes a mask"
    assert dropout == 0, "generation never trains"
    rows = query.shape[2]
    query = F.pad(query, (0, 0, 0, padded_rows(rows) - rows))
    grouped = query.shape[1] != key.shape[1]
    output = F.scaled_dot_product_attention(
        query, key, value, attention_mask, scale=scaling, enable_gqa=grouped
    )  # [B, H, N padded, D]
    return output[:, :, :rows].transpose(1, 2), None


def grouped_mask(mask: Tensor, nodes: int, group: int) -> Tensor:
    """The mask of `attend_grouped`, [B, 1, padded_rows(group * N), S].

    Args:
        mask: [B, 1, at least N, S] additive.
        nodes: N.
        group: query heads of a key head.
    """
    rows = mask[:, :, :nodes].repeat(1, 1, group, 1)
    # Rows of padding see everything, so that no softmax is empty.
    return F.pad(rows, (0, 0, 0, padded_rows(rows.shape[2]) - rows.shape[2]))


def attend_grouped(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float
) -> Tensor:
    """Attention with all query heads of a key head as rows of one product.

    Keys are loaded once, and few nodes need little padding: the bits are those of
    `slab_attention`.

    Args:
        query: [B, N, H, D].
        key: [B, G, S, D].
        value: [B, G, S, D].
        mask: made by `grouped_mask`.
        scaling: factor on the scores.

    Returns:
        [B, N, H * D].
    """
    batch, nodes, heads, width = query.shape
    groups = key.shape[1]
    rows = heads // groups * nodes
    query = query.transpose(1, 2).reshape(batch, groups, rows, width)
    if missing := padded_rows(rows) - rows:
        query = F.pad(query, (0, 0, 0, missing))
    output = F.scaled_dot_product_attention(query, key, value, mask, scale=scaling)
    output = output[:, :, :rows].reshape(batch, heads, nodes, width)
    return output.transpose(1, 2).reshape(batch, nodes, heads * width)


AttentionInterface.register(IMPLEMENTATION, slab_attention)
