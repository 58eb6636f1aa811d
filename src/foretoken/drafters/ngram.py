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
from foretoken.control.evidence import LONGEST_MATCH, by_match
from foretoken.core.tree import Draft, chain
from foretoken.drafters.base import Drafter, DrafterOptions
from foretoken.request import Request

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


class SearchedText:
    """A text as a string, a character a token: Python searches it faster than an index is kept."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._orders = range(shortest, longest + 1)
        self._text = ""

    def catch_up(self, tokens: Sequence[int]) -> None:
        """Append the committed tokens that are new."""
        self._text += "".join(map(chr, tokens[len(self._text) :]))

    def find(self) -> tuple[int, int] | None:
        """Where the longest known suffix last occurred before: the position after it, its length.

        Longer suffixes than are looked up may have occurred there: the length is that of the whole.
        """
        text, length = self._text, 0
        end = len(text) - 1  # an occurrence has a successor
        for order in self._orders:  # a longer one does not occur later than a shorter one
            start = text.rfind(text[-order:], 0, end) if order <= end else -1
            if start < 0:
                break
            end, length = start + order, order
        return (end, length + self._further(end, length)) if length else None

    def _further(self, position: int, length: int) -> int:
        """How many more tokens are the same before the suffix and its occurrence."""
        text, most = self._text, min(LONGEST_MATCH, position) - length
        for more in range(most):
            if text[position - length - more - 1] != text[-length - more - 1]:
                return more
        return max(0, most)


class NgramDrafter(Drafter):
    """Deterministic: q is one-hot. Proposes nothing where no suffix has occurred before."""

    looks_up = True

    def __init__(self, options: NgramOptions) -> None:
        self.options = options
        self._texts: dict[int, SearchedText] = {}

    def propose(self, batch: Sequence[Request], budgets: Sequence[Budget]) -> list[Draft]:
        """Chains."""
        return [
            self._propose(request, budget.chain)
            for request, budget in zip(batch, budgets, strict=True)
        ]

    def _propose(self, request: Request, length: int) -> Draft:
        if length <= 0:
            return Draft.empty(request.root)
        text = self._texts.get(request.key)
        if text is None:
            options = self.options
            text = SearchedText(options.prompt_lookup_min, options.prompt_lookup_max)
            self._texts[request.key] = text
        text.catch_up(request.token_ids)
        found = text.find()
        if found is None:
            return Draft.empty(request.root)
        position, match = found
        copied = copy_from(request.token_ids, position, length)
        return Draft.deterministic(chain([request.root, *copied]), by_match(match, length))

    def release(self, request: Request) -> None:
        """Drop the request's text."""
        self._texts.pop(request.key, None)


def copy_from(tokens: Sequence[int], position: int, length: int) -> list[int]:
    """`length` tokens from `position` on; past the end it goes on with what it has just copied.

    A text that has begun to repeat itself is thus continued for a whole draft, as in LZ77.
    """
    period = len(tokens) - position
    return [tokens[position + i % period] for i in range(length)]
