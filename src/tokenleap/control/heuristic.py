"""`heuristic`: longer drafts after one that was accepted whole, shorter ones after any other.

This is Transformers' schedule for assistant models: plus 2, minus 1, never below 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar

from annotated_types import Ge, Le

from tokenleap.control.base import Budget, Controller, within
from tokenleap.core.config import Config

if TYPE_CHECKING:
    from tokenleap.decode import Outcome
    from tokenleap.request import Request

__all__ = ["Heuristic"]


class Heuristic(Controller):
    """Starts every request at `num_speculative_tokens`, or at `max_length` if that is less."""

    class Options(Config):
        """Options of `heuristic`: longest draft, and the steps to grow and shrink by."""

        max_length: Annotated[int, Ge(1), Le(256)] = 20
        grow: Annotated[int, Ge(0)] = 2
        shrink: Annotated[int, Ge(0)] = 1

    name: ClassVar[str] = "heuristic"
    summary: ClassVar[str] = "grows on full acceptance, shrinks otherwise (Transformers' schedule)"

    def setup(self) -> None:
        """See `Controller.setup`."""
        assert isinstance(self.options, self.Options)
        self._start = min(self.num_speculative_tokens, self.options.max_length)
        self._lengths: dict[int, int] = {}

    def budgets(self, batch: Sequence[Request], rows: int) -> list[Budget]:
        """See `Controller.budgets`."""
        return [within(request, self._lengths.get(request.key, self._start)) for request in batch]

    def observe(self, outcomes: Sequence[Outcome], draft_seconds: float) -> None:
        """Adapt the length of every request that drafted."""
        assert isinstance(self.options, self.Options)
        for outcome in outcomes:
            if not outcome.draft.tree.num_drafted:
                continue
            key = outcome.request.key
            length = self._lengths.get(key, self._start)
            if outcome.accepted.reason:
                length = max(1, length - self.options.shrink)
            else:
                length = min(self.options.max_length, length + self.options.grow)
            self._lengths[key] = length

    def release(self, request: Request) -> None:
        """Forget the request's length."""
        self._lengths.pop(request.key, None)
