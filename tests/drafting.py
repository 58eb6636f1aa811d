"""Drafters for tests: trees of every shape, drafts that are known to be accepted, hidden states.

Also what tests need to run them: schedulers over a target, and the parts of an `LLM`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from foretoken.control import Budget
from foretoken.core.tree import Draft, TokenTree, chain
from foretoken.drafters.base import Drafter
from foretoken.request import Request

__all__ = ["RandomTrees", "Scripted"]


class Scripted(Drafter):
    """Chains that follow a known continuation, with every `wrong`-th position spoilt.

    Args:
        continuation: output tokens, by prompt.
        vocab_size: V.
        wrong: 0 never errs.
    """

    def __init__(
        self, continuation: Callable[[Request], Sequence[int]], vocab_size: int, wrong: int = 0
    ) -> None:
        self._continuation = continuation
        self._vocab_size = vocab_size
        self._wrong = wrong

    def expected(self, request: Request, length: int) -> list[int]:
        """The next tokens, spoilt ones included."""
        start = len(request.output_ids)
        tokens = list(self._continuation(request)[start : start + length])
        for offset in range(len(tokens)):
            if self._wrong and (start + offset) % self._wrong == self._wrong - 1:
                tokens[offset] = (tokens[offset] + 1) % self._vocab_size
        return tokens

    def propose(self, batch: Sequence[Request], budgets: Sequence[Budget]) -> list[Draft]:
        return [
            Draft.deterministic(chain([r.root, *self.expected(r, budget.chain)]))
            for r, budget in zip(batch, budgets, strict=True)
        ]


class RandomTrees(Scripted):
    """Random deterministic trees that contain the expected path at random places."""

    drafts_trees = True

    def propose(self, batch: Sequence[Request], budgets: Sequence[Budget]) -> list[Draft]:
        return [self._tree(r, budget) for r, budget in zip(batch, budgets, strict=True)]

    def _tree(self, request: Request, budget: Budget) -> Draft:
        dice = random.Random(f"{request.prompt_ids}{len(request.token_ids)}")
        tokens, parents, depths = [request.root], [-1], [0]
        expected = self.expected(request, budget.depth)
        on_path = 0  # the deepest node of the expected path that is in the tree
        for _ in range(budget.nodes if budget.depth > 0 else 0):
            if dice.random() < 0.5 and depths[on_path] < len(expected):
                parent, token = on_path, expected[depths[on_path]]
            else:
                parent = dice.choice([i for i, depth in enumerate(depths) if depth < budget.depth])
                token = dice.randrange(self._vocab_size)
            siblings = [tokens[i] for i, p in enumerate(parents) if p == parent]
            if token in siblings:
                continue
            if (
                parent == on_path
                and depths[on_path] < len(expected)
                and token == expected[depths[on_path]]
            ):
                on_path = len(tokens)
            tokens.append(token)
            parents.append(parent)
            depths.append(depths[parent] + 1)
        return Draft.deterministic(TokenTree(tuple(tokens), tuple(parents)))
