"""`Rest`: steps without drafts that are planned at once, because a plan takes time, too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenleap.request import Request

__all__ = ["Rest"]


@dataclass
class Rest:
    """Steps in which nothing is planned. It ends early if other requests are in the step.

    Args:
        keys: of the batch.
        rows: number of requests in the whole step.
        waiting: the requests among them that might have had drafts.
        steps: so many are left.

    Attributes:
        taken: so many have passed.
    """

    keys: tuple[int, ...] = ()
    rows: int = 0
    waiting: Sequence[Request] = ()
    steps: int = 0
    taken: int = 0

    def goes_on(self, batch: Sequence[Request], rows: int) -> bool:
        """Whether the step of this batch is another one of them; it is then counted."""
        if not self.steps or rows != self.rows or tuple(r.key for r in batch) != self.keys:
            return False
        self.steps, self.taken = self.steps - 1, self.taken + 1
        return True
