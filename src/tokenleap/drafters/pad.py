"""`pad`: padding tokens after the text make one target pass propose a block.

Padded self-drafting, as the survey of Xia et al. ("Unlocking Efficiency in Large Language Model
Inference") calls it. The padding is any token of the vocabulary. `tokenleap train pad` trains the
target to predict behind it; `pass` (PaSS, Monea et al.) trains the padding instead. A pass that
verifies a draft of length k also computes k padding tokens below the root and below every drafted
token. Wherever acceptance ends, the logits of the padding there predict the tokens after the next
one. These predictions are the next draft.

The padding consists of ordinary tree nodes with one-hot q, so the loop needs no special case. A
padding token may be accepted if it happens to be right, which is correct.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isqrt

from tokenleap.control import Budget
from tokenleap.core.tree import Draft, TokenTree
from tokenleap.decode import Outcome, StepTimes
from tokenleap.drafters.base import Drafter
from tokenleap.drafters.options.lookups import PadOptions
from tokenleap.request import Request

__all__ = ["MOST_PADDING", "PadDrafter", "PadOptions", "block_nodes"]

MOST_PADDING = 15
"""Longest block that is trained: it takes 255 nodes, and a draft has at most 256."""


class PadDrafter(Drafter):
    """Trees of the last pass' predictions, with padding below every node; q is one-hot.

    Args:
        pad_token_id: the padding token.
    """

    drafts_trees = True
    most_guesses: int | None = None
    """Longest draft; None if only the budget limits it."""

    def __init__(self, pad_token_id: int) -> None:
        self._pad = pad_token_id
        self._guesses: dict[int, tuple[int, list[int]]] = {}  # length of the text, guesses after it

    def propose(self, batch: Sequence[Request], budgets: Sequence[Budget]) -> list[Draft]:
        """The guesses of the last pass as a chain, with padding below the root and every guess."""
        return [
            self._propose(request, budget) for request, budget in zip(batch, budgets, strict=True)
        ]

    def _propose(self, request: Request, budget: Budget) -> Draft:
        length, guesses = self._guesses.get(request.key, (0, []))
        if length != len(request.token_ids):
            guesses = []  # tokens were taken back, or there was no pass yet
        size = block_size(budget.nodes)
        size = size if self.most_guesses is None else min(size, self.most_guesses)
        drafted = guesses[: min(size, budget.depth)]
        tokens, parents = [request.root, *drafted], list(range(-1, len(drafted)))
        for node in range(len(drafted) + 1):
            parent = node
            for place in range(min(size, budget.depth - node)):
                parents.append(parent)
                parent = len(tokens)
                tokens.append(self.padding(place))
        return Draft.deterministic(TokenTree(tuple(tokens), tuple(parents)))

    def padding(self, place: int) -> int:
        """The padding token at a place of a block, from 0."""
        return self._pad

    def observe(self, outcomes: Sequence[Outcome], times: StepTimes) -> None:
        """Read the next guesses from the padding below the last accepted node."""
        for outcome in outcomes:
            tree, node = outcome.draft.tree, outcome.accepted.last
            guesses: list[int] = []
            while padding := [
                child
                for child in tree.children[node]
                if tree.tokens[child] == self.padding(len(guesses))
            ]:
                node = padding[-1]
                guesses.append(outcome.output.argmax_of(node))
            self._guesses[outcome.request.key] = (len(outcome.request.token_ids), guesses)

    def release(self, request: Request) -> None:
        """Forget the request's guesses."""
        self._guesses.pop(request.key, None)


def block_nodes(size: int) -> int:
    """The nodes of a draft of so many tokens, with as much padding behind each and the root."""
    return size + (size + 1) * size


def block_size(nodes: int) -> int:
    """The longest draft length k that fits with its padding: block_nodes(k) <= nodes."""
    return isqrt(nodes + 1) - 1
