"""Options that the training methods of several kinds of heads share."""

from __future__ import annotations

import sys
from typing import Annotated, Literal

from annotated_types import Ge
from pydantic import FiniteFloat

from tokenleap.core.config import Config

__all__ = ["DraftOptions", "NoiseOptions"]


class DraftOptions(Config):
    """What is drafted.

    Args:
        draft_vocab_size: most tokens that the head can draft: those that the target writes most
            often. None means all.
        loss: between the head's distribution and the target's.
    """

    draft_vocab_size: Annotated[int, Ge(1)] | None = 8192
    loss: Literal["kl", "ce", "tv"] = "kl"

    @property
    def most_draft_tokens(self) -> int:
        """`draft_vocab_size` as a number."""
        return self.draft_vocab_size or sys.maxsize


class NoiseOptions(Config):
    """What is done to hidden states.

    Args:
        noise: standard deviation of the noise on them, relative to their size.
    """

    noise: Annotated[FiniteFloat, Ge(0)] = 0.05
