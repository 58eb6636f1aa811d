"""`TokenSet`: tokens that are forbidden together, by one operation on a row of logits."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["TokenSet"]


class TokenSet:
    """A set of tokens, and their places in a row of logits.

    Some models suppress hundreds of tokens at every position. So the places are kept.

    Args:
        tokens: token ids. Those outside a row of logits forbid nothing there.
    """

    def __init__(self, tokens: Iterable[int]) -> None:
        self._tokens = frozenset(tokens)
        self._places: dict[tuple[int, torch.device], Tensor] = {}

    def __contains__(self, token: int) -> bool:
        return token in self._tokens

    def forbid(self, logits: Tensor) -> None:
        """Set the logits [V] of these tokens to -inf."""
        if self._tokens:
            logits.index_fill_(0, self._places_in(logits), -torch.inf)

    def _places_in(self, logits: Tensor) -> Tensor:
        row = logits.shape[0], logits.device
        if row not in self._places:
            inside = sorted(token for token in self._tokens if 0 <= token < logits.shape[0])
            self._places[row] = torch.tensor(inside, dtype=torch.long, device=logits.device)
        return self._places[row]
