"""Attention over the KV slab, for networks on PyTorch's operations.

Transformers modules (`module.py`) call `slab_attention`, which is registered as the attention
implementation "tokenleap". `lean.py` calls `attend_grouped` and `seq2seq/` `attend_by_head`, which
are faster. `attend_scored` is for architectures that change the scores (Gemma 2) or the softmax
(GPT-OSS).

On a CPU, PyTorch's attention gives a query row the same bits whatever other rows are computed with
it, if the number of rows is a multiple of 4 and the number of keys a multiple of 512 (invariant 7).
The slab provides whole key blocks and `PassInputs` the mask. The functions here pad the rows. A row
that sees none but the first 128 keys also has the same bits when there are just 128 (`key_span`).
"""

from __future__ import annotations

from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokenleap.errors import CompatibilityError

KEY_BLOCK = 512  # attention reads keys in multiples of this

SHORT_SPAN = 128  # attention over up to so many positions may read so many keys, less than a block

ROW_MULTIPLE = 4  # query rows are padded to a multiple of this

UNSUPPORTED = ("position_bias", "head_mask")
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
        query: [B, H, N, D].
        key: [B, G, S, D]; the H query heads share G key heads. S is a multiple of `KEY_BLOCK`.
        value: [B, G, S, D].
        attention_mask: [B, 1 or H, padded_rows(N), S], added to the scores.

    Returns:
        [B, N, H, D], and None in place of the attention weights.
    """
    for name in UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise CompatibilityError(f"attention with '{name}' is not supported.")
    assert attention_mask is not None, "the target always passes a mask"
    assert dropout == 0, "dropout is for training only"
    rows = query.shape[2]
    query = F.pad(query, (0, 0, 0, padded_rows(rows) - rows))
    softcap, sinks = kwargs.get("softcap"), kwargs.get("s_aux")
    if softcap is not None or sinks is not None:
        scaling = query.shape[3] ** -0.5 if scaling is None else scaling
        output = attend_scored(query, key, value, attention_mask, scaling, softcap, sinks)
        return output[:, :, :rows].transpose(1, 2), None
    grouped = query.shape[1] != key.shape[1]
    output = F.scaled_dot_product_attention(
        query, key, value, attention_mask, scale=scaling, enable_gqa=grouped
    )  # [B, H, N padded, D]
    return output[:, :, :rows].transpose(1, 2), None


def grouped_mask(mask: Tensor, nodes: int, group: int) -> Tensor:
    """The mask of `attend_grouped`, [B, 1, padded_rows(group * N), S], from [B, 1, >= N, S]."""
    rows = mask[:, :, :nodes].repeat(1, 1, group, 1)
    # Padding rows see all keys, because a softmax over no keys would be NaN.
    return F.pad(rows, (0, 0, 0, padded_rows(rows.shape[2]) - rows.shape[2]))


def attend_grouped(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float
) -> Tensor:
    """Attention in which all query heads of a key head are rows of one matrix product.

    So each key is read once for all of them, and a few nodes need little padding. The result
    [B, N, H * D] has the same bits as that of `slab_attention`. Queries are [B, N, H, D], keys and
    values [B, G, S, D].
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


def attend_scored(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention with capped scores, or with a sink beside the keys.

    The scores s become c tanh(s / c) with a cap c. A sink is one more score per head, which takes a
    part of the softmax and has no value. The scores are made here. PyTorch's attention then takes
    them as the mask of queries that are zero, because its softmax and its sum over the keys keep
    invariant 7. Queries and result are [B, H, R, D], with R a multiple of `ROW_MULTIPLE`, keys and
    values [B, G, S, D], the mask is [B, 1, R, S], and sinks are [H].
    """
    batch, heads, rows, width = query.shape
    groups = key.shape[1]
    query = query.reshape(batch, groups, heads // groups * rows, width)
    scores = (query @ key.transpose(2, 3)).float() * scaling
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    scores = (scores.view(batch, groups, -1, rows, scores.shape[3]) + mask[:, :, None]).flatten(
        2, 3
    )
    if query.device.type != "cpu":  # only the CPU's attention takes float32 masks in any dtype
        scores = scores.to(query.dtype)
    output = F.scaled_dot_product_attention(torch.zeros_like(query), key, value, scores)
    output = output.reshape(batch, heads, rows, width)
    if sinks is None:
        return output
    # Block by block, because PyTorch's order of summation depends on the number of keys.
    blocks = scores.float().view(batch, heads, rows, -1, KEY_BLOCK).logsumexp(4, keepdim=True)
    total = reduce(torch.logaddexp, blocks.unbind(3))  # [B, H, R, 1]
    share = torch.sigmoid(total - sinks.float().view(heads, 1, 1))
    return (output * share).to(output.dtype)


def attend_by_head(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float
) -> Tensor:
    """Attention in which each query head has keys of its own; it copies at most the query.

    The result has the shape and the bits of `attend_grouped`. Keys and values are [B, H, S, D], the
    mask is [B, 1 or H, padded_rows(N), S].
    """
    nodes = query.shape[1]
    if missing := padded_rows(nodes) - nodes:
        query = F.pad(query, (0, 0, 0, 0, 0, missing))
    output = F.scaled_dot_product_attention(query.transpose(1, 2), key, value, mask, scale=scaling)
    return output.transpose(1, 2)[:, :nodes].flatten(2)  # a view: the kernel puts heads last
