"""Attention over the KV slab, registered with Transformers as the implementation `foretoken`.

On a CPU, scaled dot-product attention gives a query row the same bits whatever rows stand beside
it, provided that the number of rows is a multiple of 4 and the keys are whole blocks of 512
(law 7). The slab supplies the blocks and the mask; this function pads the rows.
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


def attend_grouped(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float
) -> Tensor:
    """The same with all query heads of a key head as rows of one product, so that keys load once.

    Args:
        query: [B, N, H, D].
        key: [B, G, S, D].
        value: [B, G, S, D].
        mask: [B, 1, H / G * padded_rows(N), S], the rows of `slab_attention`'s mask once for every
            query head of a key head.
        scaling: factor on the scores.

    Returns:
        [B, N, H * D], with the bits of `slab_attention`.
    """
    batch, rows, heads, width = query.shape
    query = query.transpose(1, 2)  # [B, H, N, D]
    if missing := padded_rows(rows) - rows:
        query = F.pad(query, (0, 0, 0, missing))
    query = query.reshape(batch, key.shape[1], -1, width)  # [B, G, H / G * N padded, D]
    output = F.scaled_dot_product_attention(query, key, value, mask, scale=scaling)
    output = output.view(batch, heads, rows + missing, width)[:, :, :rows]
    return output.transpose(1, 2).reshape(batch, rows, heads * width)


AttentionInterface.register(IMPLEMENTATION, slab_attention)
