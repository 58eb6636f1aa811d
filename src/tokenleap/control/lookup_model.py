"""`cost_model` for drafters that look tokens up: look up first, then cut the drafts.

A lookup takes little time, and how it found a token tells how likely that token is right. So the
drafter proposes all tokens it finds, and `trim` keeps those that maximize expected tokens per
second. Looked-up tokens are deterministic (q is one-hot), so any function of the text may choose
among them.

Each token has a feature that says how it was found (`Draft.features`), and each feature has an
acceptance rate. The tokens generated next show which proposals were right, including those that
were cut. So nothing has to be drafted just to learn.

The tokens of all requests compete in the order of their probability of being accepted. The step
verifies as many as maximize the batch's expected tokens per second. This is the choice of gamma in
Leviathan et al., section 3.5, made anew in every step. If no draft raises that rate, the step is
plain decoding.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, ClassVar

from tokenleap.control.base import NO_BUDGET, Budget, Controller, Expected, within
from tokenleap.control.cost_model import CostModel
from tokenleap.control.drafting_costs import smoothed
from tokenleap.control.evidence import AcceptanceRates, path_probs
from tokenleap.core import clock
from tokenleap.runtime.costs import CostCurve

if TYPE_CHECKING:
    from tokenleap.core.tree import Draft
    from tokenleap.decode import Outcome
    from tokenleap.request import Request

__all__ = ["LookupModel", "LookupPlan", "how_many"]

_POLLING = 0.002
"""Share of the time that may go into polling requests whose lookups do not pay."""

_FIRST_GAIN = 0.1
"""Assumed gain of a request's lookups before any were made: high enough to try them."""


@dataclass
class _State:
    """What is known of one request.

    Attributes:
        gain: average saving of a lookup, as a share of the time of a plain pass.
        proposal: the draft of the current step's lookup, before it was cut.
        new: whether nothing was looked up for it yet, so that the drafter must read the prompt.
    """

    gain: float
    proposal: Draft | None = None
    new: bool = True


@dataclass(frozen=True)
class LookupPlan:
    """Which looked-up tokens of a step to verify.

    Args:
        nodes: row of the batch -> nodes of its draft to keep, for every request with a lookup.
        tokens: row -> expected number of accepted tokens.
        gains: row -> saving as a share of the time of a plain pass.
        node_cost: what each of these nodes adds to the pass, as a share of the same.
    """

    nodes: dict[int, list[int]]
    tokens: dict[int, float]
    gains: dict[int, float]
    node_cost: float

    def expected(self, rows: int, left_out: Collection[int] = ()) -> Expected:
        """What the step brings and costs, if the drafts of some rows are left out."""
        kept = [row for row in self.nodes if row not in left_out]
        tokens = sum(self.tokens[row] for row in kept)
        return Expected(rows + tokens, rows + sum(len(self.nodes[row]) for row in kept))


class LookupModel(Controller):
    """Drafts of at most `num_speculative_tokens` tokens, cut to those that pay."""

    class Options(CostModel.Options):
        """See `CostModel.Options`."""

    name: ClassVar[str] = CostModel.name
    summary: ClassVar[str] = CostModel.summary
    needs_costs: ClassVar[bool] = True

    def setup(self) -> None:
        """See `Controller.setup`."""
        assert isinstance(self.options, CostModel.Options)
        self._probe_every = self.options.probe_every
        self._states: dict[int, _State] = {}
        self._rates = AcceptanceRates()
        self._gain = _FIRST_GAIN  # of new requests' lookups
        self._lookup_seconds = 0.0  # of one request's lookup; 0 while unknown
        self._planning = 0.0  # seconds of planning in this step
        self._step = 0
        self._next_poll = 0.0  # the next step that looks up for all requests
        self._asked: dict[int, _State] = {}  # of the requests with a lookup in this step, by key

    def budgets(self, batch: Sequence[Request], rows: int) -> list[Budget]:
        """See `Controller.budgets`: the full length where lookups pay, else nothing."""
        self._asked, self._planning = {}, 0.0
        budgets = [NO_BUDGET] * len(batch)
        if not self.costs:  # a pass has to be timed first
            return budgets
        self._step += 1
        price = self._lookup_seconds / self.costs(rows, rows)
        poll = self._step >= self._next_poll
        if poll:
            self._next_poll = self._step + min(self._probe_every, len(batch) * price / _POLLING)
        for row, request in enumerate(batch):
            state = self._states.setdefault(request.key, _State(self._gain))
            if poll or state.gain >= price:
                budgets[row] = within(request, self.num_speculative_tokens)
                self._asked[request.key] = state
        return budgets

    def idle_steps(self) -> int:
        """How many steps follow without any lookup; only valid after one."""
        if self._asked or not self.costs:
            return 0
        return max(0, math.ceil(self._next_poll - self._step) - 1)

    def rest(self, steps: int) -> None:
        """Record steps in which it was not asked."""
        self._step += steps

    def trim(self, batch: Sequence[Request], drafts: Sequence[Draft], rows: int) -> list[Draft]:
        """See `Controller.trim`: keeps the most probable tokens of all drafts, as many as pay."""
        plan = self.plan(batch, drafts, rows)
        self.follow(batch, plan)
        trimmed = list(drafts)
        for row, nodes in plan.nodes.items():
            trimmed[row] = drafts[row].only(nodes)
        return trimmed

    def plan(self, batch: Sequence[Request], drafts: Sequence[Draft], rows: int) -> LookupPlan:
        """Choose the most probable tokens of all drafts, as many as pay; see `trim`."""
        began = clock.now()
        asked = [row for row, request in enumerate(batch) if request.key in self._asked]
        likely: list[tuple[float, int, int]] = []  # probability, row, node
        for row in asked:
            self._asked[batch[row].key].proposal = proposal = drafts[row]
            if proposal.features:
                paths = path_probs(proposal, self._rates.of)
                likely += [(p, row, node) for node, p in enumerate(paths, 1)]
        # The sort is stable: no token comes before its parent.
        likely.sort(key=itemgetter(0), reverse=True)
        probs = [p for p, _, _ in likely]
        count, cost = how_many(probs, self.costs, rows, Expected.plain(rows))
        nodes: dict[int, list[int]] = {row: [] for row in asked}
        tokens, gains = dict.fromkeys(asked, 0.0), dict.fromkeys(asked, 0.0)
        for p, row, node in likely[:count]:
            nodes[row].append(node)
            tokens[row] += p
            gains[row] += p / rows - cost
        self._planning += clock.now() - began
        return LookupPlan(nodes, tokens, gains, cost)

    def follow(
        self, batch: Sequence[Request], plan: LookupPlan, left_out: Collection[int] = ()
    ) -> None:
        """Record what the lookups of a plan gain; those of some rows are not verified."""
        for row, planned in plan.gains.items():
            gain = 0.0 if row in left_out else planned
            state = self._asked[batch[row].key]
            state.gain += 0.1 * (gain - state.gain)
            self._gain += 0.05 * (gain - self._gain)

    def observe(self, outcomes: Sequence[Outcome], draft_seconds: float) -> None:
        """Learn which tokens were right, and what a lookup costs, including this learning."""
        if not self._asked:
            return
        began = clock.now()
        all_have_read = not any(state.new for state in self._asked.values())
        for outcome in outcomes:
            if state := self._asked.get(outcome.request.key):
                if state.proposal:
                    self._rates.learn(state.proposal, outcome)
                state.proposal, state.new = None, False
        seconds = draft_seconds + self._planning + clock.now() - began
        seconds = self.costs.agreed(seconds / len(self._asked))
        if all_have_read:
            self._lookup_seconds = smoothed(self._lookup_seconds or seconds, seconds)

    def release(self, request: Request) -> None:
        """Forget the request; what was learnt from its drafts stays."""
        self._states.pop(request.key, None)
        self._asked.pop(request.key, None)


def how_many(
    probs: Sequence[float], costs: CostCurve, rows: int, beside: Expected
) -> tuple[int, float]:
    """How many of the most probable tokens to verify, and the cost of each.

    Args:
        probs: the path probabilities of all tokens, the largest first.
        costs: the cost of passes.
        rows: number of requests in the whole step.
        beside: what the step brings and costs without these tokens.

    Returns:
        The number that maximizes expected tokens per second, and what each of these tokens adds
        to the pass, as a share of the time of a plain pass.
    """
    if not probs:
        return 0, 0.0
    before = costs(beside.positions, rows)
    tokens, best, added = beside.tokens, 0, 0.0
    highest = tokens / (beside.seconds + before)
    for count, p in enumerate(probs, 1):
        tokens += p
        seconds = costs(beside.positions + count, rows)
        if tokens > highest * (beside.seconds + seconds):
            highest = tokens / (beside.seconds + seconds)
            best, added = count, seconds - before
    return best, added / costs(rows, rows) / max(1, best)
