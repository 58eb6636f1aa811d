"""`recycle`: what the target thought likely before, it will think likely again.

Luo et al., "Turning Trash into Treasure: Accelerating Inference of Large Language Models with Token
Recycling". Every pass says not only which token comes next but also which others might have: the
most probable ones are kept by what they followed, of all requests, and the draft is the tree they
make from the root on. In the paper that is the last token; here the last three, where those have
come before, else fewer. The paper's tree is the same in every step; here the likeliest nodes come
first, by the ranks their tokens had, and the controller cuts it to what pays.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Annotated, TypeAlias

import numpy as np
from annotated_types import Ge, Le
from torch import Tensor

from foretoken.control import Budget
from foretoken.control.evidence import LONGEST_CONTEXT, NUM_RANKS, at_first, by_rank
from foretoken.core.tree import Draft, TokenTree
from foretoken.decode import Outcome, StepTimes
from foretoken.drafters.base import Drafter, DrafterOptions
from foretoken.drafters.best_first import best_first
from foretoken.request import Request

__all__ = ["RecycleDrafter", "RecycleOptions", "most_probable"]


class RecycleOptions(DrafterOptions):
    """Options of `recycle`.

    Args:
        recycle_top_k: tokens kept after each context; the paper's k.
        recycle_context: most tokens of a context; 1 is the paper's.
        recycle_max_contexts: most contexts kept, at about 0.3 kB each, those that have not come
            for longest going first.
    """

    recycle_top_k: Annotated[int, Ge(1), Le(NUM_RANKS)] = NUM_RANKS
    recycle_context: Annotated[int, Ge(1), Le(LONGEST_CONTEXT)] = LONGEST_CONTEXT
    recycle_max_contexts: Annotated[int, Ge(1)] = 100_000


Context: TypeAlias = tuple[int, ...]
Place: TypeAlias = tuple[Context, int]
"""The last tokens up to a node, and the node's features."""

_LEAST = 0.01
"""Nothing less likely is guessed."""

_BLOCK = 256
"""Tokens of which only the largest logit is compared with others at first."""


class Memory:
    """What was probable after each context, the latest time it came.

    Args:
        most: contexts kept; those that have not come for longest go first.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._after: OrderedDict[Context, list[int]] = OrderedDict()  # the latest last

    def keep(self, text: Context, tokens: list[int]) -> None:
        """Of a text and all its ends."""
        after = self._after
        for start in range(len(text)):
            after[text[start:]] = tokens
            after.move_to_end(text[start:])
        while len(after) > self._most:
            after.popitem(last=False)

    def find(self, text: Context) -> tuple[int, list[int]]:
        """Length of the longest end of the text that has come, and what was probable after it."""
        for start in range(len(text)):
            if tokens := self._after.get(text[start:]):
                return len(text) - start, tokens
        return 0, []


class RecycleDrafter(Drafter):
    """Deterministic: q is one-hot. Proposes nothing after tokens that have not come before."""

    drafts_trees = True
    looks_up = True

    def __init__(self, options: RecycleOptions) -> None:
        self._options = options
        self._asked: set[int] = set()  # keys
        self.forget()

    def propose(self, batch: Sequence[Request], budgets: Sequence[Budget]) -> list[Draft]:
        """Trees."""
        self._asked = {r.key for r, budget in zip(batch, budgets, strict=True) if budget.chain}
        return [
            self._propose(request, budget) for request, budget in zip(batch, budgets, strict=True)
        ]

    def _propose(self, request: Request, budget: Budget) -> Draft:
        if budget.chain <= 0:
            return Draft.empty(request.root)
        start = tuple(request.token_ids[-self._options.recycle_context :]), 0
        tokens, parents, kinds = [request.root], [-1], []
        for parent, token, _, (_, features) in best_first(
            start, self._successors, budget.nodes, budget, _LEAST
        ):
            tokens.append(token)
            parents.append(parent + 1)
            kinds.append(features)
        return Draft.deterministic(TokenTree(tuple(tokens), tuple(parents)), tuple(kinds))

    def _successors(self, place: Place) -> Iterator[tuple[int, float, Place]]:
        """Token, odds, and place of what came after as long a context as is known."""
        context, _ = place
        length, found = self._memory.find(context)
        rest = context[1:] if len(context) == self._options.recycle_context else context
        for rank, token in enumerate(found):
            features = by_rank(rank, length)
            yield token, at_first(features), ((*rest, token), features)

    def observe(self, outcomes: Sequence[Outcome], times: StepTimes) -> None:
        """Keep what was probable along the path, of requests that were asked for."""
        for outcome in outcomes:
            if outcome.request.key in self._asked:
                # Once: in a step without drafts nobody says that it is not asked.
                self._asked.discard(outcome.request.key)
                path = [0, *outcome.accepted.path]
                for node, context in zip(path, self._contexts(outcome), strict=True):
                    best = most_probable(outcome.output.scores[node], self._options.recycle_top_k)
                    self._memory.keep(context, best)

    def _contexts(self, outcome: Outcome) -> Iterator[Context]:
        """The last tokens at the root and at every node of the path."""
        tokens, most = outcome.request.token_ids, self._options.recycle_context
        root = len(tokens) - len(outcome.committed) - 1
        text = tokens[max(0, root + 1 - most) : root + 1]
        yield tuple(text)
        for node in outcome.accepted.path:
            text.append(outcome.draft.tree.tokens[node])
            yield tuple(text[-most:])

    def rewind(self, request: Request) -> None:
        """What is kept was probable all the same."""

    def release(self, request: Request) -> None:
        """What is kept is of all requests."""
        self._asked.discard(request.key)

    def forget(self) -> None:
        """Begin anew."""
        self._memory = Memory(self._options.recycle_max_contexts)


def most_probable(logits: Tensor, count: int) -> list[int]:
    """Tokens of the largest logits, the largest first.

    Exact, and several times as fast as `topk` of everything: the largest are in those blocks whose
    largest are.

    Args:
        logits: [V].
        count: how many tokens; of a smaller vocabulary all.
    """
    count, blocks = min(count, len(logits)), len(logits) // _BLOCK
    if logits.device.type != "cpu" or blocks < 2 * count:
        found: list[int] = logits.topk(count).indices.tolist()
        return found
    values = logits.float().numpy()
    whole = values[: blocks * _BLOCK].reshape(blocks, _BLOCK)
    chosen = whole.max(axis=1).argpartition(-count)[-count:]
    ids = (chosen[:, None] * _BLOCK + np.arange(_BLOCK)).ravel()
    ids = np.concatenate([ids, np.arange(blocks * _BLOCK, len(values))])
    best = ids[values[ids].argpartition(-count)[-count:]]
    ordered: list[int] = best[values[best].argsort()[::-1]].tolist()
    return ordered
