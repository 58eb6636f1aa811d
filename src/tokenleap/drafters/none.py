"""`none`: no speculation. The baseline runs the same loop with empty drafts (invariant 3)."""

from __future__ import annotations

from collections.abc import Sequence

from tokenleap.control import Budget
from tokenleap.core.tree import Draft
from tokenleap.drafters.base import Drafter
from tokenleap.request import Request

__all__ = ["NoDrafter"]


class NoDrafter(Drafter):
    """Proposes nothing."""

    def propose(self, batch: Sequence[Request], budgets: Sequence[Budget]) -> list[Draft]:
        """Empty drafts."""
        return [Draft.empty(request.root) for request in batch]
