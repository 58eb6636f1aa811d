"""`cost_model` for drafters that look their guesses up: the guess comes first, then it is cut.

A lookup takes microseconds, and its match says how good the guess is. So the drafter is asked for
all it has, and of that as much is drafted as pays (`trim`). Such tokens are certain (q is one-hot),
so that any function of the text may decide which are verified.

How likely a token is right is learnt by the length of its match, which every token of a guess makes
longer by one. Nothing need be drafted for that: the text that comes shows what the guess was worth,
also where it was cut, and there are no probes.

The tokens of all requests are taken in the order of their probabilities, of those before them
included, as many as give the batch most tokens per second: Leviathan et al.'s choice of gamma
(section 3.5), made anew for every step. Where that is none the step is exactly the plain one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from operator import itemgetter
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from foretoken.control.base import Budget, Controller, within
from foretoken.control.cost_model import CostModel
from foretoken.control.evidence import MatchOdds
from foretoken.control.plain_steps import PlainSteps
from foretoken.request import Request
from foretoken.tree import Draft

if TYPE_CHECKING:
    from foretoken.decode import Outcome, StepTimes

__all__ = ["LookupModel"]

_PRICE = 0.005
"""What questions in vain may cost, as a share of the time."""

_WORTH_IT = 1.01
"""What drafts must promise to yield over a plain step: less is lost in what estimates are off by,
and the best of many estimates is off to the good side."""

_WEIGHT_OF_NEW = 0.1

_COSTS_STEPS = 16
"""For so many steps costs are taken to be the same: compared with each other they move slowly."""

_NOTHING = Budget(0, 0)

_MOST_OF_KNOWN = 2.0
"""Seconds above this many times what was known are cut there, as a pass's are."""


@dataclass
class _Known:
    """What is known of one request.

    Attributes:
        odds: of its guesses.
        gain: what a question saves, by estimate: a share of a plain pass.
        waited: steps since the drafter was asked, the present one included.
        asked: whether it is in the present step.
        begun: whether it was asked before that, and so has read the prompt.
        guess: what it had, before that was cut.
    """

    odds: MatchOdds
    gain: float = inf
    waited: int = 0
    asked: bool = False
    begun: bool = False
    guess: Draft | None = None

    def asked_for(self, gain: float) -> None:
        """What the question of the present step is to save."""
        before = gain if self.gain == inf else self.gain
        self.gain = before + _WEIGHT_OF_NEW * (gain - before)


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
        self._overall = MatchOdds()
        self._question = 0.0  # seconds of one; 0 while that is not known
        self._questions = 0  # in the present step
        self._silence = 0.0  # seconds of drafting where nobody is asked
        self._plain_steps = PlainSteps()
        self._relative: list[float] = []  # see `_passes`
        self._passes_rows = self._passes_left = 0

    def _of(self, request: Request) -> _Known:
        known = self._requests.get(request.key)
        if known is None:
            known = self._requests[request.key] = _Known(MatchOdds(self._overall))
        return known

    # Before a step

    def budgets(self, batch: Sequence[Request]) -> list[Budget]:
        """See `Controller.budgets`: as much as a request may use, where it is worth asking."""
        self._questions = 0
        if not self.costs:  # there has to be a plain step first
            return [_NOTHING] * len(batch)
        rows = len(batch) + self.others
        question = self._question / self.costs(rows, rows)
        # Steps from question to question: so many that those in vain cost no more than that.
        patience = min(self._probe_every, rows * question / _PRICE)
        budgets = []
        for request in batch:
            known = self._of(request)
            known.waited += 1
            known.asked = known.gain >= question or known.waited >= patience
            self._questions += known.asked
            asks = self.num_speculative_tokens if known.asked else 0
            budgets.append(within(request, asks) if asks else _NOTHING)
        return budgets

    def trim(self, batch: Sequence[Request], drafts: Sequence[Draft]) -> list[Draft]:
        """See `Controller.trim`: the likeliest tokens of all guesses, as many as pay."""
        if not self._questions:
            return list(drafts)
        likely: list[tuple[float, int]] = []  # of each token: its probability, and whose it is
        asked: list[tuple[int, _Known]] = []
        for row, (request, draft) in enumerate(zip(batch, drafts, strict=True)):
            known = self._of(request)
            if known.asked:
                known.guess = draft
                asked.append((row, known))
                if length := draft.tree.num_drafted:
                    likely += [(p, row) for p in known.odds.passed(draft.match, length)]
        depths, gains = self._depths(len(batch), likely)
        for row, known in asked:
            known.asked_for(gains[row])
        return [draft.cut(depth) for draft, depth in zip(drafts, depths, strict=True)]

    def _depths(self, own: int, likely: list[tuple[float, int]]) -> tuple[list[int], list[float]]:
        """How many tokens of each guess are drafted; what a row's gain, in plain passes."""
        depths, gains, rows = [0] * own, [0.0] * own, own + self.others
        if not likely:
            return depths, gains
        if own > 1:  # the sort is stable: no token comes before the one it follows
            likely.sort(key=itemgetter(0), reverse=True)
        passes = self._passes(rows, len(likely))
        tokens, count, best = float(rows), 0, rows * _WORTH_IT
        for index, (p, _) in enumerate(likely, 1):
            tokens += p
            if tokens > best * passes[index]:
                count, best = index, tokens / passes[index]
        each = (passes[count] - 1) / max(1, count)
        for p, row in likely[:count]:
            depths[row] += 1
            gains[row] += p / rows - each
        if self._plain_steps.due(best / rows):
            depths = [0] * own
        return depths, gains

    def _passes(self, rows: int, nodes: int) -> Sequence[float]:
        """What a pass costs with up to so many drafted nodes, in plain passes; of late."""
        if rows != self._passes_rows or nodes >= len(self._relative) or not self._passes_left:
            positions = rows + np.arange(max(nodes, self.num_speculative_tokens) + 1.0)
            seconds = self.costs.drafting(positions, rows) / self.costs(rows, rows)
            self._relative = [1.0, *seconds[1:].tolist()]
            self._passes_rows, self._passes_left = rows, _COSTS_STEPS
        self._passes_left -= 1
        return self._relative

    # After a step

    def observe(self, outcomes: Sequence[Outcome], times: StepTimes) -> None:
        """Learn what guesses were worth, what asking costs, and what passes do."""
        positions, questions, steady = 0, self._questions, True
        for outcome in outcomes:
            positions += len(outcome.draft.tree)
            known = self._of(outcome.request)
            if known.asked:
                steady = steady and known.begun
                known.begun, known.waited = True, 0
                self._learn(known, outcome)
        rows = times.rows or len(outcomes)
        if not times.noted:
            self.costs.observe(times.positions or positions, times.verify, rows)
        self._plain_steps.count(drafted=positions > len(outcomes))
        if not times.draft:
            return
        if not questions:
            self._silence = _mean(self._silence, times.draft)
        elif steady:
            seconds = max(0.0, times.draft - self._silence) / questions
            self._question = _mean(self._question, seconds)

    def _learn(self, known: _Known, outcome: Outcome) -> None:
        """Compare the guess with the tokens that came."""
        guess, known.guess = known.guess, None
        if guess is None or not guess.tree.num_drafted:
            return
        tree, accepted = outcome.draft.tree, outcome.accepted
        came = [*(tree.tokens[node] for node in accepted.path), accepted.token]
        compared = zip(guess.tree.tokens[1:], came, strict=False)
        for match, (token, true) in enumerate(compared, guess.match):
            for odds in (known.odds, self._overall):
                odds.add(match, right=token == true)
            if token != true:
                break

    def release(self, request: Request) -> None:
        """Forget the request's own odds; what they taught about all stays."""
        self._requests.pop(request.key, None)


def _mean(known: float, seconds: float) -> float:
    """With one more measurement, cut where it is far above; 0 is nothing known."""
    if not known:
        return seconds
    return known + _WEIGHT_OF_NEW * (min(seconds, _MOST_OF_KNOWN * known) - known)
