"""`copy`: for outputs that are the input with changes. The draft is the rest of the input.

Input-guided aggressive decoding: Sun et al., "Instantaneous Grammatical Error Correction with
Shallow Aggressive Decoding"; Ge et al., "Lossless Acceleration for Seq2seq Generation with
Aggressive Decoding". While the output follows the input, the draft continues the input. After the
output has diverged, nothing is drafted until a suffix of the text occurs in the input again.

The input of an encoder-decoder is its source, and copying starts at its beginning, as in the
papers. Special tokens in front of it, such as its language, are left out if the output's own are
given. The input of a decoder-only model is the prompt, or a region of it (`copy_start`,
`copy_end`). If a region is given, copying starts at its beginning, too. A whole prompt also holds
instructions; copying then starts where the prompt's last tokens occurred before, if they did.

The references of a request belong to the input, behind the prompt or the source. No copy goes on
from one of these texts to the next.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import takewhile

import numpy as np

from tokenleap.control import Budget
from tokenleap.control.evidence import by_match
from tokenleap.core.references import NO_REFERENCES, References
from tokenleap.core.tree import Draft, chain
from tokenleap.drafters.base import Drafter
from tokenleap.drafters.occurrences import SEPARATOR, Occurrences
from tokenleap.drafters.options.lookups import LONGEST_ALIGNED, CopyOptions
from tokenleap.request import Request

__all__ = ["CopyDrafter", "CopyOptions"]

MOST_INSERTED = 4
"""Tokens in a row that can be inserted."""


class Alignment:
    """The position in the input that a text has reached: a function of the committed tokens alone.

    Args:
        tokens: the input's texts, with a separator between each two.
        start: index in the input of the first expected token; None without an alignment.
        seen: length of the text so far.
        options: see `CopyOptions`.
    """

    def __init__(
        self, tokens: Sequence[int], start: int | None, seen: int, options: CopyOptions
    ) -> None:
        self.input = list(tokens)
        self.position = start
        """Index in the input of the expected next token; None without an alignment."""
        self.match = 1
        """Length of the match: the text's last tokens equal the input's before the position."""
        self._last = start or 0  # position of the last alignment
        self._min_match = options.copy_min_match
        self._insertions = options.copy_insertions
        self._num_inserted = 0
        self._found = Occurrences(self.input)
        self._seen = seen

    @classmethod
    def of_prompt(
        cls,
        prompt: Sequence[int],
        options: CopyOptions,
        references: References = NO_REFERENCES,
    ) -> Alignment:
        """How a prompt is copied: a region from its beginning, the whole where it ends."""
        start = 0 if options.explicit else None
        alignment = cls(_joined(options.region(prompt), references), start, len(prompt), options)
        if start is None:
            alignment._realign(prompt)
        return alignment

    @classmethod
    def of_source(
        cls,
        source: Sequence[int],
        given: Sequence[int],
        special: Collection[int],
        options: CopyOptions,
        references: References = NO_REFERENCES,
    ) -> Alignment:
        """How an encoder-decoder's source is copied: from its beginning.

        Args:
            source: the source.
            given: how the text begins whatever the model finds: the decoder's prompt, and the token
                that comes first by the model's rules.
            special: the tokens that are not content, those in front of the given ones included.
            options: see `CopyOptions`.
            references: further texts of the input.
        """
        lead = _num_leading(given, special)
        start = _num_leading(source, special) if lead > 1 and not options.explicit else 0
        tokens = _joined(options.region(source), references)
        alignment = cls(tokens, start, lead, options)
        alignment.catch_up(given)
        return alignment

    def catch_up(self, tokens: Sequence[int]) -> None:
        """Follow the new committed tokens, one by one; `tokens` is the whole text."""
        for end in range(self._seen + 1, len(tokens) + 1):
            self._follow(tokens, end)
        self._seen = max(self._seen, len(tokens))

    def _follow(self, tokens: Sequence[int], end: int) -> None:
        position = self.position
        if position is not None and self.input[position : position + 1] == [tokens[end - 1]]:
            self.position = self._last = position + 1
            self.match += 1
            self._num_inserted = 0
        else:
            self._realign(tokens[max(0, end - LONGEST_ALIGNED) : end])
            if self.position is None and self._insertions:
                self._insert(position)

    def _realign(self, suffix: Sequence[int]) -> None:
        """Move behind the longest suffix that occurs in the input.

        Of several occurrences, take the first one after the last alignment, or else the last one.
        """
        self.position = None
        ends, self.match = self._found.longest(suffix)
        if self.match >= self._min_match:
            later = int(np.searchsorted(ends, self._last))
            self.position = self._last = int(ends[min(later, len(ends) - 1)])
            self._num_inserted = 0

    def _insert(self, position: int | None) -> None:
        """Take the last token as inserted in front of the expected one."""
        self._num_inserted += 1
        if self._num_inserted <= MOST_INSERTED:
            self.position, self.match = position, 1

    def rest(self, length: int) -> list[int]:
        """At most `length` tokens of one text of the input, from the aligned position on."""
        if self.position is None:
            return []
        ahead = self.input[self.position : self.position + length]
        return ahead[: ahead.index(SEPARATOR)] if SEPARATOR in ahead else ahead


def _joined(tokens: Sequence[int], references: References) -> list[int]:
    """The texts of an input, with a separator between each two."""
    joined = list(tokens)
    for text in references.texts:
        joined += (SEPARATOR, *text)
    return joined


class CopyDrafter(Drafter):
    """Chains that continue the input; q is one-hot.

    It proposes nothing while text and input are not aligned.

    Args:
        options: see `CopyOptions`.
        special_ids: the tokenizer's special tokens.
    """

    looks_up = True
    quotes_references = True

    def __init__(self, options: CopyOptions, special_ids: Collection[int] = ()) -> None:
        self._options = options
        self._special = frozenset(special_ids)
        self._alignments: dict[int, Alignment] = {}

    def propose(self, batch: Sequence[Request], budgets: Sequence[Budget]) -> list[Draft]:
        """Chains that continue the input at the aligned position."""
        return [
            self._propose(request, budget.chain)
            for request, budget in zip(batch, budgets, strict=True)
        ]

    def _propose(self, request: Request, length: int) -> Draft:
        alignment = self._alignments.get(request.key)
        given = request.given_ids
        if alignment is None:
            alignment = self._alignments[request.key] = self._alignment(request, given)
        alignment.catch_up(request.token_ids)
        ahead = given[len(request.token_ids) :]
        drafted = [*ahead, *alignment.rest(length - len(ahead))][:length]
        features = by_match(alignment.match, len(drafted))
        return Draft.deterministic(chain([request.root, *drafted]), features)

    def _alignment(self, request: Request, given: Sequence[int]) -> Alignment:
        if request.source is None:
            return Alignment.of_prompt(request.prompt_ids, self._options, request.references)
        special = {*self._special, given[0], *given[len(request.prompt_ids) :]}
        return Alignment.of_source(
            request.input_ids, given, special, self._options, request.references
        )

    def release(self, request: Request) -> None:
        """Forget the request's alignment."""
        self._alignments.pop(request.key, None)


def _num_leading(tokens: Sequence[int], special: Collection[int]) -> int:
    """How many special tokens stand in front."""
    return sum(1 for _ in takewhile(special.__contains__, tokens))
