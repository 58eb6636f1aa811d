"""How much to draft: controllers give every request a budget for the next step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from foretoken.request import Request

if TYPE_CHECKING:
    from foretoken.decode import Outcome

__all__ = ["Budget", "Controller", "Fixed"]


@dataclass(frozen=True)
class Budget:
    """Limits of one draft.

    Args:
        nodes: most drafted nodes.
        depth: deepest drafted node; a chain has as many nodes as its depth.
    """

    nodes: int
    depth: int

    @property
    def chain(self) -> int:
        """Longest chain that fits."""
        return min(self.nodes, self.depth)


class Controller(Protocol):
    """Decides before each step, learns after it."""

    def budgets(self, batch: Sequence[Request]) -> list[Budget]:
        """One budget per request."""
        ...

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """See what the step brought."""
        ...


class Fixed:
    """Always the same draft length, cut where the output must end.

    Args:
        num_speculative_tokens: most drafted tokens per step.
    """

    def __init__(self, num_speculative_tokens: int) -> None:
        self.num_speculative_tokens = num_speculative_tokens

    def budgets(self, batch: Sequence[Request]) -> list[Budget]:
        """See `Controller`."""
        # A path of depth d yields d + 1 tokens.
        return [
            Budget(self.num_speculative_tokens, min(self.num_speculative_tokens, r.remaining - 1))
            for r in batch
        ]

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """A fixed length learns nothing."""
