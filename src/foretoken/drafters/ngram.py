"""`ngram`: prompt lookup. What followed the last few tokens before will follow them again.

Saxena, "Prompt Lookup Decoding"; vLLM's `ngram` method, whose option names are used here. The
longest suffix of the text, of `prompt_lookup_max` down to `prompt_lookup_min` tokens, is looked up
anywhere in prompt and output, the most recent occurrence first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Self

from annotated_types import Ge, Le
from pydantic import model_validator

from foretoken.control import Budget
from foretoken.control.evidence import LONGEST_MATCH
from foretoken.drafters.base import Drafter, DrafterOptions
from foretoken.request import Request
from foretoken.tree import Draft, chain

__all__ = ["NgramDrafter", "NgramOptions"]


class NgramOptions(DrafterOptions):
    """Options of `ngram`: longest and shortest suffix to look up, in tokens."""

    prompt_lookup_max: Annotated[int, Ge(1), Le(64)] = 4
    prompt_lookup_min: Annotated[int, Ge(1), Le(64)] = 1

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min ({self.prompt_lookup_min}) is larger than "
                f"prompt_lookup_max ({self.prompt_lookup_max})."
            )
        return self


_MANY = 16
"""For more new tokens than this many n-grams are made in one go, which takes half as long."""


class NgramIndex:
    """Where each n-gram of a text last occurred; one dictionary insertion per token and order."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._orders = range(longest, shortest - 1, -1)
        self._next: dict[tuple[int, ...], int] = {}  # n-gram -> position after its last occurrence
        self._indexed = 0

    def catch_up(self, tokens: Sequence[int]) -> None:
        """Index every n-gram that has a successor among the committed tokens."""
        new = range(max(self._indexed, 1), len(tokens))
        if len(new) > _MANY:
            for order in self._orders:
                ends = new[max(0, order - new.start) :]
                columns = (
                    tokens[ends.start - back : ends.stop - back] for back in range(order, 0, -1)
                )
                self._next.update(zip(zip(*columns, strict=True), ends, strict=True))
        else:
            for end in new:
                for order in self._orders:
                    if order <= end:
                        self._next[tuple(tokens[end - order : end])] = end
        self._indexed = len(tokens)

    def find(self, tokens: Sequence[int]) -> tuple[int, int] | None:
        """Where the longest known suffix last occurred before: the position after it, its length.

        Longer suffixes than are known may have occurred there: the length is that of the whole.
        """
        for order in self._orders:
            position = self._next.get(tuple(tokens[len(tokens) - order :]))
            if position is not None and order <= len(tokens):
                return position, order + self._further(tokens, position, order)
        return None

    def _further(self, tokens: Sequence[int], position: int, order: int) -> int:
        """How many more tokens are the same before the suffix and its occurrence."""
        for more in range(min(LONGEST_MATCH, position) - order):
            if tokens[position - order - more - 1] != tokens[-order - more - 1]:
                return more
        return max(0, min(LONGEST_MATCH, position) - order)


class NgramDrafter(Drafter):
    """Deterministic: q is one-hot. Proposes nothing where no suffix has occurred before."""

    looks_up = True

    def __init__(self, options: NgramOptions) -> None:
        self.options = options
        self._indices: dict[int, NgramIndex] = {}

    def propose(self, batch: Sequence[Request], budgets: Sequence[Budget]) -> list[Draft]:
        """Chains."""
        return [
            self._propose(request, budget.chain)
            for request, budget in zip(batch, budgets, strict=True)
        ]

    def _propose(self, request: Request, length: int) -> Draft:
        if length <= 0:
            return Draft.empty(request.root)
        index = self._indices.get(request.key)
        if index is None:
            options = self.options
            index = NgramIndex(options.prompt_lookup_min, options.prompt_lookup_max)
            self._indices[request.key] = index
        tokens = request.token_ids
        index.catch_up(tokens)
        found = index.find(tokens)
        if found is None:
            return Draft.empty(request.root)
        position, match = found
        copied = copy_from(tokens, position, length)
        return Draft.deterministic(chain([request.root, *copied]), match)

    def release(self, request: Request) -> None:
        """Drop the request's index."""
        self._indices.pop(request.key, None)


def copy_from(tokens: Sequence[int], position: int, length: int) -> list[int]:
    """`length` tokens from `position` on; past the end it goes on with what it has just copied.

    A text that has begun to repeat itself is thus continued for a whole draft, as in LZ77.
    """
    period = len(tokens) - position
    return [tokens[position + i % period] for i in range(length)]
