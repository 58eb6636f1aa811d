"""Candidates of the drafter `suffix`: the most probable continuations of one match in a trie.

`suffix.SuffixDrafter` grows one candidate per match and drafts the one with the highest score.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from tokenleap.control import Budget
from tokenleap.control.evidence import by_match
from tokenleap.core.tree import Draft, TokenTree
from tokenleap.drafters.best_first import best_first_nodes
from tokenleap.drafters.suffix_trie import Node, Place

__all__ = ["Candidate", "grow_chain", "grow_tree", "successors", "times"]


@dataclass
class Candidate:
    """A possible draft and its score.

    Attributes:
        tokens: [n] drafted tokens, without the root.
        parents: [n] index of each token's parent in `tokens`; -1 for the root's children.
        score: expected number of accepted tokens.
        match: length of the matched suffix, in tokens.
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
    """The chain that follows the most frequent successor at every node (see `most_frequent`).

    Args:
        place: the match.
        max_nodes: most drafted tokens.
        budget: stops the chain below improbable tokens.
        min_path_prob: the chain ends before a token with a smaller path probability.
    """
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
    """How often the string at a place occurs."""
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
