"""`suffix`: drafts what followed the text's suffixes before, in this text and in earlier outputs.

Oliaro et al., "SuffixDecoding: Extreme Speculative Decoding for Emerging AI Applications". One trie
holds the request's own prompt and output. Another one holds the outputs of earlier requests of the
same scope, and the least recently used ones are dropped. Every suffix of the text that occurs in a
trie gives one candidate: its most probable continuations, with relative frequencies as
probabilities. A longer match allows a longer draft. The score of a candidate is its expected number
of accepted tokens, the sum of its nodes' path probabilities. The candidate with the highest score
is the draft. Option names are vLLM's where vLLM has the option. The references of a request have a
trie of their own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate

from tokenleap.control import Budget
from tokenleap.core.references import References
from tokenleap.core.sequence import Scope
from tokenleap.core.tree import Draft, TokenTree
from tokenleap.decode import Outcome, StepTimes
from tokenleap.drafters.base import Drafter
from tokenleap.drafters.options.lookups import SuffixOptions
from tokenleap.drafters.suffix_candidates import Candidate, grow_chain, grow_tree, times
from tokenleap.drafters.suffix_trie import Node, Place, SuffixTrie, Text
from tokenleap.request import Request

__all__ = ["SuffixDrafter", "SuffixOptions"]


class EarlierOutputs:
    """The outputs of requests that have ended, in a trie per salt (`Scope`).

    The limits of the options are for all salts together.

    Args:
        options: see `SuffixOptions`.

    Attributes:
        num_tokens: tokens of all kept outputs.
    """

    def __init__(self, options: SuffixOptions) -> None:
        self._depth = options.suffix_decoding_max_tree_depth
        self._tries: dict[str, SuffixTrie] = {}  # none is empty
        # By salt and key; least recently used first.
        self._texts: OrderedDict[tuple[str, int], Text] = OrderedDict()
        self._max_requests = options.suffix_decoding_max_cached_requests
        self._max_tokens = options.suffix_decoding_max_cached_tokens
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._texts)

    def trie(self, scope: Scope) -> SuffixTrie | None:
        """The outputs that a request may read; None if there are none."""
        return None if scope.private else self._tries.get(scope.salt)

    def add(self, output: Sequence[int], scope: Scope) -> None:
        """Keep an output; if it is longer than the limit, keep its last tokens."""
        if scope.private:
            return
        output = output[max(0, len(output) - self._max_tokens) :]
        if not output or not self._max_requests:
            return
        while self._texts and (
            len(self._texts) >= self._max_requests
            or self.num_tokens + len(output) > self._max_tokens
        ):
            self._drop_oldest()
        trie = self._tries.setdefault(scope.salt, SuffixTrie(self._depth))
        text = trie.open()
        for token in output:
            trie.append(text, token)
        self._texts[scope.salt, text.key] = text
        self.num_tokens += len(output)

    def _drop_oldest(self) -> None:
        (salt, _), text = self._texts.popitem(last=False)
        trie = self._tries[salt]
        trie.remove(text)
        if not trie.root.children:
            del self._tries[salt]
        self.num_tokens -= len(text.tokens)

    def used(self, scope: Scope, key: int) -> None:
        """Mark an output as used just now; nothing happens if it was dropped meanwhile."""
        if (scope.salt, key) in self._texts:
            self._texts.move_to_end((scope.salt, key))


class OwnText:
    """A trie of the prompt and output of one request.

    Args:
        max_depth: most tokens of a string in the trie.
    """

    def __init__(self, max_depth: int) -> None:
        self._trie = SuffixTrie(max_depth)
        self._text = self._trie.open()
        self._max_match = max_depth - 1

    def catch_up(self, tokens: Sequence[int]) -> None:
        """Append the new committed tokens; `tokens` is the whole text."""
        for token in tokens[len(self._text.tokens) :]:
            self._trie.append(self._text, token)

    @property
    def longest(self) -> int:
        """Length of the longest suffix that occurred before, in tokens."""
        return min(len(self._text.cursors) - 1, self._max_match)

    def match(self, length: int) -> Node:
        """The trie's node of the suffix of this length, at most `longest`."""
        return self._text.cursors[length]


def trie_of(references: References, max_depth: int) -> SuffixTrie:
    """A trie of all references, shared by the requests that have them."""

    def build() -> SuffixTrie:
        trie = SuffixTrie(max_depth)
        for tokens in references.texts:
            text = trie.open()
            for token in tokens:
                trie.append(text, token)
        return trie

    return references.indexed(("suffix", max_depth), build)


class SuffixDrafter(Drafter):
    """Chains or trees of the best candidate; q is one-hot.

    It proposes nothing if no suffix has occurred before.

    Args:
        options: see `SuffixOptions`.
    """

    quotes_references = True
    only_counts = True

    def __init__(self, options: SuffixOptions) -> None:
        self.drafts_trees = options.branching
        self.looks_up = not options.branching
        self._options = options
        self._depth = options.suffix_decoding_max_tree_depth
        # Indexed by the length of the match:
        self._lengths = [options.draft_length(match) for match in range(self._depth)]
        self._longest = list(accumulate(self._lengths, max))  # of this match or any shorter one
        self._peak = self._lengths.index(self._longest[-1])  # the match with the longest draft
        self._earlier = EarlierOutputs(options)
        self._own: dict[int, OwnText] = {}
        self._rewound: set[int] = set()  # keys of requests whose output must not be kept
        self._recalled: dict[int, TokenTree] = {}  # key -> this step's draft, if from earlier ones

    def propose(self, batch: Sequence[Request], budgets: Sequence[Budget]) -> list[Draft]:
        """Chains, or trees with `branching`."""
        return [
            self._propose(request, budget) for request, budget in zip(batch, budgets, strict=True)
        ]

    def _propose(self, request: Request, budget: Budget) -> Draft:
        own = self._own.get(request.key)
        if own is None:
            own = self._own[request.key] = OwnText(self._depth)
            self._rewound.discard(request.key)
        own.catch_up(request.token_ids)
        self._recalled.pop(request.key, None)
        if budget.chain <= 0:
            return Draft.empty(request.root)
        best = self._best(own.longest, own.match, budget, Candidate())
        recent = request.token_ids[1 - self._depth :]
        if request.references:
            beside = trie_of(request.references, self._depth)
            best = self._best(beside.longest(recent), partial(beside.find, recent), budget, best)
        chosen, earlier = best, self._earlier.trie(request.scope)
        if earlier is not None:
            find = partial(earlier.find, recent)
            chosen = self._best(earlier.longest(recent), find, budget, best)
        draft = chosen.draft(request.root, with_features=self.looks_up)
        if chosen is not best:
            self._earlier.used(request.scope, chosen.source)
            self._recalled[request.key] = draft.tree
        return draft

    def _best(
        self, longest: int, match: Callable[[int], Place], budget: Budget, best: Candidate
    ) -> Candidate:
        """The candidate of one trie with the highest score; on a tie that of the longest match.

        Args:
            longest: length of the longest match.
            match: returns the place of the match of a given length.
            budget: limits of the draft.
            best: the best candidate so far; it is returned if none has a higher score.
        """
        branching = self._options.branching
        grow, most = (grow_tree, budget.nodes) if branching else (grow_chain, budget.chain)
        min_path_prob = self._options.suffix_decoding_min_token_prob
        if longest > self._peak and times(match(longest)) == times(match(self._peak)):
            longest = self._peak  # the same occurrences, and a longer draft
        for length in range(longest, 0, -1):
            # A token adds at most 1 to the score, so no shorter match can have a higher one.
            if best.score >= min(most, self._longest[length]):
                break
            max_nodes = min(most, self._lengths[length])
            candidate = grow(match(length), max_nodes, budget, min_path_prob)
            if candidate.score > best.score:
                best, best.match = candidate, length
        return best

    def observe(self, outcomes: Sequence[Outcome], times: StepTimes) -> None:
        """Count the tokens that were found in earlier outputs and are part of this one."""
        for outcome in outcomes:
            if tree := self._recalled.pop(outcome.request.key, None):
                outcome.request.metrics.accepted_earlier_tokens += len(outcome.kept_of(tree))

    def rewind(self, request: Request) -> None:
        """Drop the request's trie. Until it drafts again, its output is not kept for others."""
        self._own.pop(request.key, None)
        self._rewound.add(request.key)

    def release(self, request: Request) -> None:
        """Drop the request's trie, and keep its output for later requests."""
        self._own.pop(request.key, None)
        self._recalled.pop(request.key, None)
        if request.key not in self._rewound:
            self._earlier.add(request.output_ids, request.scope)
        self._rewound.discard(request.key)

    def forget(self) -> None:
        """Forget the outputs of earlier requests."""
        self._earlier = EarlierOutputs(self._options)
