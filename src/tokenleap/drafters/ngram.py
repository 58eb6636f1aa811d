"""`ngram`: prompt lookup. It drafts the tokens that followed the last few tokens before.

Saxena, "Prompt Lookup Decoding"; vLLM's `ngram` method, whose option names are used here. The
longest suffix of the text, of `prompt_lookup_max` down to `prompt_lookup_min` tokens, is looked up
in prompt and output. The most recent occurrence is continued. If a longer match occurs in one of
the request's references, its last occurrence there is continued instead.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenleap.control import Budget
from tokenleap.control.evidence import LONGEST_MATCH, by_match
from tokenleap.core.references import NO_REFERENCES, References
from tokenleap.core.tree import Draft, chain
from tokenleap.drafters.base import Drafter
from tokenleap.drafters.options.lookups import NgramOptions
from tokenleap.request import Request

__all__ = ["NgramDrafter", "NgramOptions"]

SEPARATOR = chr(0x10FFFF)
"""Stands before and behind each reference; no vocabulary has so many tokens."""


class SearchedText:
    """The text of one request as a string with one character per token.

    Python searches such a string faster than it can maintain an index.

    Args:
        shortest: shortest suffix to look up, in tokens.
        longest: longest suffix to look up, in tokens.
        references: the request's references.
    """

    def __init__(self, shortest: int, longest: int, references: References = NO_REFERENCES) -> None:
        self._lengths = range(shortest, longest + 1)
        self._text = ""
        self._beside = references.indexed("ngram", lambda: _joined(references))

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
        return (end, length + self._extra_length(text, end, length)) if length else None

    def find_beside(self, least: int) -> tuple[int, int] | None:
        """Find the last occurrence in the references of the longest suffix that occurs there.

        Args:
            least: the match must have more tokens than this.

        Returns:
            The position behind the occurrence, for `quote`, and the length of the match there; None
            if there is no such match.
        """
        beside, end, length = self._beside, len(self._beside), 0
        first = min(max(least + 1, self._lengths.start), self._lengths[-1])
        for size in range(first, min(self._lengths[-1], len(self._text)) + 1):
            found = _last_with_successor(beside, self._text[-size:], end)
            if found is None:
                break
            end, length = found, size
        if not length:
            return None
        length += self._extra_length(beside, end, length)
        return (end, length) if length > least else None

    def quote(self, position: int, length: int) -> list[int]:
        """At most `length` tokens of one reference, from this position on."""
        return list(map(ord, self._beside[position : position + length].partition(SEPARATOR)[0]))

    def _extra_length(self, text: str, position: int, length: int) -> int:
        """How many tokens longer than `length` the match before a position in `text` is."""
        own, most = self._text, min(LONGEST_MATCH, position, len(self._text)) - length
        for extra in range(most):
            if text[position - length - extra - 1] != own[-length - extra - 1]:
                return extra
        return max(0, most)


def _joined(references: References) -> str:
    """All texts, with a character per token."""
    if not references:
        return ""
    texts = ["".join(map(chr, tokens)) for tokens in references.texts]
    return SEPARATOR + SEPARATOR.join(texts) + SEPARATOR


def _last_with_successor(text: str, suffix: str, end: int) -> int | None:
    """The position behind the last occurrence before `end` that a token follows."""
    start = text.rfind(suffix, 0, end)
    while start >= 0 and text[start + len(suffix)] == SEPARATOR:
        start = text.rfind(suffix, 0, start + len(suffix) - 1)
    return None if start < 0 else start + len(suffix)


class NgramDrafter(Drafter):
    """Chains that continue an earlier occurrence; q is one-hot.

    It proposes nothing if no suffix has occurred before.

    Args:
        options: see `NgramOptions`.
    """

    looks_up = True
    quotes_references = True

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
            shortest, longest = options.prompt_lookup_min, options.prompt_lookup_max
            text = SearchedText(shortest, longest, request.references)
            self._texts[request.key] = text
        text.catch_up(request.token_ids)
        found = text.find()
        if request.references and (beside := text.find_beside(found[1] if found else 0)):
            position, match = beside
            copied = text.quote(position, length)
        elif found is not None:
            position, match = found
            copied = copy_from(request.token_ids, position, length)
        else:
            return Draft.empty(request.root)
        return Draft.deterministic(chain([request.root, *copied]), by_match(match, len(copied)))

    def release(self, request: Request) -> None:
        """Forget the request's text."""
        self._texts.pop(request.key, None)


def copy_from(tokens: Sequence[int], position: int, length: int) -> list[int]:
    """`length` tokens from `position` on; past the end it repeats the tokens it has copied.

    A text with a period shorter than the draft is thus continued for the whole draft, as in LZ77.
    """
    period = len(tokens) - position
    return [tokens[position + i % period] for i in range(length)]
