"""`VocabularyOverlap`: how a draft model's vocabulary compares with the target's.

`vocabulary.Vocabularies` computes it, and `LLM.vocabulary_overlap` shows it to users.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

__all__ = ["VocabularyOverlap", "Way"]

Way: TypeAlias = Literal["same", "intersection", "text"]
"""How a draft model drafts (see `DraftModelOptions.vocabulary`)."""


@dataclass(frozen=True)
class VocabularyOverlap:
    """How a draft model's vocabulary compares with the target's, and how it therefore drafts.

    Args:
        way: "same", "intersection" or "text" (see `DraftModelOptions.vocabulary`).
        shared: number of tokens that both have.
        target: number of tokens of the target.
        draft: number of tokens of the draft model.
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
