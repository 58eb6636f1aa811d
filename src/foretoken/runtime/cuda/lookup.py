"""`ngram` in tensor operations: the proposals of `drafters/ngram.py`, of all rows at once.

The host's drafter keeps a dictionary of n-grams; the device compares the text with its own end at
every place, which is as many comparisons as there are tokens in the buffer, and no look-up.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["look_up"]


def look_up(
    tokens: Tensor, lengths: Tensor, length: int, shortest: int, longest: int
) -> tuple[Tensor, Tensor]:
    """What followed the longest suffix that occurred before, the last time that it did.

    Args:
        tokens: [B, L] texts; what is behind their ends does not matter.
        lengths: [B] tokens of each, at most L.
        length: tokens to draft.
        shortest: least tokens of a suffix.
        longest: most tokens of a suffix.

    Returns:
        [B, length] drafts, and [B] whether there is one.
    """
    matched = _matched(tokens, lengths, longest)  # [B, L]
    places = torch.arange(tokens.shape[1], device=tokens.device)
    # The longest match first, the latest of equals.
    best, found = (matched * tokens.shape[1] + places).max(dim=1)  # [B]
    period = (lengths - found).clamp(min=1)
    steps = torch.arange(length, device=tokens.device)
    source = found[:, None] + steps % period[:, None]  # [B, length]
    return tokens.gather(1, source), best // tokens.shape[1] >= shortest


def _matched(tokens: Tensor, lengths: Tensor, longest: int) -> Tensor:
    """[B, L]: how many tokens before each place are those before the end; 0 from the end on."""
    places = torch.arange(tokens.shape[1], device=tokens.device)
    running = places < lengths[:, None]
    matched = torch.zeros_like(tokens)
    for back in range(1, longest + 1):
        own = tokens.gather(1, (lengths[:, None] - back).clamp(min=0))  # [B, 1]
        # Rolled, so that place e holds token e - back; the first places have none.
        running = running & (tokens.roll(back, 1) == own) & (places >= back)
        matched = matched + running
    return matched
