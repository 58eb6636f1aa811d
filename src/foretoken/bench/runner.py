"""What every contestant has to offer inside its process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

__all__ = ["Runner"]


class Runner(Protocol):
    """A loaded contestant. Decoding is greedy, and an end of sequence does not end it."""

    @property
    def device(self) -> str:
        """Where it computes, as torch calls it."""
        ...

    def facts(self) -> dict[str, Any]:
        """What it is: `version`, `batches` (whether it takes several prompts at once), bytes."""
        ...

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[dict[str, Any]]:
        """Continue every prompt by `max_tokens` tokens: `token_ids` of each, and what it counts."""
        ...
