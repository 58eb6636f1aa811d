"""`ngram`: prompt lookup. It drafts the tokens that followed the last few tokens before.

Saxena, "Prompt Lookup Decoding"; vLLM's `ngram` method, whose option names are used here. The
longest suffix of the text, of `prompt_lookup_max` down to `prompt_lookup_min` tokens, is looked up
in prompt and output. The most recent occurrence is continued.
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
    """Options of `ngram`.

    Args:
        prompt_lookup_max: longest suffix that is looked up, in tokens.
        prompt_lookup_min: shortest suffix that is looked up, in tokens.
    """

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
    """The text of one request as a string with one character per token.

    Python searches such a string faster than it can maintain an index.

    Args:
        shortest: shortest suffix to look up, in tokens.
        longest: longest suffix to look up, in tokens.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        self._lengths = range(shortest, longest + 1)
        self._text = ""

    def catch_up(self, tokens: Sequence[int]) -> None:
        """Append the new committed tokens; `tokens` is the whole text."""
        self._text += "".join(map(chr, tokens[len(self._text) :]))

    def find(self) -> tuple[int, int] | None:
        """Find the latest earlier occurrence of the longest suffix that occurs.

        Returns:
            The position behind the occurrence, and the length of the match there. The match may be
            longer than the longest suffix that is looked up. None if no suffix occurs.
        """
        text, length = self._text, 0
        end = len(text) - 1  # an occurrence must have a successor
        for size in self._lengths:  # a longer suffix does not occur later than a shorter one
            start = text.rfind(text[-size:], 0, end) if size <= end else -1
            if start < 0:
                break
            end, length = start + size, size
        return (end, length + self._extra_length(end, length)) if length else None

    def _extra_length(self, position: int, length: int) -> int:
        """How many tokens longer than `length` the match before `position` is."""
        text, most = self._text, min(LONGEST_MATCH, position) - length
        for extra in range(most):
            if text[position - length - extra - 1] != text[-length - extra - 1]:
                return extra
        return max(0, most)


class NgramDrafter(Drafter):
    """Chains that continue an earlier occurrence; q is one-hot.

    It proposes nothing if no suffix has occurred before.

    Args:
        options: see `NgramOptions`.
    """

    looks_up = True

    def __init__(self, options: NgramOptions) -> None:
        self.options = options
        self._texts: dict[int, SearchedText] = {}

    def propose(self, batch: Sequence[Request], budgets: Sequence[Budget]) -> list[Draft]:
        """Chains that continue the latest earlier occurrence."""
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
        """Forget the request's text."""
        self._texts.pop(request.key, None)


def copy_from(tokens: Sequence[int], position: int, length: int) -> list[int]:
    """`length` tokens from `position` on; past the end it repeats the tokens it has copied.

    A text with a period shorter than the draft is thus continued for the whole draft, as in LZ77.
    """
    period = len(tokens) - position
    return [tokens[position + i % period] for i in range(length)]
