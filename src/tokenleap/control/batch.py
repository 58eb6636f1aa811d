"""`batch`: a table of draft lengths by batch size.

The more requests share a pass, the less idle compute is left for verifying drafts. Serving systems
therefore shorten drafts, or stop drafting, as the batch grows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar

from annotated_types import Ge
from pydantic import field_validator

from tokenleap.control.base import Budget, Controller, within
from tokenleap.core.config import Config

if TYPE_CHECKING:
    from tokenleap.request import Request

__all__ = ["BatchTable"]


class BatchTable(Controller):
    """Takes the table's entry for the largest batch size that is not above the current one."""

    class Options(Config):
        """Options of `batch`: draft length by batch size; 1 must have an entry."""

        lengths: Mapping[Annotated[int, Ge(1)], Annotated[int, Ge(0)]] = {1: 8, 4: 4, 8: 2, 16: 0}

        @field_validator("lengths")
        @classmethod
        def _starts_at_1(cls, value: Mapping[int, int]) -> Mapping[int, int]:
            if 1 not in value:
                raise ValueError("the table needs an entry for batch size 1")
            return value

    name: ClassVar[str] = "batch"
    summary: ClassVar[str] = "a table of lengths by batch size, capped by num_speculative_tokens"

    def budgets(self, batch: Sequence[Request], rows: int) -> list[Budget]:
        """See `Controller.budgets`."""
        assert isinstance(self.options, self.Options)
        lengths = self.options.lengths
        entry = max(size for size in lengths if size <= max(1, rows))
        length = min(lengths[entry], self.num_speculative_tokens)
        return [within(request, length) for request in batch]
