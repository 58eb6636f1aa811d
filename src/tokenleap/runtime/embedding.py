"""Embeddings of token ids behind the vocabulary, which a drafter has learnt (`Network.extend`)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["ExtendedEmbedding", "extended", "look_up"]


def look_up(tokens: Tensor, embedding: Tensor, more: Tensor | None) -> Tensor:
    """The rows of tokens in two tables, the second of which may be missing.

    Args:
        tokens: [...] ids below V + L.
        embedding: [V, E].
        more: [L, E] those of the ids from V on.

    Returns:
        [..., E].
    """
    if more is None:
        return F.embedding(tokens, embedding)
    known = F.embedding(tokens.clamp(max=len(embedding) - 1), embedding)
    return _chosen(tokens, known, more, len(embedding))


def _chosen(tokens: Tensor, known: Tensor, more: Tensor, first: int) -> Tensor:
    """[..., E] the rows `known` of tokens below `first`, and those [L, E] of the others."""
    added = F.embedding((tokens - first).clamp(min=0), more).to(known.dtype)
    return torch.where((tokens >= first).unsqueeze(-1), added, known)


class ExtendedEmbedding(nn.Module):
    """An embedding module of V tokens, with more tokens behind them.

    Args:
        inner: the module.
        rows: [L, E] what it would return for the others.
    """

    def __init__(self, inner: nn.Module, rows: Tensor) -> None:
        super().__init__()
        self.inner, self.first = inner, len(inner.weight)  # type: ignore[arg-type]
        self.rows = nn.Parameter(rows)

    @property
    def weight(self) -> Tensor:
        """[V, E] the rows of the vocabulary, for callers that tie or measure them."""
        weight = self.inner.weight
        assert isinstance(weight, Tensor)
        return weight

    def forward(self, tokens: Tensor) -> Tensor:
        """[...] ids below V + L -> [..., E]."""
        known: Tensor = self.inner(tokens.clamp(max=self.first - 1))
        return _chosen(tokens, known, self.rows, self.first)


def extended(embedding: nn.Module, rows: Tensor) -> tuple[ExtendedEmbedding, int]:
    """An embedding module with more tokens.

    Args:
        embedding: of V tokens, or one that was extended before.
        rows: [L, E] what it is to return for the next ids.

    Returns:
        The module, which shares the weights of the vocabulary, and the first of these ids.
    """
    if isinstance(embedding, ExtendedEmbedding):
        known = embedding.rows
        more = torch.cat([known, rows.to(known)])
        module = ExtendedEmbedding(embedding.inner, more)
        return module.requires_grad_(False), module.first + len(known)
    weight = embedding.weight
    assert isinstance(weight, Tensor)
    module = ExtendedEmbedding(embedding, rows.to(weight.device, weight.dtype))
    return module.requires_grad_(False), len(weight)
