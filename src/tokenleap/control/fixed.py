"""`fixed`: always the same draft length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from tokenleap.control.base import Budget, Controller, within

if TYPE_CHECKING:
    from tokenleap.request import Request

__all__ = ["Fixed"]


class Fixed(Controller):
    """`num_speculative_tokens`, cut where the output must end."""

    name: ClassVar[str] = "fixed"
    summary: ClassVar[str] = "always num_speculative_tokens"

    def budgets(self, batch: Sequence[Request], rows: int) -> list[Budget]:
        """See `Controller.budgets`."""
        return [within(request, self.num_speculative_tokens) for request in batch]
