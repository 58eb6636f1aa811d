"""The interface of a contestant inside its process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

__all__ = ["Runner"]


class Runner(Protocol):
    """A loaded contestant. It decodes greedily and goes on past an end-of-sequence token."""

    @property
    def device(self) -> str:
        """Where it computes, as torch calls it."""
        ...

    def facts(self) -> dict[str, Any]:
        """Its `version`, `batches` (whether it takes several prompts at once), and bytes."""
        ...

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[dict[str, Any]]:
        """Continue every prompt by `max_tokens` tokens: `token_ids`, times and counts of each."""
        ...
