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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, count
from typing import TypeAlias

from tokenleap.control import Budget
from tokenleap.control.features import by_match
from tokenleap.core.references import References, common_prefix
from tokenleap.core.sequence import Scope
from tokenleap.core.tree import Draft, TokenTree
from tokenleap.decode import Outcome, StepTimes
from tokenleap.drafters.base import DrafterTraits, OneByOne, PerRequest
from tokenleap.drafters.growth import best_first_nodes
from tokenleap.drafters.options import SuffixOptions
from tokenleap.request import Request


class EarlierOutputs:
    """The outputs of requests that have ended, in a trie per salt (`Scope`).

    The limits of the options are for all salts together.
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
        text = self._tries.setdefault(scope.salt, SuffixTrie(self._depth)).open(output)
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
        if (scope.salt, key) in self._texts:
            self._texts.move_to_end((scope.salt, key))


def trie_of(references: References, max_depth: int) -> SuffixTrie:
    """A trie of all references, shared by the requests that have them."""

    def build() -> SuffixTrie:
        trie = SuffixTrie(max_depth)
        for tokens in references.texts:
            trie.open(tokens)
        return trie

    return references.indexed(("suffix", max_depth), build)


class SuffixDrafter(OneByOne):
    """Chains or trees of the best candidate; q is one-hot.

    It proposes nothing if no suffix has occurred before.
    """

    def __init__(self, options: SuffixOptions) -> None:
        self.traits = DrafterTraits(
            drafts_trees=options.branching,
            looks_up=not options.branching,
            quotes_references=True,
            only_counts=True,
        )
        self._options = options
        self._depth = options.suffix_decoding_max_tree_depth
        # Indexed by the length of the match:
        self._lengths = [options.draft_length(match) for match in range(self._depth)]
        self._longest = list(accumulate(self._lengths, max))  # of this match or any shorter one
        self._peak = self._lengths.index(self._longest[-1])  # the match with the longest draft
        self._earlier = EarlierOutputs(options)
        self._own = PerRequest[tuple[SuffixTrie, Text]]()
        self._rewound: set[int] = set()  # keys of requests whose output must not be kept
        self._recalled = PerRequest[TokenTree]()  # this step's draft, if from earlier outputs

    def draft(self, request: Request, budget: Budget) -> Draft:
        self._rewound.discard(request.key)
        if request.key not in self._own:
            own = SuffixTrie(self._depth)
            self._own[request.key] = own, own.open()
        own, text = self._own[request.key]
        own.extend(text, request.token_ids[len(text.tokens) :])
        self._recalled.pop(request.key, None)
        if budget.chain <= 0:
            return Draft.empty(request.root)
        longest = min(len(text.cursors), self._depth) - 1
        best = self._best(longest, text.cursors.__getitem__, budget, Candidate())
        recent = request.token_ids[1 - self._depth :]
        if request.references:
            beside = trie_of(request.references, self._depth)
            best = self._best(beside.longest(recent), partial(beside.find, recent), budget, best)
        chosen, earlier = best, self._earlier.trie(request.scope)
        if earlier is not None:
            find = partial(earlier.find, recent)
            chosen = self._best(earlier.longest(recent), find, budget, best)
        draft = chosen.draft(request.root, with_features=self.traits.looks_up)
        if chosen is not best:
            self._earlier.used(request.scope, chosen.source)
            self._recalled[request.key] = draft.tree
        return draft

    def _best(
        self, longest: int, match: Callable[[int], Place], budget: Budget, best: Candidate
    ) -> Candidate:
        """The candidate of one trie with the highest score; on a tie that of the longest match."""
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
        for outcome in outcomes:
            if tree := self._recalled.pop(outcome.request.key, None):
                outcome.request.metrics.accepted_earlier_tokens += len(outcome.kept_of(tree))

    def rewind(self, request: Request) -> None:
        """Cut its text. Until the request drafts again, its output is not kept for others."""
        if known := self._own.get(request.key):
            own, text = known
            own.cut(text, common_prefix(text.tokens, request.token_ids))
        self._rewound.add(request.key)

    def release(self, request: Request) -> None:
        super().release(request)
        if request.key not in self._rewound:
            self._earlier.add(request.output_ids, request.scope)
        self._rewound.discard(request.key)

    def forget(self) -> None:
        self._earlier = EarlierOutputs(self._options)


@dataclass
class Candidate:
    """A possible draft and its score.

    Attributes:
        parents: [n] index of each token's parent in `tokens`; -1 for the root's children.
        source: key of a text that it was found in; -1 for none.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    score: float = 0.0
    match: int = 0
    source: int = -1

    def draft(self, root: int, *, with_features: bool) -> Draft:
        """The candidate as a draft with one-hot q; only chains can have features."""
        parents = (-1, *(parent + 1 for parent in self.parents))
        tree = TokenTree((root, *self.tokens), parents)
        features = by_match(self.match, tree.num_drafted) if with_features else ()
        return Draft.deterministic(tree, features)


def grow_chain(place: Place, max_nodes: int, budget: Budget, min_path_prob: float) -> Candidate:
    """The chain that follows the most frequent successor at every node (see `most_frequent`)."""
    chain = Candidate()
    path_prob = token_prob = 1.0
    while len(chain.tokens) < max_nodes and not budget.stops_below(token_prob, path_prob):
        if not isinstance(place, Node):
            text, position = place
            rest = text.tokens[position : position + max_nodes - len(chain.tokens)]
            chain.tokens += rest
            chain.score += path_prob * len(rest)
            chain.source = text.key
            break
        most, token = most_frequent(place)
        token_prob = most / max(place.followed, 1)
        path_prob *= token_prob
        if not most or path_prob < min_path_prob:
            break
        chain.tokens.append(token)
        chain.score += path_prob
        place = place.children[token]
        if isinstance(place, Node):
            chain.source = place.source
    chain.parents = list(range(-1, len(chain.tokens) - 1))
    return chain


def times(place: Place) -> int:
    return place.count if isinstance(place, Node) else 1


def most_frequent(node: Node) -> tuple[int, int]:
    """The count of the most frequent successor, and its token; (0, -1) if there is none.

    On a tie it is the successor whose first occurrence is the latest.
    """
    most, best = 0, -1
    for token, child in node.children.items():
        occurrences = times(child)
        if occurrences >= most:
            most, best = occurrences, token
    return most, best


def grow_tree(place: Place, max_nodes: int, budget: Budget, min_path_prob: float) -> Candidate:
    """The tree of the most probable nodes: the paper's greedy expansion.

    Arguments as in `grow_chain`; the budget also limits the depth.
    """
    tree = Candidate()
    for parent, token, path_prob, child in best_first_nodes(
        place, successors, max_nodes, budget, min_path_prob
    ):
        tree.tokens.append(token)
        tree.parents.append(parent)
        tree.score += path_prob
        tree.source = child.source if isinstance(child, Node) else child[0].key
    return tree


def successors(place: Place) -> Iterator[tuple[int, float, Place]]:
    """The successors of a place: token, relative frequency and place; the newest token first."""
    if isinstance(place, Node):
        for token, child in reversed(place.children.items()):
            yield token, times(child) / place.followed, child
        return
    text, position = place
    if position < len(text.tokens):
        yield text.tokens[position], 1.0, (text, position + 1)


class Node:
    """A string that occurs, or has occurred, at least twice.

    Attributes:
        followed: its occurrences that have a successor: the sum of the children's counts.
        children: next token -> place of the longer string, in order of their first occurrence.
    """

    __slots__ = ("children", "count", "followed", "source")

    def __init__(self) -> None:
        self.count = 0
        self.followed = 0
        self.children: dict[int, Place] = {}
        self.source = -1


class Text:
    """A text in the trie.

    Attributes:
        cursors: nodes of its suffixes of length 0, 1, 2, ..., up to the longest that is a node.
    """

    __slots__ = ("cursors", "key", "tokens")

    def __init__(self, key: int, root: Node) -> None:
        self.key = key
        self.tokens: list[int] = []
        self.cursors = [root]


Leaf: TypeAlias = tuple[Text, int]
"""A string that occurs once: its text, and the position after its occurrence."""

Place: TypeAlias = Node | Leaf
"""A string in the trie."""


class SuffixTrie:
    """All substrings of at most `max_depth` tokens of any number of texts, with their counts.

    Three properties keep it small and fast in Python:

    - A string that occurs once has no nodes of its own. It is a *leaf*: a text and a position in
      it. A leaf grows with its text at no cost. It becomes a node when it occurs a second time.
    - A growing text updates only the nodes of its current repeated suffixes (its `cursors`), at
      most `max_depth` of them. These are also the matches that the drafter needs. Only the text
      that was opened last may grow.
    - A text can be removed: the trie walks the same nodes that adding the text has changed.
    """

    def __init__(self, max_depth: int) -> None:
        self._max_depth = max_depth
        self._keys = count()
        self.root = Node()

    def open(self, tokens: Sequence[int] = ()) -> Text:
        """Add a text. Earlier texts must not grow any more."""
        text = Text(next(self._keys), self.root)
        self.extend(text, tokens)
        return text

    def extend(self, text: Text, tokens: Sequence[int]) -> None:
        """Append tokens to a text."""
        for token in tokens:
            self.append(text, token)

    def append(self, text: Text, token: int) -> None:
        """Append one token to a text."""
        text.tokens.append(token)
        end = len(text.tokens)
        cursors = [self.root]
        for node in text.cursors[: self._max_depth]:
            node.followed += 1
            child = node.children.get(token)
            if child is None:
                node.children[token] = (text, end)
                continue
            if not isinstance(child, Node):
                child = node.children[token] = self._node_of_leaf(child, depth=len(cursors))
            child.count += 1
            child.source = text.key
            cursors.append(child)
        text.cursors = cursors

    def cut(self, text: Text, length: int) -> None:
        """Take back the last tokens of the text that was opened last."""
        while len(text.tokens) > length:
            token = text.tokens.pop()
            text.cursors = list(self._nodes_of_suffixes(text.tokens))
            for node in text.cursors[: self._max_depth]:
                node.followed -= 1
                child = node.children[token]
                if isinstance(child, Node):
                    child.count -= 1
                if not isinstance(child, Node) or not child.count:
                    del node.children[token]

    def _nodes_of_suffixes(self, tokens: list[int]) -> Iterator[Node]:
        recent = tokens[-self._max_depth :]
        for length in range(len(recent) + 1):
            place = self._descend(recent, length)
            if not isinstance(place, Node):
                return
            yield place

    def _node_of_leaf(self, leaf: Leaf, depth: int) -> Node:
        """A node for a leaf of `depth` tokens, whose string is about to occur a second time."""
        text, position = leaf
        node = Node()
        node.count = 1
        if depth < self._max_depth and position < len(text.tokens):
            node.followed = 1
            node.children[text.tokens[position]] = (text, position + 1)
        return node

    def remove(self, text: Text) -> None:
        for start in range(len(text.tokens)):
            self._remove_from(text.tokens[start : start + self._max_depth])

    def _remove_from(self, tokens: list[int]) -> None:
        node = self.root
        for token in tokens:
            node.followed -= 1
            child = node.children[token]
            if not isinstance(child, Node):
                del node.children[token]
                return
            child.count -= 1
            if not child.count:
                del node.children[token]
                return
            node = child

    def longest(self, tokens: list[int]) -> int:
        """Length of the longest suffix of `tokens` that occurs, at most `max_depth`; 0 if none."""
        # If a suffix occurs, all shorter suffixes occur. This allows a binary search.
        low, high = 0, min(len(tokens), self._max_depth)
        while low < high:
            middle = (low + high + 1) // 2
            if self._descend(tokens, middle) is not None:
                low = middle
            else:
                high = middle - 1
        return low

    def find(self, tokens: list[int], length: int) -> Place:
        """The place of the suffix of `tokens` with this length; it must occur."""
        place = self._descend(tokens, length)
        assert place is not None, "no longer than `longest`"
        return place

    def _descend(self, tokens: list[int], length: int) -> Place | None:
        """The place of the suffix of `tokens` with this length; None if it does not occur."""
        place: Place | None = self.root
        for index in range(len(tokens) - length, len(tokens)):
            if not isinstance(place, Node):
                break
            place = place.children.get(tokens[index])
        else:
            return place
        if place is None:
            return None
        text, position = place
        end = position + len(tokens) - index
        return (text, end) if text.tokens[position:end] == tokens[index:] else None
