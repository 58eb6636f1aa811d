"""`cost_model` for drafters that look tokens up: look up first, then cut the drafts.

A lookup takes little time, and how it found a token tells how likely that token is right. So the
drafter proposes all tokens it finds, and `trim` keeps those that maximize expected tokens per
second. Looked-up tokens are deterministic (q is one-hot), so any function of the text may choose
among them.

The probability that a token is right is estimated by its features (`Draft.features`). The tokens
generated next show which proposals were right, also those that were cut. So nothing has to be
drafted just to learn.

The tokens of all requests compete in the order of their probability of being accepted. The step
verifies as many as maximize the batch's expected tokens per second. This is the choice of gamma in
Leviathan et al., section 3.5, made anew in every step. If no draft raises that rate, the step is a
plain one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import ClassVar

import numpy as np

from foretoken.control.base import Budget, Controller, within
from foretoken.control.cost_model import CostModel, smoothed
from foretoken.control.evidence import GuessOdds, path_odds
from foretoken.core.tree import Draft
from foretoken.decode import Outcome
from foretoken.request import Request

__all__ = ["LookupModel"]

_POLLING = 0.001
"""Share of the time that may go into polling requests whose lookups do not pay."""

_FIRST_GAIN = 0.1
"""Assumed gain of a request's lookups before any were made: high enough to try them."""

_NOTHING = Budget(0, 0)


@dataclass
class _Known:
    """State of one request.

    Attributes:
        gain: average saving of a lookup, as a share of a pass without drafts.
        guess: the draft of the current step's lookup, before it was cut.
        new: whether the drafter was never asked, so that it has to read the prompt first.
    """

    gain: float
    guess: Draft | None = None
    new: bool = True


class LookupModel(Controller):
    """Drafts of at most `num_speculative_tokens`, cut to what pays."""

    class Options(CostModel.Options):
        """The same as those of `cost_model`."""

    name: ClassVar[str] = CostModel.name
    summary: ClassVar[str] = CostModel.summary
    needs_costs: ClassVar[bool] = True

    def setup(self) -> None:
        """See `Controller.setup`."""
        assert isinstance(self.options, CostModel.Options)
        self._probe_every = self.options.probe_every
        self._requests: dict[int, _Known] = {}
        self._odds = GuessOdds()
        self._gain = _FIRST_GAIN  # of new requests' lookups
        self._lookup_seconds = 0.0  # of one request's lookup; 0 while unknown
        self._step = 0
        self._next_poll = 0.0  # the next step that asks for all requests
        self._asked: dict[int, tuple[int, _Known]] = {}  # in the current step: key -> row of batch

    def budgets(self, batch: Sequence[Request], rows: int) -> list[Budget]:
        """See `Controller.budgets`: the full length where lookups pay, else nothing."""
        self._asked = {}
        budgets = [_NOTHING] * len(batch)
        if not self.costs:  # a pass has to be timed first
            return budgets
        self._step += 1
        price = self._lookup_seconds / self.costs(rows, rows)
        poll = self._step >= self._next_poll
        if poll:
            self._next_poll = self._step + min(self._probe_every, len(batch) * price / _POLLING)
        for row, request in enumerate(batch):
            known = self._requests.setdefault(request.key, _Known(self._gain))
            if poll or known.gain >= price:
                budgets[row] = within(request, self.num_speculative_tokens)
                self._asked[request.key] = row, known
        return budgets

    def trim(self, batch: Sequence[Request], drafts: Sequence[Draft], rows: int) -> list[Draft]:
        """See `Controller.trim`: keeps the most probable tokens of all drafts, as many as pay."""
        trimmed = list(drafts)
        likely: list[tuple[float, int, int]] = []  # probability, row, node
        for row, known in self._asked.values():
            known.guess = guess = drafts[row]
            if guess.features:
                paths = path_odds(guess, self._odds.of)
                likely += [(p, row, node) for node, p in enumerate(paths, 1)]
        # The sort is stable: no token comes before its parent.
        likely.sort(key=itemgetter(0), reverse=True)
        count, cost = self._how_many([p for p, _, _ in likely], rows)
        gains = dict.fromkeys((row for row, _ in self._asked.values()), 0.0)
        nodes: dict[int, list[int]] = {row: [] for row in gains}
        for p, row, node in likely[:count]:
            nodes[row].append(node)
            gains[row] += p / rows - cost
        for row, known in self._asked.values():
            trimmed[row] = drafts[row].only(nodes[row])
            known.gain += 0.1 * (gains[row] - known.gain)
            self._gain += 0.05 * (gains[row] - self._gain)
        return trimmed

    def _how_many(self, odds: Sequence[float], rows: int) -> tuple[int, float]:
        """How many of the most probable tokens maximize expected tokens per second; cost of each.

        The cost is in passes without drafts.
        """
        if not odds:
            return 0, 0.0
        positions = rows + np.arange(len(odds) + 1.0)
        passes = self.costs.drafting(positions, rows) / self.costs(rows, rows)
        rates = (rows + np.cumsum((0.0, *odds))) / passes
        best = int(rates.argmax())
        return best, float(passes[best] - 1) / max(1, best)

    def observe(self, outcomes: Sequence[Outcome], draft_seconds: float) -> None:
        """Learn which proposals were right, and the cost of lookups including this learning."""
        if not self._asked:
            return
        began = time.perf_counter()
        all_have_read = not any(known.new for _, known in self._asked.values())
        for outcome in outcomes:
            if asked := self._asked.get(outcome.request.key):
                self._learn(asked[1], outcome)
        seconds = (draft_seconds + time.perf_counter() - began) / len(self._asked)
        if all_have_read:
            self._lookup_seconds = smoothed(self._lookup_seconds or seconds, seconds)

    def _learn(self, known: _Known, outcome: Outcome) -> None:
        """Follow the proposal as far as the generated tokens agree with it."""
        guess, known.guess, known.new = known.guess, None, False
        if guess is None or not guess.features:
            return
        drafted, accepted = outcome.draft.tree, outcome.accepted
        tree, node = guess.tree, 0
        for true in (*(drafted.tokens[kept] for kept in accepted.path), accepted.token):
            children, node = tree.children[node], -1
            for child in children:
                right = tree.tokens[child] == true
                self._odds.add(guess.features[child - 1], right=right)
                if right:
                    node = child
            if node < 0:
                return

    def release(self, request: Request) -> None:
        """Forget the request; what was learnt from its drafts stays."""
        self._requests.pop(request.key, None)
        self._asked.pop(request.key, None)
