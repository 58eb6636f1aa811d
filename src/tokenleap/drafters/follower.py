"""`Follower`: where an output is in the text that was predicted for it, and what comes next there.

Everything is a function of the committed tokens (invariant 4). While the output follows the text,
the next tokens are the text's. Where the two differ, the output has *diverged*. It is *aligned*
again where its latest tokens occur in the text: at least two of them anywhere, or a single one a
little ahead. Until then, the tokens behind the divergence are guessed for a few steps.

What stands between a divergence and the next alignment is an *edit*: old tokens of the text, and
the new tokens that the output has in their place. The same edit is expected wherever else the old
tokens come, as when a name is changed throughout a file. An edit that fails as often as it is right
is no longer expected.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tokenleap.control.evidence import (
    EDITED,
    LONGEST_GUESS,
    by_guess,
    by_match,
    by_prediction,
)
from tokenleap.drafters.occurrences import Occurrences, Positions
from tokenleap.drafters.options.lookups import LONGEST_ALIGNED

__all__ = ["Follower", "PredictedText"]

AHEAD = 32
"""How far behind a divergence, in tokens, a single token aligns output and text again."""

NEAR = 256
"""How far behind it two tokens do. A match of three counts wherever it is."""

LONGEST_EDIT = 12
"""Most tokens of an edit's old side, and of its new side."""

MOST_EDITS = 64
"""Most edits that are known of one output. The oldest is dropped."""

FIRST_LENGTH, GUESS_LENGTH = 8, 4
"""Tokens drafted at the text's beginning, and behind a divergence."""

_FIRST_TRUST, _LEAST_TRUST, _TRUST_RATE = 0.6, 0.3, 1 / 16
"""Trust is a running mean: the share of tokens that were those expected. Below the least, drafts
are no longer than the match that they continue, which has at least two tokens."""


class PredictedText:
    """A text that outputs are expected to follow; all outputs of a prompt share it.

    Args:
        tokens: the text.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = tuple(tokens)
        self.occurrences = Occurrences(self.tokens)


@dataclass
class _Edit:
    """Tokens of the text, what the output had in their place, and how often it was so."""

    old: tuple[int, ...]
    new: tuple[int, ...]
    right: int = 0
    wrong: int = 0


@dataclass
class _Divergence:
    """Where the output left the text, and what it has written since then.

    Attributes:
        at: index in the text of the token that did not come.
        written: the output's tokens from there on.
        edit: old and new tokens, if the present alignment is right.
    """

    at: int
    written: list[int]
    edit: tuple[tuple[int, ...], tuple[int, ...]] | None = None


class Follower:
    """Follows one output through a text.

    Args:
        text: the text.
        seen: tokens of the request that stand before the output.

    Attributes:
        seen: tokens of the request that need no following any more.
    """

    def __init__(self, text: PredictedText, seen: int) -> None:
        self._text = text
        self.seen = seen
        self._aligned = True
        self._at = 0  # index of the expected token, or of the first one of `_edit.old`
        self._match = 0  # tokens that the output has followed since the last alignment
        self._edit: _Edit | None = None  # the edit that the output is in
        self._done = 0  # tokens of `_edit.new` that came
        self._left: _Divergence | None = None  # the last one, until an alignment is confirmed
        self._trust = _FIRST_TRUST
        self._edits: dict[tuple[int, ...], _Edit] = {}  # by their old tokens
        self._begin_edits: set[int] = set()  # the first of these tokens

    # What comes next

    def expected(self, length: int) -> tuple[list[int], list[int]]:
        """At most `length` tokens that are expected next, and their features."""
        match = self._match
        if self._trust < _LEAST_TRUST:
            tokens = self._next(min(length, match))[0] if match > 1 else []
            return tokens, list(by_match(match, len(tokens)))
        if not self._aligned:
            return self._guess(length)
        begins = not match and self._left is None
        tokens, edited = self._next(min(length, FIRST_LENGTH if begins else 4 + 2 * match))
        features = [by_prediction(match + depth) for depth in range(len(tokens))]
        for depth in edited:
            features[depth] = EDITED
        return tokens, features

    def _guess(self, length: int) -> tuple[list[int], list[int]]:
        """Tokens behind a divergence, as if one token of the text had been replaced."""
        assert self._left is not None
        age = len(self._left.written)
        if age > LONGEST_GUESS:
            return [], []
        begin = self._left.at + (self._left.at > 0)  # what precedes the text's beginning is new
        tokens = list(self._text.tokens[begin : begin + min(length, GUESS_LENGTH)])
        later = [by_prediction(1 + depth) for depth in range(len(tokens) - 1)]
        return tokens, [by_guess(age), *later][: len(tokens)]

    def _next(self, length: int) -> tuple[list[int], list[int]]:
        """At most `length` tokens from here on, and the places of those that begin an edit."""
        text, at, edit = self._text.tokens, self._at, self._edit
        tokens, edited = list[int](), list[int]()
        if edit is not None:
            tokens += edit.new[self._done :]
            at += len(edit.old)
        while len(tokens) < length and at < len(text):
            edit = self._edit_from(at)
            if edit is None:
                tokens.append(text[at])
                at += 1
            else:
                edited.append(len(tokens))
                tokens += edit.new
                at += len(edit.old)
        return tokens[:length], edited

    def _edit_from(self, at: int) -> _Edit | None:
        """The edit that is expected at this place of the text, the latest of several."""
        text = self._text.tokens
        if text[at] in self._begin_edits:
            for edit in reversed(self._edits.values()):
                if edit.right > edit.wrong and text[at : at + len(edit.old)] == edit.old:
                    return edit
        return None

    # What came

    def catch_up(self, tokens: Sequence[int]) -> None:
        """Follow the new committed tokens, one by one.

        Args:
            tokens: all tokens of the request.
        """
        for end in range(self.seen + 1, len(tokens) + 1):
            hit = self._aligned and self._follows(tokens[end - 1])
            self._trust += _TRUST_RATE * (hit - self._trust)
            if not hit:
                self._diverge(tokens[end - 1])
                self._align(tokens[max(0, end - LONGEST_ALIGNED) : end])
        self.seen = max(self.seen, len(tokens))

    def _follows(self, token: int) -> bool:
        """Whether this is the expected token; if it is, go on behind it."""
        if self._at == len(self._text.tokens):
            return False
        if self._edit is None:
            self._edit, self._done = self._edit_from(self._at), 0
        edit = self._edit
        if token != (self._text.tokens[self._at] if edit is None else edit.new[self._done]):
            return False
        self._match += 1
        if edit is None:
            self._at += 1
        else:
            self._done += 1
            if self._done == len(edit.new):
                edit.right += 1
                self._at, self._edit = self._at + len(edit.old), None
        if self._left is not None:  # a single token was aligned, and now a second one
            self._confirm(self._left)
        return True

    def _diverge(self, token: int) -> None:
        """The output has left the text, or was not aligned with it."""
        if self._left is None:
            edit, self._left = self._edit, _Divergence(self._at, [])
            if edit is not None:
                edit.wrong += 1
                self._left.written += edit.new[: self._done]
        self._left.written.append(token)
        self._left.edit = None
        self._aligned, self._match, self._edit = False, 0, None

    def _align(self, suffix: Sequence[int]) -> None:
        """Find the place in the text behind the output's latest tokens."""
        left = self._left
        assert left is not None
        ends, match = self._text.occurrences.longest(suffix)
        end = _first_behind(ends, left.at) if match > 1 else None
        if match == 2 and (end is None or end > left.at + NEAR):
            end = None
        elif match > 2 and end is None:
            end = int(ends[-1])
        if end is None:
            end, match = _first_behind(self._text.occurrences.of(suffix[-1]), left.at), 1
            if end is None or end > left.at + AHEAD:
                return
        self._aligned, self._at, self._match = True, end, match
        left.edit = self._edit_until(left, end, match)
        if match > 1:
            self._confirm(left)

    def _edit_until(
        self, left: _Divergence, end: int, match: int
    ) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Old and new tokens between a divergence and an alignment; None if they are too many.

        Where one side would be empty, the tokens beside it belong to the edit.
        """
        if end <= left.at:  # it went back
            return None
        text, common = self._text.tokens, min(match, len(left.written), end - left.at)
        resumed = end - common
        old, new = text[left.at : resumed], tuple(left.written[: len(left.written) - common])
        if not (old or new) or max(len(old), len(new)) > LONGEST_EDIT:
            return None
        if not new:
            old, new = (*old, text[resumed]), (text[resumed],)
        if not old:
            if not left.at:
                return None
            before, after = text[left.at - 1], text[resumed]
            old, new = (before, after), (before, *new, after)
        return old, new

    def _confirm(self, left: _Divergence) -> None:
        """The alignment was right: learn the edit before it."""
        self._left = None
        if left.edit is None:
            return
        old, new = left.edit
        edit = self._edits.pop(old, None)
        if edit is None or edit.new != new:
            edit = _Edit(old, new)
        edit.right += 1
        self._edits[old] = edit
        if len(self._edits) > MOST_EDITS:
            del self._edits[next(iter(self._edits))]
        self._begin_edits = {old[0] for old in self._edits}


def _first_behind(ends: Positions, at: int) -> int | None:
    """The first of these ascending positions behind an index of the text; None if there is none."""
    place = int(ends.searchsorted(at, side="right"))
    return int(ends[place]) if place < len(ends) else None
