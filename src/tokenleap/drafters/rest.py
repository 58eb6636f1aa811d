"""`rest`: drafts what followed the text's longest suffix in a datastore of the user's own text.

He et al., "REST: Retrieval-Based Speculative Decoding". `tokenleap datastore build` makes the
datastore (see `tokenleap.drafters.text.datastore`). The longest suffix of the text that occurs in
it is looked up, and the continuations of its occurrences are merged into a trie. The weight of a
node is the number of continuations that pass through it. Its probability is its weight over its
parent's weight. A tree draft has the nodes of greatest weight (section 3.2). A chain follows the
most frequent token at every node.
"""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from tokenleap.control import Budget
from tokenleap.control.evidence import by_match
from tokenleap.core.tree import Draft, TokenTree
from tokenleap.drafters.base import Drafter
from tokenleap.drafters.best_first import best_first_nodes
from tokenleap.drafters.options.lookups import RestOptions
from tokenleap.drafters.text.corpus import check_target
from tokenleap.drafters.text.datastore import FILE, Datastore
from tokenleap.request import Request

__all__ = ["RestDrafter", "RestOptions", "load_datastore"]


Place = tuple[list[list[int]], int]
"""A node of the trie: the continuations that run through it, and its depth."""


class RestDrafter(Drafter):
    """Chains or trees from a datastore; q is one-hot.

    It proposes nothing if no suffix of the text occurs in the datastore.

    Args:
        datastore: the datastore to search.
        options: see `RestOptions`.
    """

    def __init__(self, datastore: Datastore, options: RestOptions) -> None:
        self.drafts_trees = options.branching
        self.looks_up = not options.branching
        self._datastore = datastore
        self._options = options

    def propose(self, batch: Sequence[Request], budgets: Sequence[Budget]) -> list[Draft]:
        """Chains, or trees with `branching`."""
        return [
            self._propose(request, budget) for request, budget in zip(batch, budgets, strict=True)
        ]

    def _propose(self, request: Request, budget: Budget) -> Draft:
        if budget.chain <= 0:
            return Draft.empty(request.root)
        branching = self._options.branching
        children = successors if branching else most_frequent_child
        max_nodes = budget.nodes if branching else budget.chain
        match, found = self._continuations(request.token_ids, budget.chain)
        trie = found, 0
        tokens, parents = [request.root], [-1]
        for parent, token, _, _ in best_first_nodes(trie, children, max_nodes, budget):
            tokens.append(token)
            parents.append(parent + 1)
        tree = TokenTree(tuple(tokens), tuple(parents))
        features = by_match(match, tree.num_drafted) if self.looks_up else ()
        return Draft.deterministic(tree, features)

    def _continuations(self, text: Sequence[int], length: int) -> tuple[int, list[list[int]]]:
        """Length of the longest suffix that occurs, and the continuations of its occurrences.

        Each continuation has up to `length` tokens.
        """
        options = self._options
        match, hits = self._datastore.find_suffix(text, options.min_match, options.max_match)
        selected = spread(hits, options.max_hits)
        return match, self._datastore.continuations(selected, match, length)


def spread(hits: range, most: int) -> Sequence[int]:
    """At most `most` of the hits, at equal distances."""
    if len(hits) <= most:
        return hits
    return [hits[i * len(hits) // most] for i in range(most)]


def successors(place: Place) -> list[tuple[int, float, Place]]:
    """The children of a node: token, probability given the node, and node of each."""
    continuations, depth = place
    by_token: dict[int, list[list[int]]] = {}
    for continuation in continuations:
        if depth < len(continuation):
            by_token.setdefault(continuation[depth], []).append(continuation)
    return [
        (token, len(through) / len(continuations), (through, depth + 1))
        for token, through in by_token.items()
    ]


def most_frequent_child(place: Place) -> list[tuple[int, float, Place]]:
    """The most frequent child only; on a tie the one with the smallest token id."""
    return sorted(successors(place), key=lambda successor: -successor[1])[:1]


def load_datastore(
    path: str, vocab_size: int, tokenizer: PreTrainedTokenizerBase | None
) -> Datastore:
    """Load a datastore and check that it fits the target.

    Args:
        path: a file made by `tokenleap datastore build`.
        vocab_size: V, the width of the target's logits.
        tokenizer: the target's tokenizer, or None if it has none.

    Raises:
        TokenleapError: the file does not exist or is damaged.
        CompatibilityError: the file was made with another vocabulary.
    """
    datastore = Datastore.load(path)
    made_with = datastore.fingerprint
    fits = datastore.vocab_size <= vocab_size
    highest = datastore.vocab_size - 1 if fits else datastore.highest
    check_target(path, FILE.made_by, highest, made_with, vocab_size, tokenizer)
    return datastore
