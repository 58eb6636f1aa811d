"""`recycle`: drafts the tokens that the target found probable after the same context before.

Luo et al., "Turning Trash into Treasure: Accelerating Inference of Large Language Models with Token
Recycling". Every pass yields not only the next token but also its most probable alternatives. They
are kept by the context that they followed, for all requests of a scope together. The draft is the
tree that they form from the root on.

Two details differ from the paper. Its context is the last token. Here the context is the last three
tokens if these have occurred before, else fewer. The paper's tree has the same shape in every step.
Here the most probable nodes come first, estimated from the rank of each token, and the controller
cuts the tree to the nodes that pay.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TypeAlias

import numpy as np
from torch import Tensor

from tokenleap.control import Budget
from tokenleap.control.estimates import by_rank, prior_rate
from tokenleap.core.tree import Draft, TokenTree
from tokenleap.decode import Outcome, StepTimes
from tokenleap.drafters.base import Drafter
from tokenleap.drafters.growth import best_first_nodes
from tokenleap.drafters.options import RecycleOptions
from tokenleap.request import Request

__all__ = ["RecycleDrafter", "RecycleOptions", "most_probable"]


Context: TypeAlias = tuple[int, ...]
Found: TypeAlias = tuple[list[int], int]
"""The most probable tokens after a context, and the key of the request that found them."""
Contexts: TypeAlias = Mapping[Context, Found]
Place: TypeAlias = tuple[Context, int, int]
"""The last tokens up to a node, its feature (`Draft.features`), and the key of the request that
found its token."""

_MIN_PATH_PROB = 0.01
"""Nodes with a smaller estimated path probability are not drafted."""

_BLOCK = 256
"""Tokens per block in `most_probable`."""


class Memory:
    """The most probable tokens after each context, from its latest occurrence, by `Request.memory`.

    Args:
        max_contexts: most contexts kept in all; the least recently seen ones are dropped first,
            from the memory that was used least recently.
    """

    def __init__(self, max_contexts: int) -> None:
        self._max_contexts = max_contexts
        self._size = 0
        self._memories: OrderedDict[str | int, OrderedDict[Context, Found]] = OrderedDict()

    def __len__(self) -> int:
        """Number of contexts."""
        return self._size

    def of(self, request: Request) -> Contexts:
        """The contexts that a request may read."""
        return self._memories.get(request.memory) or {}

    def keep(self, request: Request, context: Context, tokens: list[int]) -> None:
        """Keep the most probable tokens after a context, for all its suffixes too."""
        contexts = self._memories.setdefault(request.memory, OrderedDict())
        self._memories.move_to_end(request.memory)
        self._size -= len(contexts)
        for start in range(len(context)):
            suffix = context[start:]
            contexts[suffix] = tokens, request.key
            contexts.move_to_end(suffix)
        self._size += len(contexts)
        while self._size > self._max_contexts:
            oldest, contexts = next(iter(self._memories.items()))
            contexts.popitem(last=False)
            self._size -= 1
            if not contexts:
                del self._memories[oldest]

    def release(self, request: Request) -> None:
        """Drop what no other request may read."""
        if request.scope.private:
            self._size -= len(self._memories.pop(request.memory, ()))


def find(contexts: Contexts, context: Context) -> tuple[int, Found]:
    """Length of the longest known suffix of a context, and what is known of it."""
    for start in range(len(context)):
        if found := contexts.get(context[start:]):
            return len(context) - start, found
    return 0, ([], -1)


class RecycleDrafter(Drafter):
    """Trees of recycled tokens; q is one-hot.

    It proposes nothing after a token that has not occurred before.
    """

    drafts_trees = True
    looks_up = True

    def __init__(self, options: RecycleOptions) -> None:
        self._options = options
        self._may_draft: set[int] = set()  # keys of requests with a budget in this step
        # Key -> this step's draft, and which of its nodes other requests have found.
        self._recalled: dict[int, tuple[TokenTree, set[int]]] = {}
        self.forget()

    def propose(self, batch: Sequence[Request], budgets: Sequence[Budget]) -> list[Draft]:
        """Trees of the tokens that were most probable after the same context before."""
        pairs = zip(batch, budgets, strict=True)
        self._may_draft = {request.key for request, budget in pairs if budget.chain}
        return [
            self._propose(request, budget) for request, budget in zip(batch, budgets, strict=True)
        ]

    def _propose(self, request: Request, budget: Budget) -> Draft:
        self._recalled.pop(request.key, None)
        if budget.chain <= 0:
            return Draft.empty(request.root)
        start = tuple(request.token_ids[-self._options.recycle_context :]), 0, request.key
        successors = partial(self._successors, self._memory.of(request))
        tokens, parents, features, recalled = [request.root], [-1], [], set()
        for parent, token, _, (_, feature, finder) in best_first_nodes(
            start, successors, budget.nodes, budget, _MIN_PATH_PROB
        ):
            if finder != request.key:
                recalled.add(len(tokens))
            tokens.append(token)
            parents.append(parent + 1)
            features.append(feature)
        tree = TokenTree(tuple(tokens), tuple(parents))
        if recalled:
            self._recalled[request.key] = tree, recalled
        return Draft.deterministic(tree, tuple(features))

    def _successors(self, contexts: Contexts, place: Place) -> Iterator[tuple[int, float, Place]]:
        """Token, estimated probability and place of each known successor of a place."""
        context, _, _ = place
        length, (found, finder) = find(contexts, context)
        rest = context[1:] if len(context) == self._options.recycle_context else context
        for rank, token in enumerate(found):
            feature = by_rank(rank, length)
            yield token, prior_rate(feature), ((*rest, token), feature, finder)

    def observe(self, outcomes: Sequence[Outcome], times: StepTimes) -> None:
        """Keep the most probable tokens along the accepted path, if the request could draft."""
        for outcome in outcomes:
            if recalled := self._recalled.pop(outcome.request.key, None):
                tree, nodes = recalled
                kept = nodes.intersection(outcome.kept_of(tree))
                outcome.request.metrics.accepted_earlier_tokens += len(kept)
            if outcome.request.key in self._may_draft:
                # Once per `propose`: a step without drafts observes without calling it.
                self._may_draft.discard(outcome.request.key)
                path = [0, *outcome.accepted.path]
                for node, context in zip(path, self._contexts(outcome), strict=True):
                    best = most_probable(outcome.output.scores[node], self._options.recycle_top_k)
                    self._memory.keep(outcome.request, context, best)

    def _contexts(self, outcome: Outcome) -> Iterator[Context]:
        """The contexts that end with the root and with every node of the accepted path."""
        tokens, most = outcome.request.token_ids, self._options.recycle_context
        root = outcome.root
        text = tokens[max(0, root + 1 - most) : root + 1]
        yield tuple(text)
        for node in outcome.accepted.path:
            text.append(outcome.draft.tree.tokens[node])
            yield tuple(text[-most:])

    def rewind(self, request: Request) -> None:
        """Nothing to do: the kept tokens were probable, whatever was accepted."""

    def release(self, request: Request) -> None:
        """Forget the request; the tokens it left stay for the others of its scope."""
        self._may_draft.discard(request.key)
        self._recalled.pop(request.key, None)
        self._memory.release(request)

    def forget(self) -> None:
        """Forget all contexts."""
        self._memory = Memory(self._options.recycle_max_contexts)


def most_probable(logits: Tensor, count: int) -> list[int]:
    """The tokens of the largest logits, the largest first.

    The result is exact, and several times faster than `topk` over the vocabulary: the `count`
    largest logits lie in the `count` blocks with the largest maxima.

    Args:
        logits: [V] logits.
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
