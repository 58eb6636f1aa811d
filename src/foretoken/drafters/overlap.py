"""How a draft model's tokens compare with the target's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

__all__ = ["VocabularyOverlap", "Way"]

Way: TypeAlias = Literal["same", "intersection", "text"]


@dataclass(frozen=True)
class VocabularyOverlap:
    """How a draft model's tokens compare with the target's, and what was made of it.

    Args:
        way: "same", "intersection" or "text" (see `DraftModelOptions.vocabulary`).
        shared: number of tokens that both have.
        target: number of the target's tokens.
        draft: number of the draft model's tokens.
    """

    way: Way
    shared: int
    target: int
    draft: int

    def __str__(self) -> str:
        return (
            f"{self.shared:,} of the target's {self.target:,} tokens are among the draft model's "
            f"{self.draft:,} (vocabulary '{self.way}')"
        )
