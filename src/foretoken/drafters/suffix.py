"""`suffix`: what followed the longest suffixes of the text before, here and in earlier outputs.

Oliaro et al., "SuffixDecoding: Extreme Speculative Decoding for Emerging AI Applications". One
trie holds the request's own prompt and output, another one the outputs of earlier requests, the
least recently used out first. Every suffix of the text that is found in either is continued by its
most probable continuations, probabilities being relative frequencies, and the longer the match the
longer the draft. Each candidate is scored by the tokens it expects to see accepted, the sum of its
nodes' path probabilities; the best one is taken. Option names are vLLM's where it has them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Annotated

from annotated_types import Ge, Gt, Le

from foretoken.control import Budget
from foretoken.control.evidence import by_match
from foretoken.core.tree import Draft, TokenTree
from foretoken.drafters.base import Drafter, DrafterOptions
from foretoken.drafters.best_first import best_first
from foretoken.drafters.suffix_trie import Node, Place, SuffixTrie, Text
from foretoken.request import Request

__all__ = ["SuffixDrafter", "SuffixOptions"]


class SuffixOptions(DrafterOptions):
    """Options of `suffix`.

    Args:
        suffix_decoding_max_tree_depth: most tokens of match and draft together.
        suffix_decoding_max_cached_requests: most earlier outputs that are kept; 0 keeps none.
        suffix_decoding_max_cached_tokens: most tokens of earlier outputs that are kept, at about
            0.4 kB each; 0 keeps none.
        suffix_decoding_max_spec_factor: most drafted tokens per matched token (the paper's alpha,
            which is 1 there and in vLLM; the controller cuts what does not pay).
        suffix_decoding_min_token_prob: least estimated probability of a drafted token, that of
            its ancestors included.
        branching: draft trees, for rules that take branches; otherwise chains.
    """

    suffix_decoding_max_tree_depth: Annotated[int, Ge(2), Le(256)] = 24
    suffix_decoding_max_cached_requests: Annotated[int, Ge(0)] = 10_000
    suffix_decoding_max_cached_tokens: Annotated[int, Ge(0)] = 100_000
    suffix_decoding_max_spec_factor: Annotated[float, Gt(0), Le(256)] = 2.0
    suffix_decoding_min_token_prob: Annotated[float, Ge(0), Le(1)] = 0.1
    branching: bool = False

    def draft_length(self, match: int) -> int:
        """Most tokens drafted after a match of this length."""
        longest = int(self.suffix_decoding_max_spec_factor * match + 1e-6)
        return max(0, min(longest, self.suffix_decoding_max_tree_depth - match))


@dataclass
class Candidate:
    """A draft and what is expected of it.

    Attributes:
        tokens: drafted tokens, without the root.
        parents: index of each one's parent among them; -1 for the root's children.
        score: expected number of accepted tokens.
        match: length of the suffix that was found.
        source: key of a text it came from.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    score: float = 0.0
    match: int = 0
    source: int = -1

    def draft(self, root: int, *, with_features: bool) -> Draft:
        """The same as a deterministic draft; only chains can have features."""
        parents = (-1, *(parent + 1 for parent in self.parents))
        tree = TokenTree((root, *self.tokens), parents)
        features = by_match(self.match, tree.num_drafted) if with_features else ()
        return Draft.deterministic(tree, features)


class EarlierOutputs:
    """Outputs of requests that have ended, within the options' bounds."""

    def __init__(self, options: SuffixOptions) -> None:
        self.trie = SuffixTrie(options.suffix_decoding_max_tree_depth)
        self._texts: OrderedDict[int, Text] = OrderedDict()  # least recently used first
        self._max_requests = options.suffix_decoding_max_cached_requests
        self._max_tokens = options.suffix_decoding_max_cached_tokens
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._texts)

    def add(self, output: Sequence[int]) -> None:
        """Keep an output, or as much of its end as there is room for."""
        output = output[max(0, len(output) - self._max_tokens) :]
        if not output or not self._max_requests:
            return
        while self._texts and (
            len(self._texts) >= self._max_requests
            or self.num_tokens + len(output) > self._max_tokens
        ):
            self._drop_oldest()
        text = self.trie.open()
        for token in output:
            self.trie.append(text, token)
        self._texts[text.key] = text
        self.num_tokens += len(output)

    def _drop_oldest(self) -> None:
        _, text = self._texts.popitem(last=False)
        self.trie.remove(text)
        self.num_tokens -= len(text.tokens)

    def used(self, key: int) -> None:
        """Note that an output was of use; it may have been dropped by now."""
        if key in self._texts:
            self._texts.move_to_end(key)


class OwnText:
    """Prompt and output of one request."""

    def __init__(self, max_depth: int) -> None:
        self._trie = SuffixTrie(max_depth)
        self._text = self._trie.open()
        self._max_match = max_depth - 1

    def catch_up(self, tokens: Sequence[int]) -> None:
        """Take in the committed tokens that are new."""
        for token in tokens[len(self._text.tokens) :]:
            self._trie.append(self._text, token)

    @property
    def longest(self) -> int:
        """Length of the longest suffix that occurred before."""
        return min(len(self._text.cursors) - 1, self._max_match)

    def match(self, length: int) -> Node:
        """The suffix of this length, at most `longest`."""
        return self._text.cursors[length]


class SuffixDrafter(Drafter):
    """Deterministic: q is one-hot. Proposes nothing where no suffix has occurred before."""

    def __init__(self, options: SuffixOptions) -> None:
        self.drafts_trees = options.branching
        self.looks_up = not options.branching
        self._options = options
        self._depth = options.suffix_decoding_max_tree_depth
        lengths = [options.draft_length(match) for match in range(self._depth)]
        self._lengths = lengths
        self._longest = list(accumulate(lengths, max))  # drafted after this match or a shorter one
        self._peak = lengths.index(self._longest[-1])  # the match with the longest draft
        self._earlier = EarlierOutputs(options)
        self._own: dict[int, OwnText] = {}
        self._taken_back: set[int] = set()  # keys

    def propose(self, batch: Sequence[Request], budgets: Sequence[Budget]) -> list[Draft]:
        """Chains, or trees with `branching`."""
        return [
            self._propose(request, budget) for request, budget in zip(batch, budgets, strict=True)
        ]

    def _propose(self, request: Request, budget: Budget) -> Draft:
        own = self._own.get(request.key)
        if own is None:
            own = self._own[request.key] = OwnText(self._depth)
            self._taken_back.discard(request.key)
        own.catch_up(request.token_ids)
        if budget.chain <= 0:
            return Draft.empty(request.root)
        best = self._best(own.longest, own.match, budget, Candidate())
        recent = request.token_ids[1 - self._depth :]
        earlier = self._earlier.trie
        chosen = self._best(earlier.longest(recent), partial(earlier.find, recent), budget, best)
        if chosen is not best:
            self._earlier.used(chosen.source)
        return chosen.draft(request.root, with_features=self.looks_up)

    def _best(
        self, longest: int, match: Callable[[int], Place], budget: Budget, best: Candidate
    ) -> Candidate:
        """The candidate with the highest score; of equal ones that of the longest match.

        Args:
            longest: length of the longest match.
            match: where a match of a given length is.
            budget: limits of the draft.
            best: the candidate to surpass.
        """
        branching = self._options.branching
        grow, most = (grow_tree, budget.nodes) if branching else (grow_chain, budget.chain)
        least = self._options.suffix_decoding_min_token_prob
        if longest > self._peak and times(match(longest)) == times(match(self._peak)):
            longest = self._peak  # the same occurrences, and room for a longer draft
        for length in range(longest, 0, -1):
            # No token is worth more than 1: shorter matches may be unable to do better.
            if best.score >= min(most, self._longest[length]):
                break
            candidate = grow(match(length), min(most, self._lengths[length]), budget, least)
            if candidate.score > best.score:
                best, best.match = candidate, length
        return best

    def rewind(self, request: Request) -> None:
        """Read the text afresh; what is taken back is nobody's earlier output."""
        self._own.pop(request.key, None)
        self._taken_back.add(request.key)

    def release(self, request: Request) -> None:
        """Forget the request's trie; its output is kept for others."""
        self._own.pop(request.key, None)
        if request.key not in self._taken_back:
            self._earlier.add(request.output_ids)
        self._taken_back.discard(request.key)

    def forget(self) -> None:
        """Drop the outputs of earlier requests."""
        self._earlier = EarlierOutputs(self._options)


def grow_chain(place: Place, nodes: int, budget: Budget, least: float) -> Candidate:
    """The most frequent successor again and again, the latest new one on a tie.

    Args:
        place: what was matched.
        nodes: most drafted tokens.
        budget: says at which probabilities to stop.
        least: smallest path probability that is drafted.
    """
    chain = Candidate()
    probability = share = 1.0
    while len(chain.tokens) < nodes and not budget.stops_below(share, probability):
        if not isinstance(place, Node):
            text, position = place
            rest = text.tokens[position : position + nodes - len(chain.tokens)]
            chain.tokens += rest
            chain.score += probability * len(rest)
            chain.source = text.key
            break
        most, token = most_frequent(place)
        share = most / max(place.followed, 1)
        probability *= share
        if not most or probability < least:
            break
        chain.tokens.append(token)
        chain.score += probability
        place = place.children[token]
        if isinstance(place, Node):
            chain.source = place.source
    chain.parents = list(range(-1, len(chain.tokens) - 1))
    return chain


def times(place: Place) -> int:
    """How often a string occurs."""
    return place.count if isinstance(place, Node) else 1


def most_frequent(node: Node) -> tuple[int, int]:
    """How often the most frequent successor occurs, and the token; (0, -1) where there is none."""
    most, best = 0, -1
    for token, child in node.children.items():
        occurrences = times(child)
        if occurrences >= most:
            most, best = occurrences, token
    return most, best


def grow_tree(place: Place, nodes: int, budget: Budget, least: float) -> Candidate:
    """The most probable nodes, parents first: the paper's greedy expansion.

    Arguments as for `grow_chain`; the budget also bounds the depth.
    """
    tree = Candidate()
    for parent, token, path, child in best_first(place, successors, nodes, budget, least):
        tree.tokens.append(token)
        tree.parents.append(parent)
        tree.score += path
        tree.source = child.source if isinstance(child, Node) else child[0].key
    return tree


def successors(place: Place) -> Iterator[tuple[int, float, Place]]:
    """What follows a place: token, relative frequency, place; the latest new one first."""
    if isinstance(place, Node):
        for token, child in reversed(place.children.items()):
            yield token, times(child) / place.followed, child
        return
    text, position = place
    if position < len(text.tokens):
        yield text.tokens[position], 1.0, (text, position + 1)
