"""`none`: no speculation. The baseline runs the same loop with empty drafts (invariant 3)."""

from __future__ import annotations

from collections.abc import Sequence

from foretoken.control import Budget
from foretoken.core.tree import Draft
from foretoken.drafters.base import Drafter
from foretoken.request import Request

__all__ = ["NoDrafter"]


class NoDrafter(Drafter):
    """Proposes nothing."""

    def propose(self, batch: Sequence[Request], budgets: Sequence[Budget]) -> list[Draft]:
        """Empty drafts."""
        return [Draft.empty(request.root) for request in batch]
