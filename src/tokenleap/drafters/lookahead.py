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
from collections.abc import Iterator, Sequence

from tokenleap.control import Budget
from tokenleap.core.tree import Draft, TokenTree
from tokenleap.decode import Outcome, StepTimes
from tokenleap.drafters.base import Drafter
from tokenleap.drafters.options import LookaheadOptions
from tokenleap.request import Request

__all__ = ["LookaheadDrafter", "LookaheadOptions", "Pool", "Window"]


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
        """Move the window behind the text after a step."""
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


class LookaheadDrafter(Drafter):
    """Trees of n-grams and the window; q is one-hot."""

    drafts_trees = True

    def __init__(self, options: LookaheadOptions) -> None:
        self._options = options
        self._pools: dict[int, Pool] = {}
        self._windows: dict[int, Window] = {}

    def propose(self, batch: Sequence[Request], budgets: Sequence[Budget]) -> list[Draft]:
        """Trees of the n-grams that begin with the root and, if the budget allows, the window."""
        return [
            self._propose(request, budget) for request, budget in zip(batch, budgets, strict=True)
        ]

    def _propose(self, request: Request, budget: Budget) -> Draft:
        if request.key not in self._pools:
            self._pools[request.key] = self._first_pool(request)
        if request.key not in self._windows:
            self._windows[request.key] = Window(request, self._options)
        tree = _Paths(request.root, budget)
        for rest in self._pools[request.key].after(request.root):
            tree.add(rest)
        for path, _ in self._windows[request.key].columns():
            tree.add(path)
        return Draft.deterministic(TokenTree(tuple(tree.tokens), tuple(tree.parents)))

    def _first_pool(self, request: Request) -> Pool:
        pool = Pool(self._options.max_ngrams)
        if self._options.pool_from_prompt:
            size, tokens = self._options.ngram_size, _input(request)
            for start in range(len(tokens) - size + 1):
                pool.add(tokens[start : start + size])
        return pool

    def observe(self, outcomes: Sequence[Outcome], times: StepTimes) -> None:
        """Read a new row of the window, and new n-grams, from the target's output."""
        for outcome in outcomes:
            window = self._windows.get(outcome.request.key)
            if window is None:  # it has not drafted for this request
                continue
            guesses: list[int] = []
            for path, column in window.columns():
                node = _find(outcome.draft.tree, path)
                if node is None:
                    break  # the budget left no room for this column
                guesses.append(outcome.output.argmax_of(node))
                if len(column) == self._options.ngram_size - 1:
                    self._pools[outcome.request.key].add([*column, guesses[-1]])
            window.advance(len(outcome.request.token_ids), guesses)

    def rewind(self, request: Request) -> None:
        """Keep the pool; make a new window at the end of the text."""
        self._windows.pop(request.key, None)

    def release(self, request: Request) -> None:
        """Forget the request's pool and window."""
        self._pools.pop(request.key, None)
        self._windows.pop(request.key, None)


class _Paths:
    """A tree made of paths with common prefixes, within a budget."""

    def __init__(self, root: int, budget: Budget) -> None:
        self.tokens, self.parents = [root], [-1]
        self._budget = budget
        self._children: dict[tuple[int, int], int] = {}  # (node, token) -> its child

    def add(self, path: Sequence[int]) -> None:
        node = 0
        for token in path[: self._budget.depth]:
            child = self._children.get((node, token))
            if child is None:
                if len(self.tokens) > self._budget.nodes:
                    return
                child = self._children[node, token] = len(self.tokens)
                self.tokens.append(token)
                self.parents.append(node)
            node = child


def _input(request: Request) -> Sequence[int]:
    """The tokens of the input that the output may have, too."""
    if request.source is None:
        return request.prompt_ids
    # An encoder may have a vocabulary of its own.
    return [token for token in request.input_ids if token < request.sampler.vocab_size]


def _find(tree: TokenTree, path: Sequence[int]) -> int | None:
    """The node at the end of a path of tokens below the root; None if the tree lacks it."""
    node: int | None = 0
    for token in path:
        assert node is not None
        node = next((n for n in tree.children[node] if tree.tokens[n] == token), None)
        if node is None:
            return None
    return node
