"""`cost_model` for drafters that look their guesses up: the guess comes first, then it is cut.

A lookup takes little time, and how it found a token says how good that is. So the drafter is asked
for all it has, and of that as much is drafted as pays (`trim`). Such tokens are certain (q is
one-hot), so that any function of the text may decide which are verified.

How likely a token is right is learnt by its features (`Draft.features`): the length of its match,
which every token of a chain makes longer by one, or its rank after how long a context. Nothing need
be drafted for that: the text that comes shows what the guess was worth, also where it was cut, and
there are no probes.

The tokens of all requests are taken in the order of their probabilities, of those before them
included, as many as give the batch most tokens per second: Leviathan et al.'s choice of gamma
(section 3.5), made anew for every step. Where that is none the step is exactly the plain one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import ClassVar

import numpy as np

from foretoken.control.base import Budget, Controller, within
from foretoken.control.cost_model import CostModel
from foretoken.control.drafting_costs import smoothed
from foretoken.control.evidence import GuessOdds
from foretoken.control.plain_steps import PlainSteps
from foretoken.core.tree import Draft
from foretoken.decode import Outcome
from foretoken.request import Request

__all__ = ["LookupModel"]

_PRICE = 0.001
"""What questions in vain may cost, as a share of the time, if `probe_every` allows it."""

_WORTH_IT = 1.03
"""What drafts must promise to yield over a plain step: less is lost in what estimates are off by,
and the best of many estimates is off to the good side."""

_WEIGHT_OF_NEW, _WEIGHT_OF_ONE = 0.1, 0.05
"""How much a question says of what the next ones save: of its request, and of new ones."""

_COSTS_STEPS = 16
"""For so many steps costs are taken to be the same: working them out takes time, too."""

_PROMISES, _MEMORY_OF_PROMISES, _TRUST = 30.0, 0.995, 4.0
"""What drafts promised and kept is remembered for so many promised tokens; how much of it from one
step to the next, so that it is forgotten where nothing is drafted, too; and after how many tokens
it weighs as much as what is known of guesses."""

_SLEEPS = 4
"""One in so many steps in which nobody was asked is looked at: they are all alike."""

_NOTHING = Budget(0, 0)


@dataclass
class _Known:
    """What is known of one request.

    Attributes:
        odds: of its guesses.
        gain: what a question saves, by estimate: a share of a plain pass.
        read: whether the drafter has been asked before, and so has read the prompt.
        guess: what it had when it was asked last, before that was cut.
    """

    odds: GuessOdds
    gain: float
    read: bool = False
    guess: Draft | None = None


@dataclass(frozen=True)
class _Passes:
    """What passes over so many rows cost, in plain passes.

    Attributes:
        relative: by the number of drafted nodes.
        rows: of the whole batch.
        least: below this probability of a token its position costs more than it brings, whatever
            else is drafted.
    """

    relative: Sequence[float]
    rows: int
    least: float


class LookupModel(Controller):
    """Drafts of at most `num_speculative_tokens`, cut to what they are worth."""

    class Options(CostModel.Options):
        """The same as there."""

    name: ClassVar[str] = CostModel.name
    summary: ClassVar[str] = CostModel.summary
    needs_costs: ClassVar[bool] = True

    def setup(self) -> None:
        """See `Controller.setup`."""
        assert isinstance(self.options, CostModel.Options)
        self._probe_every = self.options.probe_every
        self._requests: dict[int, _Known] = {}
        self._overall = GuessOdds()
        self._gain = 0.1  # of a new request's first question: that of late
        self._question = 0.0  # seconds of one; 0 while that is not known
        self._silence = 0.0  # seconds of drafting and learning where nobody is asked
        self._step = 0
        self._due = 0.0  # the step in which all are asked, also those that were asked in vain
        self._asleep = False  # whether that is all of them
        self._price = 0.0  # of a question, in plain passes
        self._asked: list[tuple[int, _Known]] = []  # in the present step: rows of the batch
        self._promise = 0.0  # tokens that the present step's drafts should bring
        self._promised = self._kept = 0.0  # the same of late, and what they brought
        self._plain_steps = PlainSteps()
        self._passes = _Passes([1.0], 0, 0.0)
        self._passes_left = 0

    # Before a step

    def budgets(self, batch: Sequence[Request], rows: int) -> list[Budget]:
        """See `Controller.budgets`: as much as a request may use, where it is worth asking."""
        self._asked = []
        budgets = [_NOTHING] * len(batch)
        if not self.costs:  # there has to be a plain step first
            return budgets
        self._step += 1
        due = self._step >= self._due
        if self._asleep and not due and len(batch) == len(self._requests):
            return budgets
        self._price = self._question / self.costs(rows, rows)
        if due:  # next after so many steps that questions in vain cost no more than that
            self._due = self._step + min(self._probe_every, rows * self._price / _PRICE)
        self._asleep = True
        for row, request in enumerate(batch):
            known = self._requests.get(request.key) or self._new(request)
            promising = known.gain >= self._price
            if promising or due:
                budgets[row] = within(request, self.num_speculative_tokens)
                self._asked.append((row, known))
            self._asleep &= not promising
        return budgets

    def _new(self, request: Request) -> _Known:
        known = self._requests[request.key] = _Known(GuessOdds(self._overall), self._gain)
        return known

    def trim(self, batch: Sequence[Request], drafts: Sequence[Draft], rows: int) -> list[Draft]:
        """See `Controller.trim`: the likeliest tokens of all guesses, as many as pay."""
        trimmed, self._promise = list(drafts), 0.0
        if not self._asked:
            return trimmed
        likely: list[tuple[float, int, int]] = []  # probability, row, node
        least = self._expected_passes(rows).least
        for row, known in self._asked:
            known.guess = draft = drafts[row]
            if draft.features:
                likely += [(p, row, node) for p, node in known.odds.likely(draft, least)]
        nodes, gains = self._choose(len(batch), rows, likely)
        for row, known in self._asked:
            self._expect(known, gains[row])
            trimmed[row] = drafts[row].only(nodes[row])
        return trimmed

    def _expect(self, known: _Known, gain: float) -> None:
        """What the question of the present step is to save."""
        known.gain += _WEIGHT_OF_NEW * (gain - known.gain)
        self._asleep &= known.gain < self._price
        self._gain += _WEIGHT_OF_ONE * (gain - self._gain)

    def _choose(
        self, own: int, rows: int, likely: list[tuple[float, int, int]]
    ) -> tuple[list[list[int]], list[float]]:
        """Which nodes of each row's guess are drafted; what a row gains by it, in plain passes."""
        nodes: list[list[int]] = [[] for _ in range(own)]
        gains = [0.0] * own
        if not likely:
            return nodes, gains
        # The sort is stable: no token comes before the one it follows.
        likely.sort(key=itemgetter(0), reverse=True)
        passes = self._passes.relative
        tokens, count, best = float(rows), 0, rows * _WORTH_IT
        trust = min(1.0, (self._kept + _TRUST) / (self._promised + _TRUST))
        for index, (p, _, _) in enumerate(likely, 1):
            tokens += trust * p
            if tokens > best * passes[index]:
                count, best = index, tokens / passes[index]
        each = (passes[count] - 1) / max(1, count)
        for p, row, node in likely[:count]:
            nodes[row].append(node)
            gains[row] += trust * p / rows - each
        if self._plain_steps.due(best / rows):
            nodes = [[] for _ in range(own)]
        elif count:
            self._promise = sum(p for p, _, _ in likely[:count])
        return nodes, gains

    def _expected_passes(self, rows: int) -> _Passes:
        """What passes cost, of late."""
        if rows != self._passes.rows or not self._passes_left:
            positions = rows + np.arange(rows * self.num_speculative_tokens + 1.0)
            seconds = self.costs.drafting(positions, rows) / self.costs(rows, rows)
            least = rows * float(np.diff(seconds).min(initial=1.0))
            self._passes = _Passes(seconds.tolist(), rows, least)
            self._passes_left = _COSTS_STEPS
        self._passes_left -= 1
        return self._passes

    # After a step

    def observe(self, outcomes: Sequence[Outcome], draft_seconds: float) -> None:
        """Learn what guesses were worth, what asking costs, and what passes do."""
        began = time.perf_counter()
        if not self._asked and self._step % _SLEEPS:
            self._plain_steps.count(drafted=False)
            return
        drafted = kept = 0
        for row, known in self._asked:
            drafted += outcomes[row].draft.tree.num_drafted
            kept += len(outcomes[row].accepted.path)
            self._learn(known, outcomes[row])
        memory = _MEMORY_OF_PROMISES * _PROMISES / (_PROMISES + self._promise)
        self._promised = memory * self._promised + self._promise
        self._kept = memory * self._kept + kept
        self._plain_steps.count(drafted=drafted > 0, surprised=self.costs.surprised)
        # To ask is also to learn from the answer, here as in the drafter.
        self._time(draft_seconds + time.perf_counter() - began)
        for _, known in self._asked:
            known.read = True

    def _time(self, seconds: float) -> None:
        """Learn what asking costs; not from those who had to read the prompt first."""
        if not self._asked:
            self._silence = smoothed(self._silence or seconds, seconds)
        elif all(known.read for _, known in self._asked):
            each = max(0.0, seconds - self._silence) / len(self._asked)
            self._question = smoothed(self._question or each, each)

    def _learn(self, known: _Known, outcome: Outcome) -> None:
        """Compare the guess with the tokens that came."""
        guess, known.guess = known.guess, None
        if guess is None or not guess.features:
            return
        drafted, accepted = outcome.draft.tree, outcome.accepted
        tree, node = guess.tree, 0
        for true in (*(drafted.tokens[node] for node in accepted.path), accepted.token):
            reached, node = node, -1
            for child in tree.children[reached]:
                right = tree.tokens[child] == true
                for odds in (known.odds, self._overall):
                    odds.add(guess.features[child - 1], right=right)
                if right:
                    node = child
            if node < 0:
                break

    def release(self, request: Request) -> None:
        """Forget the request's own odds; what they taught about all stays."""
        self._requests.pop(request.key, None)
