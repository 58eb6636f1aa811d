"""Checks a model's behaviour when its target is constructed (invariant 5).

A small tree is verified and compared with the model's own forward pass, and logits of one position
are compared bit by bit for several numbers of nodes (invariant 7).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from foretoken.core.tree import TokenTree, chain
from foretoken.errors import CompatibilityError
from foretoken.runtime.network import Network, PassOutput

__all__ = ["PROBE_KEY", "probe"]

PROBE_KEY = -1
"""Key of the row that construction-time checks use; profiling uses smaller ones. Requests have
keys from 0."""

TOLERANCE = {True: 1e-3, False: 0.25}
"""Mean error over the logits' spread, in float32 and in 16 bits: rounding stays below, ignoring a
mask or a position does not."""

QUANTIZATION_TOLERANCE = 0.8
"""The same for quantized weights; logits that have nothing in common are at 1.1."""


class Probed(Protocol):
    """The part of `Target` that the checks use."""

    network: Network
    vocab_size: int
    max_model_len: int
    device: torch.device
    dtype: torch.dtype

    def add(self, key: int) -> None:
        """Open a row."""
        ...

    def remove(self, key: int) -> None:
        """Close a row."""
        ...

    def prefill(self, key: int, tokens: Sequence[int]) -> object:
        """Compute and commit these tokens."""
        ...

    def verify(self, keys: Sequence[int], trees: Sequence[TokenTree]) -> list[PassOutput]:
        """See `Target.verify`."""
        ...


@torch.inference_mode()
def probe(target: Probed, model: PreTrainedModel, *, quantized: bool) -> bool:
    """Check trees against the model's own forward pass, and whether invariant 7 holds here.

    Args:
        target: under construction.
        model: its module.
        quantized: whether the target runs quantized weights; trees are then compared with its own
            chains.

    Returns:
        Whether logits had the same bits for every number of nodes tried.

    Raises:
        CompatibilityError: a branch of a tree does not get the logits of the same tokens in a row.
    """
    name = type(model).__name__
    stride = max(1, target.vocab_size // 7)
    a, b, c, d, e = (i * stride % target.vocab_size for i in range(5))
    tree = TokenTree((b, c, d, e), (-1, 0, 0, 2))  # a b c  and  a b d e
    try:
        tree_logits = _logits(target, [a], tree)
        inputs = torch.tensor([[a, b, d, e]], device=target.device)
        own = model(input_ids=inputs).logits[0, 1:]
        in_a_row = _logits(target, [a], chain([b, d, e]))
    except (RuntimeError, TypeError, IndexError, AttributeError) as error:
        raise CompatibilityError(
            f"{name} cannot be run with a 4-D mask, position ids and an external KV cache: "
            f"{str(error).splitlines()[0]}"
        ) from error
    branch = tree_logits[[0, 2, 3]]
    if quantized and not _error(in_a_row, own) <= QUANTIZATION_TOLERANCE:
        raise CompatibilityError(
            f"{name} with quantized weights has little in common with itself: use a finer "
            "quantization, or none."
        )
    expected = in_a_row if quantized else own
    if not _error(branch, expected) <= TOLERANCE[target.dtype == torch.float32]:
        raise CompatibilityError(
            f"{name} does not score a branch of a token tree as it scores the same tokens in a "
            "row: it ignores the 4-D mask or the position ids."
        )
    if target.network.exact_trees and not torch.equal(branch, in_a_row):
        return False
    return _same_bits(target, ([a, b, c, d, e] * 4)[: target.max_model_len])


def _logits(target: Probed, context: Sequence[int], tree: TokenTree) -> Tensor:
    """[n+1, V] of a tree after a context, in a row of its own."""
    target.add(PROBE_KEY)
    try:
        target.prefill(PROBE_KEY, context)
        return target.verify([PROBE_KEY], [tree])[0].scores.clone()
    finally:
        target.remove(PROBE_KEY)


def _same_bits(target: Probed, tokens: Sequence[int]) -> bool:
    if len(tokens) < 4:
        return False  # nothing to compare
    wide = _logits(target, tokens[:2], chain(tokens[2:]))
    narrow = _logits(target, tokens[:2], chain(tokens[2:3]))
    middle = _logits(target, tokens[:3], chain(tokens[3:9]))
    return torch.equal(wide[:1], narrow) and torch.equal(wide[1 : 1 + len(middle)], middle)


def _error(found: Tensor, expected: Tensor) -> float:
    """Mean error over the spread of what was expected."""
    return float((found.float() - expected.float()).abs().mean() / expected.float().std())
