"""`lookahead`: the target generates n-grams for itself, in the same passes that verify them.

Fu et al., "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding". A window
holds the target's guesses at future tokens, in rows and columns: row r of column j stands
r + j + 1 positions after the root. Every pass computes the window along with the draft. The
target's argmax after the last row becomes a new row (a step of Jacobi iteration), and each column
with its new token becomes an n-gram of the pool. The draft is the pool's latest n-grams that begin
with the root.

The window is a tree, too: its first row is a chain below the root, and every column continues below
its token in that row. Its nodes are therefore ordinary drafted nodes with one-hot q. Draft and
window form one tree, which one pass verifies; masks, passes and rules need no special case.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TypeAlias

import numpy as np
from torch import Tensor

from tokenleap.control import Budget
from tokenleap.control.features import by_rank, prior_rate
from tokenleap.core.tree import Draft, GrowingTree, TokenTree
from tokenleap.decode import Outcome, StepTimes
from tokenleap.drafters.base import DrafterTraits, OneByOne, PerRequest
from tokenleap.drafters.growth import best_first_nodes
from tokenleap.drafters.options import LookaheadOptions, RecycleOptions
from tokenleap.request import Request


class Pool:
    """The latest n-grams of one request, by their first token."""

    def __init__(self, max_ngrams: int) -> None:
        self._max_ngrams = max_ngrams
        self._after: dict[int, OrderedDict[tuple[int, ...], None]] = {}

    def add(self, ngram: Sequence[int]) -> None:
        """Keep an n-gram; if there are too many, drop the least recently added one."""
        rest = self._after.setdefault(ngram[0], OrderedDict())
        rest[tuple(ngram[1:])] = None
        rest.move_to_end(tuple(ngram[1:]))
        if len(rest) > self._max_ngrams:
            rest.popitem(last=False)

    def after(self, token: int) -> Iterator[tuple[int, ...]]:
        """The other tokens of the n-grams that begin with `token`, the latest n-gram first."""
        return reversed(self._after.get(token, OrderedDict()))


class Window:
    """The target's guesses at future tokens, for one request.

    Args:
        request: the first guesses are random tokens of its input, drawn with its seed.

    Attributes:
        rows: the rows, the oldest first, each with one token per column.
    """

    def __init__(self, request: Request, options: LookaheadOptions) -> None:
        self._random = random.Random(request.noise.seed)
        self._tokens = _input(request) or request.prompt_ids
        self._width = options.window_size
        self._max_rows = options.ngram_size - 1
        self.rows: list[list[int]] = [[]]
        self._length = len(request.token_ids)  # of the text that the window continues
        self._refill()

    def columns(self) -> Iterator[tuple[list[int], list[int]]]:
        """For each column: its path from below the root, and the column's own tokens."""
        for index in range(self._width):
            column = [row[index] for row in self.rows]
            yield [*self.rows[0][:index], *column], column

    def advance(self, length: int, guesses: Sequence[int]) -> None:
        shift = length - self._length
        if guesses:
            self.rows.append(list(guesses))
            if len(self.rows) > self._max_rows:
                self.rows.pop(0)  # every row moves up, which is a shift of one position
                shift -= 1
        self.rows = [row[max(0, shift) :] for row in self.rows]
        self._length = length
        self._refill()

    def _refill(self) -> None:
        for row in self.rows:
            row += self._random.choices(self._tokens, k=self._width - len(row))


class LookaheadDrafter(OneByOne):
    """Trees of n-grams and the window; q is one-hot."""

    traits = DrafterTraits(drafts_trees=True)

    def __init__(self, options: LookaheadOptions) -> None:
        self._options = options
        self._pools = PerRequest[Pool]()
        self._windows = PerRequest[Window]()

    def draft(self, request: Request, budget: Budget) -> Draft:
        pool = self._pools.made(request.key, lambda: self._first_pool(request))
        window = self._windows.made(request.key, lambda: Window(request, self._options))
        tree = GrowingTree(request.root)
        for path in (*pool.after(request.root), *(path for path, _ in window.columns())):
            _add_path(tree, path, budget)
        return Draft.deterministic(tree.tree())

    def _first_pool(self, request: Request) -> Pool:
        pool = Pool(self._options.max_ngrams)
        if self._options.pool_from_prompt:
            size, tokens = self._options.ngram_size, _input(request)
            for start in range(len(tokens) - size + 1):
                pool.add(tokens[start : start + size])
        return pool

    def observe(self, outcomes: Sequence[Outcome], times: StepTimes) -> None:
        for outcome in outcomes:
            window = self._windows.get(outcome.request.key)
            if window is None:  # it has not drafted for this request
                continue
            guesses: list[int] = []
            for path, column in window.columns():
                nodes = outcome.draft.tree.walk(path)
                if len(nodes) < len(path):
                    break  # the budget left no room for this column
                guesses.append(outcome.output.argmax_of(nodes[-1]))
                if len(column) == self._options.ngram_size - 1:
                    self._pools[outcome.request.key].add([*column, guesses[-1]])
            window.advance(len(outcome.request.token_ids), guesses)

    def rewind(self, request: Request) -> None:
        """Keep the pool; make a new window at the end of the text."""
        self._windows.pop(request.key, None)


def _add_path(tree: GrowingTree, path: Sequence[int], budget: Budget) -> None:
    """Add what the budget has room for, below what the tree has of the path already."""
    node = 0
    for token in path[: budget.depth]:
        child = tree.child(node, token)
        if child is None:
            if len(tree) > budget.nodes:
                return
            child = tree.add(node, token)
        node = child


def _input(request: Request) -> Sequence[int]:
    """The tokens of the input that the output may have, too."""
    if request.source is None:
        return request.prompt_ids
    # An encoder may have a vocabulary of its own.
    return [token for token in request.input_ids if token < request.sampler.vocab_size]


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
        return self._size

    def of(self, request: Request) -> Contexts:
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


class RecycleDrafter(OneByOne):
    """Trees of recycled tokens; q is one-hot.

    It proposes nothing after a token that has not occurred before.
    """

    traits = DrafterTraits(drafts_trees=True, looks_up=True)

    def __init__(self, options: RecycleOptions) -> None:
        self._options = options
        # This step's draft, and which of its nodes other requests have found.
        self._recalled = PerRequest[tuple[TokenTree, set[int]]]()
        self.forget()

    def draft(self, request: Request, budget: Budget) -> Draft:
        self._recalled.pop(request.key, None)
        if budget.chain <= 0:
            return Draft.empty(request.root)
        start = tuple(request.token_ids[-self._options.recycle_context :]), 0, request.key
        successors = partial(self._successors, self._memory.of(request))
        tree, features, recalled = GrowingTree(request.root), list[int](), set[int]()
        for parent, token, _, (_, feature, finder) in best_first_nodes(
            start, successors, budget.nodes, budget, _MIN_PATH_PROB
        ):
            node = tree.add(parent + 1, token)
            features.append(feature)
            if finder != request.key:
                recalled.add(node)
        drafted = tree.tree()
        self._recalled[request.key] = drafted, recalled
        return Draft.deterministic(drafted, tuple(features))

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
            # Once per draft: a step without drafts observes, too.
            if (recalled := self._recalled.pop(outcome.request.key, None)) is None:
                continue
            tree, nodes = recalled
            if nodes:
                kept = nodes.intersection(outcome.kept_of(tree))
                outcome.request.metrics.accepted_earlier_tokens += len(kept)
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
        super().release(request)
        self._memory.release(request)

    def forget(self) -> None:
        self._memory = Memory(self._options.recycle_max_contexts)


def most_probable(logits: Tensor, count: int) -> list[int]:
    """The tokens of the largest of [V] logits, the largest first.

    The result is exact, and several times faster than `topk` over the vocabulary: the `count`
    largest logits lie in the `count` blocks with the largest maxima.
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
