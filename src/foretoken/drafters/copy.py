"""`copy`: the output is the input with changes. The draft is the rest of the input.

Input-guided aggressive decoding: Sun et al., "Instantaneous Grammatical Error Correction with
Shallow Aggressive Decoding"; Ge et al., "Lossless Acceleration for Seq2seq Generation with
Aggressive Decoding". While the output follows the input, the draft goes on in the input; where it
has diverged, nothing is drafted until a suffix of the text is found in the input again.

The input is the prompt, or a region of it (`copy_start`, `copy_end`). Before there is any output,
copying starts at the beginning of an explicit region, as in the papers; in a whole prompt, which
holds instructions besides, it starts where the prompt's own end occurred before, if it did.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
from annotated_types import Ge, Le
from numpy.typing import NDArray

from foretoken.control import Budget
from foretoken.control.evidence import by_match
from foretoken.core.tree import Draft, chain
from foretoken.drafters.base import Drafter, DrafterOptions
from foretoken.request import Request

__all__ = ["CopyDrafter", "CopyOptions"]

LONGEST_MATCH = 32
"""Longer suffixes are not told apart; it bounds the work on inputs that repeat themselves."""

Positions = NDArray[np.int64]


class CopyOptions(DrafterOptions):
    """Options of `copy`.

    Args:
        copy_start: first token of the input in the prompt; negative counts from its end, as in
            Python's slices. None is the prompt's beginning.
        copy_end: token after the input's last, likewise.
        copy_min_match: shortest suffix that aligns text and input again, in tokens.
    """

    copy_start: int | None = None
    copy_end: int | None = None
    copy_min_match: Annotated[int, Ge(1), Le(LONGEST_MATCH)] = 2

    def region(self, prompt: Sequence[int]) -> Sequence[int]:
        """The input within a prompt; empty where the prompt is too short to have it."""
        return prompt[self.copy_start : self.copy_end]

    @property
    def explicit(self) -> bool:
        """Whether the input is told apart from the rest of the prompt."""
        return self.copy_start is not None or self.copy_end is not None


class Alignment:
    """Where in the input a text has arrived: a function of the committed tokens alone.

    Args:
        prompt: what the text begins with.
        options: see `CopyOptions`.
    """

    def __init__(self, prompt: Sequence[int], options: CopyOptions) -> None:
        self.input = list(options.region(prompt))
        self.position: int | None = None
        """Index in the input of the token to come next, or None while there is no alignment."""
        self.match = 1
        """How many of the last tokens are those before the position, as far as was looked."""
        self._last = 0  # where the last alignment ended
        self._min_match = options.copy_min_match
        self._array = np.array(self.input, dtype=np.int64)
        self._ends = occurrences(self._array)
        self._seen = len(prompt)
        if options.explicit:
            self.position = 0
        else:
            self._realign(prompt)

    def catch_up(self, tokens: Sequence[int]) -> None:
        """Follow the committed tokens that are new, one by one."""
        for end in range(self._seen + 1, len(tokens) + 1):
            self._follow(tokens, end)
        self._seen = len(tokens)

    def _follow(self, tokens: Sequence[int], end: int) -> None:
        position = self.position
        if position is not None and self.input[position : position + 1] == [tokens[end - 1]]:
            self.position = self._last = position + 1
            self.match += 1
        else:
            self._realign(tokens[max(0, end - LONGEST_MATCH) : end])

    def _realign(self, suffix: Sequence[int]) -> None:
        """Go where the longest suffix ends in the input, the next one after the last alignment."""
        self.position = None
        ends, self.match = self._longest(suffix)
        if len(ends):
            later = int(np.searchsorted(ends, self._last))
            self.position = self._last = int(ends[min(later, len(ends) - 1)])

    def _longest(self, suffix: Sequence[int]) -> tuple[Positions, int]:
        """Ascending ends in the input of the longest suffix that is long enough, and its length."""
        ends = self._ends.get(suffix[-1], _NOWHERE)
        length = 1
        while len(ends) and length < min(len(suffix), LONGEST_MATCH):
            longer = ends[ends > length]
            longer = longer[self._array[longer - length - 1] == suffix[-length - 1]]
            if not len(longer):
                break
            ends, length = longer, length + 1
        return (ends if length >= self._min_match else _NOWHERE), length

    def rest(self, length: int) -> list[int]:
        """At most `length` tokens of the input from the aligned position on."""
        if self.position is None:
            return []
        return self.input[self.position : self.position + length]


_NOWHERE: Positions = np.empty(0, dtype=np.int64)


def occurrences(tokens: NDArray[Any]) -> dict[int, Positions]:
    """Positions after each token that has a successor, ascending, by token."""
    order = tokens[:-1].argsort(kind="stable")
    distinct, starts = np.unique(tokens[:-1][order], return_index=True)
    return dict(zip(distinct.tolist(), np.split(order + 1, starts[1:]), strict=False))


class CopyDrafter(Drafter):
    """Deterministic: q is one-hot. Proposes nothing while text and input are not aligned."""

    looks_up = True

    def __init__(self, options: CopyOptions) -> None:
        self._options = options
        self._alignments: dict[int, Alignment] = {}

    def propose(self, batch: Sequence[Request], budgets: Sequence[Budget]) -> list[Draft]:
        """Chains."""
        return [
            self._propose(request, budget.chain)
            for request, budget in zip(batch, budgets, strict=True)
        ]

    def _propose(self, request: Request, length: int) -> Draft:
        alignment = self._alignments.get(request.key)
        if alignment is None:
            alignment = Alignment(request.prompt_ids, self._options)
            self._alignments[request.key] = alignment
        alignment.catch_up(request.token_ids)
        drafted = alignment.rest(length)
        features = by_match(alignment.match, len(drafted))
        return Draft.deterministic(chain([request.root, *drafted]), features)

    def release(self, request: Request) -> None:
        """Drop the request's alignment."""
        self._alignments.pop(request.key, None)
