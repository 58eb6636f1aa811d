"""`rest`: what followed the longest suffix of the text in a datastore of the user's own text.

He et al., "REST: Retrieval-Based Speculative Decoding". The datastore comes from `foretoken
datastore build` (see `foretoken.drafters.text.datastore`). The longest suffix that occurs in it is
looked up, and the continuations of its occurrences are merged into a trie; a node's weight is the
number of continuations that run through it, its probability that number over its parent's. Drafted
are the nodes of greatest weight (section 3.2), or, as a chain, the most frequent token again and
again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Self

from annotated_types import Ge, Le
from pydantic import model_validator
from transformers import PreTrainedTokenizerBase

from foretoken.control import Budget
from foretoken.control.evidence import by_match
from foretoken.core.config import PathText
from foretoken.core.tree import Draft, TokenTree
from foretoken.drafters.base import Drafter, DrafterOptions
from foretoken.drafters.best_first import best_first
from foretoken.drafters.text.corpus import check_target
from foretoken.drafters.text.datastore import FILE, Datastore
from foretoken.request import Request

__all__ = ["RestDrafter", "RestOptions", "load_datastore"]


class RestOptions(DrafterOptions):
    """Options of `rest`.

    Args:
        datastore: a file made by `foretoken datastore build`.
        max_match: longest suffix that is looked up, in tokens.
        min_match: shortest one.
        max_hits: most occurrences that are read; of more, as many at equal distances in the order
            of what follows them.
        branching: draft trees, for rules that take branches; otherwise chains.
    """

    datastore: PathText = ""
    max_match: Annotated[int, Ge(1), Le(256)] = 16
    min_match: Annotated[int, Ge(1), Le(256)] = 2
    max_hits: Annotated[int, Ge(1), Le(10_000)] = 64
    branching: bool = False

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if not self.datastore:
            raise ValueError(f"method 'rest' needs 'datastore': a file made by '{FILE.made_by}'.")
        if self.min_match > self.max_match:
            raise ValueError(
                f"min_match ({self.min_match}) is larger than max_match ({self.max_match})."
            )
        return self


Place = tuple[list[list[int]], int]
"""A node of the trie: the continuations that run through it, and its depth."""


class RestDrafter(Drafter):
    """Deterministic: q is one-hot. Proposes nothing where no suffix occurs in the datastore.

    Args:
        datastore: where to look.
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
        follow, nodes = (successors, budget.nodes) if branching else (likeliest, budget.chain)
        match, found = self._continuations(request.token_ids, budget.chain)
        trie = found, 0
        tokens, parents = [request.root], [-1]
        for parent, token, _, _ in best_first(trie, follow, nodes, budget):
            tokens.append(token)
            parents.append(parent + 1)
        tree = TokenTree(tuple(tokens), tuple(parents))
        features = by_match(match, tree.num_drafted) if self.looks_up else ()
        return Draft.deterministic(tree, features)

    def _continuations(self, text: Sequence[int], length: int) -> tuple[int, list[list[int]]]:
        """Length of the longest suffix that occurs, and up to `length` tokens that followed."""
        options = self._options
        match, hits = self._datastore.find_suffix(text, options.min_match, options.max_match)
        some = spread(hits, options.max_hits)
        return match, self._datastore.continuations(some, match, length)


def spread(hits: range, most: int) -> Sequence[int]:
    """At most so many of them, at equal distances."""
    if len(hits) <= most:
        return hits
    return [hits[i * len(hits) // most] for i in range(most)]


def successors(place: Place) -> list[tuple[int, float, Place]]:
    """What follows a node: token, share of the node's continuations, node."""
    rows, depth = place
    through: dict[int, list[list[int]]] = {}
    for row in rows:
        if depth < len(row):
            through.setdefault(row[depth], []).append(row)
    return [(token, len(some) / len(rows), (some, depth + 1)) for token, some in through.items()]


def likeliest(place: Place) -> list[tuple[int, float, Place]]:
    """The most frequent successor only, the smallest token on a tie."""
    return sorted(successors(place), key=lambda successor: -successor[1])[:1]


def load_datastore(
    path: str, vocab_size: int, tokenizer: PreTrainedTokenizerBase | None
) -> Datastore:
    """A datastore, for a target.

    Args:
        path: a file made by `foretoken datastore build`.
        vocab_size: width of the target's logits.
        tokenizer: the target's, or None where it has none.

    Raises:
        ForetokenError: there is no such file, or it cannot be used.
        CompatibilityError: it was made with another vocabulary.
    """
    datastore = Datastore.load(path)
    made_with = datastore.fingerprint
    check_target(path, FILE.made_by, datastore.highest, made_with, vocab_size, tokenizer)
    return datastore
