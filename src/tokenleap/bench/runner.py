"""The interface of a contestant inside its process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

__all__ = ["Runner"]


class Runner(Protocol):
    """A loaded contestant. It goes on past an end-of-sequence token."""

    @property
    def device(self) -> str:
        """Where it computes, as torch calls it."""
        ...

    def facts(self) -> dict[str, Any]:
        """Its `version`, `batches` (whether it takes several prompts at once), and bytes."""
        ...

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        temperature: float = 0.0,
        seeds: Sequence[int] = (),
    ) -> list[dict[str, Any]]:
        """Continue every prompt by `max_tokens` tokens: `token_ids`, times and counts of each.

        Args:
            prompts: token ids.
            max_tokens: generated for each.
            temperature: 0 is greedy; only contestants that can sample get another one.
            seeds: one for each prompt if it is sampled.
        """
        ...
