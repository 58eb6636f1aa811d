"""Attention over the KV slab, for networks on PyTorch's operations.

Transformers modules (`module.py`) call `slab_attention`, which is registered as the attention
implementation "foretoken". `lean.py` calls `attend_grouped` and `seq2seq/` `attend_by_head`, which
are faster.

On a CPU, PyTorch's attention gives a query row the same bits whatever other rows are computed with
it, if the number of rows is a multiple of 4 and the number of keys a multiple of 512 (invariant 7).
The slab provides whole key blocks and `PassInputs` the mask. The functions here pad the rows. A row
that sees none but the first 128 keys also has the same bits when there are just 128 (`key_span`).
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
    "SHORT_SPAN",
    "attend_by_head",
    "attend_grouped",
    "key_span",
    "padded_rows",
    "slab_attention",
]

IMPLEMENTATION = "foretoken"

KEY_BLOCK = 512
"""Attention reads keys in multiples of this."""

SHORT_SPAN = 128
"""Attention over up to so many positions may read so many keys, less than a block."""

ROW_MULTIPLE = 4
"""Query rows are padded to a multiple of this."""

UNSUPPORTED = ("softcap", "s_aux", "position_bias", "head_mask")
"""Arguments by which some architectures change attention. Ignoring one would silently change the
model."""


def padded_rows(rows: int) -> int:
    """`rows` rounded up to a multiple of `ROW_MULTIPLE`."""
    return -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE


def key_span(positions: int) -> int:
    """Fewest keys to read for so many positions, padding included, for the same bits."""
    if positions <= SHORT_SPAN:
        return SHORT_SPAN
    return -(-positions // KEY_BLOCK) * KEY_BLOCK


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
    """Attention with the signature that Transformers modules call.

    Args:
        module: the attention module; not used.
        query: [B, H, N, D].
        key: [B, G, S, D]; the H query heads share G key heads. S is a multiple of `KEY_BLOCK`.
        value: [B, G, S, D].
        attention_mask: [B, 1, padded_rows(N), S] in the query's dtype; it is added to the scores.
        dropout: must be 0.
        scaling: factor on the scores; None means 1/sqrt(D).
        **kwargs: refused if in `UNSUPPORTED`, otherwise ignored.

    Returns:
        [B, N, H, D], and None in place of the attention weights.

    Raises:
        CompatibilityError: the architecture passes an argument in `UNSUPPORTED`.
    """
    for name in UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise CompatibilityError(f"attention with '{name}' is not supported.")
    assert attention_mask is not None, "the target always passes a mask"
    assert dropout == 0, "dropout is for training only"
    rows = query.shape[2]
    query = F.pad(query, (0, 0, 0, padded_rows(rows) - rows))
    grouped = query.shape[1] != key.shape[1]
    output = F.scaled_dot_product_attention(
        query, key, value, attention_mask, scale=scaling, enable_gqa=grouped
    )  # [B, H, N padded, D]
    return output[:, :, :rows].transpose(1, 2), None


def grouped_mask(mask: Tensor, nodes: int, group: int) -> Tensor:
    """The mask that `attend_grouped` takes, [B, 1, padded_rows(group * N), S].

    Args:
        mask: [B, 1, N or more, S], added to the scores.
        nodes: N.
        group: number of query heads that share a key head, H / G.
    """
    rows = mask[:, :, :nodes].repeat(1, 1, group, 1)
    # Padding rows see all keys, because a softmax over no keys would be NaN.
    return F.pad(rows, (0, 0, 0, padded_rows(rows.shape[2]) - rows.shape[2]))


def attend_grouped(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float
) -> Tensor:
    """Attention in which all query heads of a key head are rows of one matrix product.

    So each key is read once for all of them, and a few nodes need little padding. The result has
    the same bits as that of `slab_attention`.

    Args:
        query: [B, N, H, D].
        key: [B, G, S, D].
        value: [B, G, S, D].
        mask: from `grouped_mask`.
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


def attend_by_head(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float
) -> Tensor:
    """Attention in which each query head has keys of its own; it copies at most the query.

    The result has the same bits as that of `attend_grouped`.

    Args:
        query: [B, N, H, D].
        key: [B, H, S, D].
        value: [B, H, S, D].
        mask: [B, 1 or H, padded_rows(N), S], added to the scores.
        scaling: factor on the scores.

    Returns:
        [B, N, H * D].
    """
    nodes = query.shape[1]
    if missing := padded_rows(nodes) - nodes:
        query = F.pad(query, (0, 0, 0, 0, 0, missing))
    output = F.scaled_dot_product_attention(query.transpose(1, 2), key, value, mask, scale=scaling)
    return output.transpose(1, 2)[:, :nodes].flatten(2)  # a view: the kernel puts heads last


AttentionInterface.register(IMPLEMENTATION, slab_attention)
