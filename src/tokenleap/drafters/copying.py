"""`copy`: for outputs that are the input with changes. The draft is the rest of the input.

Input-guided aggressive decoding: Sun et al., "Instantaneous Grammatical Error Correction with
Shallow Aggressive Decoding"; Ge et al., "Lossless Acceleration for Seq2seq Generation with
Aggressive Decoding". While the output follows the input, the draft continues the input. After the
output has diverged, nothing is drafted until a suffix of the text occurs in the input again.

The input of an encoder-decoder is its source, and copying starts at its beginning, as in the
papers. Special tokens before it, such as its language, are left out if the output's own are
given. The input of a decoder-only model is the prompt, or a region of it (`copy_start`,
`copy_end`). If a region is given, copying starts at its beginning, too. A whole prompt also holds
instructions; copying then starts where the prompt's last tokens occurred before, if they did.

The references of a request belong to the input, after the prompt or the source. No copy goes on
from one of these texts to the next.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

import numpy as np

from tokenleap.control import Budget
from tokenleap.control.features import (
    EDITED,
    LONGEST_GUESS,
    AcceptanceRates,
    by_guess,
    by_match,
    by_prediction,
    path_probs,
)
from tokenleap.core.references import NO_REFERENCES, References
from tokenleap.core.tree import Draft, chain
from tokenleap.decode import Outcome, StepTimes
from tokenleap.drafters.base import Drafter, DrafterTraits, OneByOne, PerRequest
from tokenleap.drafters.combine import Hybrid, Several
from tokenleap.drafters.lookups import NoDrafter, Occurrences, Positions, joined
from tokenleap.drafters.options import LONGEST_ALIGNED, CopyOptions
from tokenleap.request import Request

MOST_INSERTED = 4
"""Tokens in a row that can be inserted."""


class Alignment:
    """The position in the input that a text has reached: a function of the committed tokens alone.

    Args:
        start: index in the input of the first expected token; None without an alignment.
    """

    def __init__(
        self,
        tokens: Sequence[int],
        start: int | None,
        seen: int,
        options: CopyOptions,
        *,
        of_source: bool,
    ) -> None:
        self._found = Occurrences(list(tokens))
        self.position = start
        """Index in the input of the expected next token; None without an alignment."""
        self.match = 1
        """Length of the match: the text's last tokens equal the input's before the position."""
        self._last = start or 0  # position of the last alignment
        self._min_match = options.min_match(of_source=of_source)
        self._insertions = options.copy_insertions
        self._num_inserted = 0
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
        tokens = joined([options.region(prompt), *references.texts])
        alignment = cls(tokens, start, len(prompt), options, of_source=False)
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

        `given` is the beginning of every text: the decoder's prompt, and tokens forced after it.
        """
        lead = _num_leading(given, special)
        start = _num_leading(source, special) if lead > 1 and not options.explicit else 0
        tokens = joined([options.region(source), *references.texts])
        alignment = cls(tokens, start, lead, options, of_source=True)
        alignment.catch_up(given)
        return alignment

    def catch_up(self, tokens: Sequence[int]) -> None:
        for end in range(self._seen + 1, len(tokens) + 1):
            self._follow(tokens, end)
        self._seen = max(self._seen, len(tokens))

    def _follow(self, tokens: Sequence[int], end: int) -> None:
        position, text = self.position, self._found.tokens
        if position is not None and text[position : position + 1] == [tokens[end - 1]]:
            self.position = self._last = position + 1
            self.match += 1
            self._num_inserted = 0
        else:
            self._realign(tokens[max(0, end - LONGEST_ALIGNED) : end])
            if self.position is None and self._insertions:
                self._insert(position)

    def _realign(self, suffix: Sequence[int]) -> None:
        """Move past the longest suffix that occurs in the input.

        Of several occurrences, take the first one after the last alignment, or else the last one.
        """
        self.position = None
        ends, self.match = self._found.longest(suffix)
        if self.match >= self._min_match:
            later = int(np.searchsorted(ends, self._last))
            self.position = self._last = int(ends[min(later, len(ends) - 1)])
            self._num_inserted = 0

    def _insert(self, position: int | None) -> None:
        """Take the last token as inserted before the expected one."""
        self._num_inserted += 1
        if self._num_inserted <= MOST_INSERTED:
            self.position, self.match = position, 1

    def rest(self, length: int) -> list[int]:
        """At most `length` tokens of one text of the input, from the aligned position on."""
        return [] if self.position is None else self._found.quote(self.position, length)


class CopyDrafter(OneByOne):
    """Chains that continue the input; q is one-hot.

    It proposes nothing while text and input are not aligned.
    """

    traits = DrafterTraits(looks_up=True, quotes_references=True)

    def __init__(self, options: CopyOptions, special_ids: Collection[int] = ()) -> None:
        self._options = options
        self._special = frozenset(special_ids)
        self._alignments = PerRequest[Alignment]()

    def draft(self, request: Request, budget: Budget) -> Draft:
        given, length = request.given_ids, budget.chain
        alignment = self._alignments.made(request.key, lambda: self._alignment(request, given))
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


def _num_leading(tokens: Sequence[int], special: Collection[int]) -> int:
    return sum(1 for _ in takewhile(special.__contains__, tokens))


class PredictionDrafter(OneByOne):
    """Chains that continue the request's prediction; q is one-hot.

    OpenAI's "predicted outputs": a request brings a text that its output will mostly repeat, such
    as the file before an edit. The draft goes on in this text from the place that the output has
    reached (`Follower`). Unlike a reference, a prediction is followed from its beginning, and edits
    that were made before are drafted where they come again.

    It proposes nothing for requests without one, and counts in their metrics what became of the
    proposed tokens.
    """

    traits = DrafterTraits(looks_up=True, follows_prediction=True)

    def __init__(self) -> None:
        self._followers = PerRequest[Follower]()
        self._proposed = PerRequest[list[int]]()  # the tokens of this step's proposal

    def draft(self, request: Request, budget: Budget) -> Draft:
        self._proposed.pop(request.key, None)
        if not request.prediction:
            return Draft.empty(request.root)
        follower = self._followers.made(request.key, lambda: _follower(request))
        follower.catch_up(request.token_ids)
        if not budget.chain or len(request.token_ids) < follower.seen:  # a first token is forced
            return Draft.empty(request.root)
        tokens, features = follower.expected(budget.chain)
        self._proposed[request.key] = tokens
        return Draft.deterministic(chain([request.root, *tokens]), tuple(features))

    def observe(self, outcomes: Sequence[Outcome], times: StepTimes) -> None:
        for outcome in outcomes:
            proposed = self._proposed.pop(outcome.request.key, None)
            if proposed:
                _count(outcome, proposed)


def _follower(request: Request) -> Follower:
    (tokens,) = request.prediction.texts
    text = request.prediction.indexed("prediction", lambda: PredictedText(tokens))
    return Follower(text, len(request.given_ids))


def _count(outcome: Outcome, proposed: Sequence[int]) -> None:
    """Count the nodes of the verified draft that are tokens of the prediction."""
    metrics, kept = outcome.request.metrics, outcome.accepted.path[: len(outcome.committed)]
    nodes = outcome.draft.tree.walk(proposed)
    num_kept = len(set(nodes).intersection(kept))
    metrics.accepted_prediction_tokens += num_kept
    metrics.rejected_prediction_tokens += len(nodes) - num_kept


class BetterLookup(Several):
    """Two drafters that look tokens up; each request gets the draft with more expected tokens.

    How often the tokens of either are right is learnt from what is generated, by their features.
    """

    def __init__(self, first: Drafter, second: Drafter, most: int) -> None:
        assert first.traits.looks_up
        assert second.traits.looks_up
        super().__init__([first, second])
        self._most = most
        self._rates = AcceptanceRates(), AcceptanceRates()
        self._proposed = PerRequest[tuple[Draft, Draft]]()
        self.traits = replace(
            self.traits,
            looks_up=True,
            drafts_trees=second.traits.drafts_trees,
            independent_siblings=second.traits.independent_siblings,
        )

    def propose(self, batch: Sequence[Request], budgets: Sequence[Budget]) -> list[Draft]:
        first, second = self.inner
        others = [replace(budget, nodes=min(budget.nodes, self._most)) for budget in budgets]
        pairs = zip(first.propose(batch, budgets), second.propose(batch, others), strict=True)
        self._proposed.clear()
        self._proposed.update(zip((request.key for request in batch), pairs, strict=True))
        return [self._better(*pair) for pair in self._proposed.values()]

    def _better(self, first: Draft, second: Draft) -> Draft:
        ours, theirs = (
            sum(path_probs(draft, rates.of)) if draft.features else 0.0
            for draft, rates in zip((first, second), self._rates, strict=True)
        )
        return first if ours >= theirs and first.features else second

    def observe(self, outcomes: Sequence[Outcome], times: StepTimes) -> None:
        """Both see every outcome; and it is learnt which tokens were right, verified or not."""
        for outcome in outcomes:
            if pair := self._proposed.pop(outcome.request.key, None):
                for draft, rates in zip(pair, self._rates, strict=True):
                    rates.learn(draft, outcome)
        super().observe(outcomes, times)

    def forget(self) -> None:
        self._rates = AcceptanceRates(), AcceptanceRates()
        super().forget()


def with_prediction(drafter: Drafter, most: int) -> Drafter:
    """A drafter that takes its drafts from the requests' predictions, too.

    Which of the two drafts is verified is decided like that between lookups and trained drafts
    (`Hybrid`), or, beside another lookup, by `BetterLookup`.

    Args:
        drafter: what drafts where there is no prediction, or where it is of no use. It may serve
            other requests as well, for its state belongs to requests.
    """
    prediction = PredictionDrafter()
    if isinstance(drafter, NoDrafter):
        return prediction
    if isinstance(drafter, Hybrid):
        return drafter.with_lookup(lambda lookup: BetterLookup(prediction, lookup, most))
    if drafter.traits.looks_up:
        return BetterLookup(prediction, drafter, most)
    return Hybrid(prediction, drafter, most)


AHEAD = 32
"""How far after a divergence, in tokens, a single token aligns output and text again."""

NEAR = 256
"""How far after it two tokens do. A match of three counts wherever it is."""

LONGEST_EDIT = 12
"""Most tokens of an edit's old side, and of its new side."""

MOST_EDITS = 64
"""Most edits that are known of one output. The oldest is dropped."""

FIRST_LENGTH, GUESS_LENGTH = 8, 4
"""Tokens drafted at the text's beginning, and after a divergence."""

_FIRST_TRUST, _LEAST_TRUST, _TRUST_RATE = 0.6, 0.3, 1 / 16
"""Trust is a running mean: the share of tokens that were those expected. Below the least, drafts
are no longer than the match that they continue, which has at least two tokens."""


class PredictedText:
    """A text that outputs are expected to follow; all outputs of a prompt share it."""

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
        edit: old and new tokens, if the present alignment is right.
    """

    at: int
    written: list[int]
    edit: tuple[tuple[int, ...], tuple[int, ...]] | None = None


class Follower:
    """Follows one output through the text that was predicted for it.

    Everything is a function of the committed tokens (invariant 4). While the output follows the
    text, the next tokens are the text's. Where the two differ, the output has *diverged*. It is
    *aligned* again where its latest tokens occur in the text: at least two of them anywhere, or a
    single one a little ahead. Until then, the tokens after the divergence are guessed for a few
    steps.

    Between a divergence and the next alignment is an *edit*: old tokens of the text, and the new
    tokens that the output has in their place. The same edit is expected wherever else the old
    tokens come, as when a name is changed throughout a file. An edit that fails as often as it is
    right is no longer expected.
    """

    def __init__(self, text: PredictedText, seen: int) -> None:
        self._text = text
        self.seen = seen  # tokens of the request that need no following any more
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
        """Tokens after a divergence, as if one token of the text had been replaced."""
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
        for end in range(self.seen + 1, len(tokens) + 1):
            hit = self._aligned and self._follows(tokens[end - 1])
            self._trust += _TRUST_RATE * (hit - self._trust)
            if not hit:
                self._diverge(tokens[end - 1])
                self._align(tokens[max(0, end - LONGEST_ALIGNED) : end])
        self.seen = max(self.seen, len(tokens))

    def _follows(self, token: int) -> bool:
        """Whether this is the expected token; if it is, go on after it."""
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
        """Find the place in the text after the output's latest tokens."""
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
    """The first of these ascending positions after an index of the text; None if there is none."""
    place = int(ends.searchsorted(at, side="right"))
    return int(ends[place]) if place < len(ends) else None
