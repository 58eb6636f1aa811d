"""`lookahead`: the target guesses n-grams for itself, in the very passes that verify them.

Fu et al., "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding". A window
of columns holds the target's guesses at the tokens to come, in rows: row r of column j stands
r + j + 1 positions after the root. Every pass computes the window along with the draft; what
follows the last row becomes a new row (a step of Jacobi iteration), and every column with it an
n-gram for the pool. The draft are the pool's latest n-grams that begin with the root.

The window is a tree, too: its first row is a chain below the root, and every column hangs below its
token in that row. So its nodes are ordinary drafted ones with one-hot q, and no mask, pass or rule
has to be told about them: drafts and window are one tree, verified in one pass.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Annotated

from annotated_types import Ge, Le

from foretoken.control import Budget
from foretoken.core.tree import Draft, TokenTree
from foretoken.decode import Outcome, StepTimes
from foretoken.drafters.base import Drafter, DrafterOptions
from foretoken.request import Request

__all__ = ["LookaheadDrafter", "LookaheadOptions", "Pool", "Window"]


class LookaheadOptions(DrafterOptions):
    """Options of `lookahead`; the paper's W, N and G.

    Args:
        window_size: columns of the window.
        ngram_size: length of the n-grams; the window has one row less.
        max_ngrams: most n-grams drafted in one step, and kept for each first token.
        pool_from_prompt: whether the pool begins with the n-grams of the prompt.
    """

    window_size: Annotated[int, Ge(1), Le(32)] = 5
    ngram_size: Annotated[int, Ge(2), Le(16)] = 3
    max_ngrams: Annotated[int, Ge(1), Le(64)] = 3
    pool_from_prompt: bool = True

    def default_num_speculative_tokens(self) -> int:
        """Drafts and window together."""
        return (self.ngram_size - 1) * (self.max_ngrams + self.window_size)


class Pool:
    """The latest n-grams by their first token."""

    def __init__(self, max_ngrams: int) -> None:
        self._max_ngrams = max_ngrams
        self._after: dict[int, OrderedDict[tuple[int, ...], None]] = {}

    def add(self, ngram: Sequence[int]) -> None:
        """Keep an n-gram; of too many the one that has not come again for longest goes."""
        rest = self._after.setdefault(ngram[0], OrderedDict())
        rest[tuple(ngram[1:])] = None
        rest.move_to_end(tuple(ngram[1:]))
        if len(rest) > self._max_ngrams:
            rest.popitem(last=False)

    def after(self, token: int) -> Iterator[tuple[int, ...]]:
        """What n-grams that begin with this token go on with, the latest first."""
        return reversed(self._after.get(token, OrderedDict()))


class Window:
    """The target's guesses at what is to come, for one request.

    Args:
        request: its prompt gives the first guesses, drawn with its seed.
        options: the sizes.
    """

    def __init__(self, request: Request, options: LookaheadOptions) -> None:
        self._dice = random.Random(request.noise.seed)
        self._tokens = request.prompt_ids
        self._width = options.window_size
        self._most_rows = options.ngram_size - 1
        self.rows: list[list[int]] = [[]]
        self._length = len(request.token_ids)  # of the text the window stands behind
        self._refill()

    def columns(self) -> Iterator[tuple[list[int], list[int]]]:
        """Per column the path from the root down its rows, and the tokens of the rows alone."""
        for index in range(self._width):
            column = [row[index] for row in self.rows]
            yield [*self.rows[0][:index], *column], column

    def advance(self, length: int, guesses: Sequence[int]) -> None:
        """Go on behind a text that has grown.

        Args:
            length: tokens of the text now.
            guesses: what followed the last row in the pass, for as many columns as were computed.
        """
        shift = length - self._length
        if guesses:
            self.rows.append(list(guesses))
            if len(self.rows) > self._most_rows:
                self.rows.pop(0)  # every row moves up, and so one position on
                shift -= 1
        self.rows = [row[max(0, shift) :] for row in self.rows]
        self._length = length
        self._refill()

    def _refill(self) -> None:
        for row in self.rows:
            row += self._dice.choices(self._tokens, k=self._width - len(row))


class LookaheadDrafter(Drafter):
    """Deterministic: q is one-hot."""

    drafts_trees = True

    def __init__(self, options: LookaheadOptions) -> None:
        self._options = options
        self._pools: dict[int, Pool] = {}
        self._windows: dict[int, Window] = {}

    def propose(self, batch: Sequence[Request], budgets: Sequence[Budget]) -> list[Draft]:
        """N-grams that begin with the root and, as far as there is room, the window."""
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
            size, prompt = self._options.ngram_size, request.prompt_ids
            for start in range(len(prompt) - size + 1):
                pool.add(prompt[start : start + size])
        return pool

    def observe(self, outcomes: Sequence[Outcome], times: StepTimes) -> None:
        """Read a new row of the window and its n-grams off the target's logits."""
        for outcome in outcomes:
            window = self._windows[outcome.request.key]
            guesses: list[int] = []
            for path, column in window.columns():
                node = _find(outcome.draft.tree, path)
                if node is None:
                    break  # there was no room for it
                guesses.append(outcome.output.argmax_of(node))
                if len(column) == self._options.ngram_size - 1:
                    self._pools[outcome.request.key].add([*column, guesses[-1]])
            window.advance(len(outcome.request.token_ids), guesses)

    def rewind(self, request: Request) -> None:
        """The pool stays; the window begins anew where the text ends now."""
        self._windows.pop(request.key, None)

    def release(self, request: Request) -> None:
        """Forget the request's pool and window."""
        self._pools.pop(request.key, None)
        self._windows.pop(request.key, None)


class _Paths:
    """A tree made of paths that may begin alike, within a budget."""

    def __init__(self, root: int, budget: Budget) -> None:
        self.tokens, self.parents = [root], [-1]
        self._budget = budget
        self._places: dict[tuple[int, int], int] = {}

    def add(self, path: Sequence[int]) -> None:
        node = 0
        for token in path[: self._budget.depth]:
            place = self._places.get((node, token))
            if place is None:
                if len(self.tokens) > self._budget.nodes:
                    return
                place = self._places[node, token] = len(self.tokens)
                self.tokens.append(token)
                self.parents.append(node)
            node = place


def _find(tree: TokenTree, path: Sequence[int]) -> int | None:
    """The node at the end of a path of tokens from the root."""
    node: int | None = 0
    for token in path:
        assert node is not None
        node = next((n for n in tree.children[node] if tree.tokens[n] == token), None)
        if node is None:
            return None
    return node
