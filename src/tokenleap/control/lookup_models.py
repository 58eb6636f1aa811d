"""`LookupModel` and `HybridModel`: `cost_model` for drafters that look up.

A lookup costs little, so it is made first and then cut to what pays. Beside a trained drafter, it
is compared with the draft that this would make.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tokenleap.control.base import NO_BUDGET, Budget, within
from tokenleap.control.cost_model import ByCosts, CostModel, Resting
from tokenleap.control.estimates import moved, smoothed
from tokenleap.control.features import (
    AcceptanceRates,
    Fit,
    is_graft,
    path_probs,
    trained_part,
    with_claims,
    without_grafts,
)
from tokenleap.control.planner import (
    Expected,
    LookupPlan,
    Offer,
    can_be_cut,
    offers_of,
    without_losses,
    worth_verifying,
)
from tokenleap.core import clock
from tokenleap.core.per_request import PerRequest

if TYPE_CHECKING:
    from tokenleap.core.tree import Draft
    from tokenleap.decode import Outcome
    from tokenleap.request import Request

_POLLING = 0.002
"""Share of the time that may go into polling requests whose lookups do not pay."""

_TURN = 16
"""Fewest steps between two turns if parts of a batch are polled in turns. Where one pays, the next
step polls all."""

_FIRST_TIMES = 4
"""Of so many first times of a lookup, the least counts: what once seemed dear is rarely tried."""

_FIRST_GAIN = 0.1
"""Assumed gain of a request's lookups before any were made: high enough to try them."""


@dataclass
class _State:
    """Observations of one request."""

    gain: float  # average saving of a lookup, as a share of the time of a plain pass
    fit: Fit  # whether its text is like those of others
    proposal: Draft | None = None  # the draft of the step's lookup, before it was cut
    new: bool = True  # whether nothing was looked up yet, so that the drafter must read the prompt

    @property
    def worth(self) -> float:
        """The gain that its lookups may be expected to have."""
        return self.gain * self.fit.factor


class LookupModel(Resting):
    """Cuts drafts of at most `num_speculative_tokens` looked-up tokens to those that pay.

    A lookup takes little time, and how it found a token tells how likely that token is right. So
    the drafter proposes all tokens it finds, and `trim` keeps those that maximize expected tokens
    per second: the choice of gamma in Leviathan et al., section 3.5, made anew in every step.
    Looked-up tokens are deterministic (q is one-hot), so any function of the text may choose among
    them.

    Each token has a feature that says how it was found (`Draft.features`), and each feature has an
    acceptance rate. The tokens generated next show which proposals were right, including those that
    were cut. So nothing has to be drafted just to learn. All requests share the rates, and `Fit`
    says whether they fit a request.
    """

    def setup(self) -> None:
        super().setup()
        self._rates = AcceptanceRates()
        self._gain = _FIRST_GAIN  # of new requests' lookups
        self._states = PerRequest(lambda: _State(self._gain, self._rates.fit()))
        self._lookup_seconds = 0.0  # of one request's lookup; 0 while unknown
        self._timed = 0  # lookups of which that was learnt
        self._price = 0.0  # the same in plain passes of this step
        self._planning = 0.0  # seconds of planning in this step
        self._step = 0
        self._next_poll = 0.0  # the next step that looks up for requests whose lookups do not pay
        self._turns = 1  # parts of the batch, one of which it polls
        self._polls = 0
        self._asked = PerRequest[_State]()  # of the requests with a lookup in this step, by key

    def budgets(self, batch: Sequence[Request], rows: int) -> list[Budget]:
        if (ahead := self._planned_ahead(batch, rows)) is not None:
            return ahead
        budgets = self.ask(batch, rows)
        self.rest_for(self.idle_steps(), batch, rows)
        return budgets

    def ask(self, batch: Sequence[Request], rows: int) -> list[Budget]:
        """Choose for whom to look up in this step."""
        self._asked, self._planning = PerRequest(), 0.0
        budgets = [NO_BUDGET] * len(batch)
        if not self.costs:  # a pass has to be timed first
            return budgets
        self._step += 1
        self._price = price = self._lookup_seconds / self.costs(rows, rows)
        turns, polled = self._turns, -1
        if self._step >= self._next_poll:
            self._polls += 1
            polled = self._polls % turns
            every = min(self.options.probe_every, len(batch) * price / _POLLING)
            self._turns = max(1, min(len(batch), int(every / _TURN)))
            self._next_poll = self._step + every / self._turns
        for row, request in enumerate(batch):
            state = self._states[request.key]
            if row % turns == polled or state.worth >= price:
                budgets[row] = within(request, self.num_speculative_tokens)
                self._asked[request.key] = state
        return budgets

    def idle_steps(self) -> int:
        """How many steps follow without any lookup; only valid after one."""
        if self._asked or not self.costs:
            return 0
        return max(0, math.ceil(self._next_poll - self._step) - 1)

    def rest(self, waiting: Sequence[int], steps: int) -> None:
        self._step += steps

    def trim(self, batch: Sequence[Request], drafts: Sequence[Draft], rows: int) -> list[Draft]:
        if not self._asked:
            return list(drafts)
        plan = self.plan(batch, drafts, rows)
        self.follow(batch, plan)
        if self._plain_step_is_due(1 + sum(plan.gains.values())):
            return [draft.only([]) for draft in drafts]
        trimmed = list(drafts)
        for row, nodes in plan.nodes.items():
            trimmed[row] = drafts[row].only(nodes)
        return trimmed

    def plan(self, batch: Sequence[Request], drafts: Sequence[Draft], rows: int) -> LookupPlan:
        """Choose the most probable tokens of all drafts, as many as pay; see `trim`."""
        began = clock.now()
        asked = [row for row, request in enumerate(batch) if request.key in self._asked]
        offers: list[Offer] = []
        for row in asked:
            state, proposal = self._asked[batch[row].key], drafts[row]
            state.proposal = proposal
            if proposal.features:
                probs = path_probs(proposal, self._rates.of, state.fit.factor)
                offers += offers_of(probs, row)
        plan, cost = worth_verifying(offers, Expected.plain(rows), self.costs, rows)
        nodes: dict[int, list[int]] = {row: [] for row in asked}
        tokens, gains = dict.fromkeys(asked, 0.0), dict.fromkeys(asked, 0.0)
        for offer in plan.taken:
            nodes[offer.row].append(offer.place)
            tokens[offer.row] += offer.tokens
            gains[offer.row] += offer.tokens / rows - cost
        self._planning += clock.now() - began
        return LookupPlan(nodes, tokens, gains, cost, plan.rate * self.costs(rows, rows) / rows)

    def follow(
        self, batch: Sequence[Request], plan: LookupPlan, left_out: Collection[int] = ()
    ) -> None:
        """Record what the lookups of a plan gain; those of some rows are not verified."""
        polled: list[float] = []
        for row, planned in plan.gains.items():
            gain = 0.0 if row in left_out else planned
            state = self._asked[batch[row].key]
            if state.worth < self._price:
                polled.append(gain)
            state.gain = moved(state.gain, gain)
            self._gain = moved(self._gain, gain, share=0.05)
        if sum(polled) > self._price * len(polled):
            self._turns, self._next_poll = 1, self._step + 1

    def observe(self, outcomes: Sequence[Outcome], draft_seconds: float) -> None:
        self._count_drafted(outcomes)
        if not self._asked:
            return
        began = clock.now()
        all_have_read = not any(state.new for state in self._asked.values())
        for outcome in outcomes:
            if state := self._asked.get(outcome.request.key):
                if state.proposal:
                    self._rates.learn(state.proposal, outcome, state.fit)
                state.proposal, state.new = None, False
        seconds = draft_seconds + self._planning + clock.now() - began
        seconds = self.costs.agreed(seconds / len(self._asked))
        if all_have_read:
            known, self._timed = self._lookup_seconds or seconds, self._timed + 1
            early = self._timed <= _FIRST_TIMES
            self._lookup_seconds = min(known, seconds) if early else smoothed(known, seconds)

    def release(self, request: Request) -> None:
        if state := self._states.get(request.key):
            self._rates.ended(state.fit)
        super().release(request)


_BEST_RATE = 0.8
"""No trained draft is compared with a lookup that expects more tokens than this acceptance rate
would give."""


_MOST_ROWS = 4
"""Most requests of a step in which trained drafts are considered. With 8 on two cores, a pass is
bound by computing: trained drafts then cost more than they bring (docs/results.md)."""


@dataclass
class _Clock:
    """Seconds of this step's lookups and trained drafts, from one call of a method to the next."""

    lookups: float = 0.0
    trained: float = 0.0
    since: float = 0.0

    def lap(self) -> float:
        now = clock.now()
        seconds, self.since = now - self.since, now
        return seconds


class HybridModel(ByCosts):
    """Lookups of at most `num_speculative_tokens` tokens, or trained drafts of at most `levels`.

    In every step and for every request, one of three is verified: the lookup, a trained draft, or
    nothing. `LookupModel` estimates the worth of lookups after they were made, and `CostModel` that
    of trained drafts before they are made. Both count expected tokens per second of measured time,
    so their estimates can be compared:

    1. Look up, and plan the step without trained drafts (`LookupModel.plan`).
    2. The requests whose lookup is worth less than a trained draft are candidates. Plan the step in
       which they have trained drafts and the others keep their lookups
       (`CostModel.budgets_beside`).
    3. Take the better plan of the two.

    A trained draft may contain the beginning of the lookup. The rest of the lookup is then appended
    to it, as far as that pays. How often such tokens are right is learnt by their features.

    Where trained drafts do not even pay without a lookup, the steps that follow have lookups only:
    considering more takes several percent of a small model's step.
    """

    def setup(self) -> None:
        levels = self.levels or [1] * self.num_speculative_tokens
        self._lookups = LookupModel(self.num_speculative_tokens, self.options, self.costs)
        self._trained = CostModel(
            sum(levels),
            self.options,
            self.costs,
            levels,
            level_share=self.level_share,
            stops_early=self.stops_early,
        )
        self._trained.be_patient()  # in the meantime there are lookups
        self._best_trained = sum(_BEST_RATE**level for level in range(1, len(levels) + 1))
        self._rates = AcceptanceRates()  # of tokens of trees, and of looked-up ones in any drafts
        self._rows = 1
        self._found: PerRequest[tuple[Draft, list[int]]] = PerRequest()  # lookup, nodes that pay
        self._drafts: PerRequest[Draft] = PerRequest()  # trained draft, before grafts were cut
        self._clock = _Clock()
        self._only_looks_up = False  # in this step

    # Before a step

    def budgets(self, batch: Sequence[Request], rows: int) -> list[Budget]:
        self._rows = rows
        self._only_looks_up = rows > _MOST_ROWS or self._trained.rests_on(batch, rows)
        if self._only_looks_up:
            budgets = self._lookups.budgets(batch, rows)
        else:
            self._lookups.wake()
            self._found, self._drafts = PerRequest(), PerRequest()
            budgets = self._lookups.ask(batch, rows)
        self.resting = self._only_looks_up and self._lookups.resting
        self._clock = _Clock(since=clock.now())
        return budgets

    def choose(
        self, batch: Sequence[Request], budgets: Sequence[Budget], found: Sequence[Draft]
    ) -> list[Budget]:
        self._clock.lookups += self._clock.lap()
        if self._only_looks_up:
            return [NO_BUDGET] * len(batch)
        rows = self._rows
        plan = self._lookups.plan(batch, found, rows)
        for row, (request, draft) in enumerate(zip(batch, found, strict=True)):
            self._found[request.key] = draft, plan.nodes.get(row, [])
        candidates = self._candidates(batch, plan)
        requests = [batch[row] for row in candidates]
        others = set(range(len(batch))).difference(candidates)
        self._trained.skip([batch[row] for row in sorted(others)])
        if not candidates:
            self._lookups.follow(batch, plan)
            self._clock.lap()
            return [NO_BUDGET] * len(batch)
        chosen = self._trained.budgets_beside(
            requests,
            rows,
            plan.expected(rows, left_out=candidates),
            plan.expected(rows),
            [bool(plan.nodes.get(row)) for row in candidates],
        )
        trained = [NO_BUDGET] * len(batch)
        for row, budget in zip(candidates, chosen, strict=True):
            trained[row] = budget
        drafting = [row for row, budget in enumerate(trained) if budget.chain]
        self._lookups.follow(batch, plan, left_out=drafting)
        if not drafting and not any(plan.nodes.values()):
            self._trained.rest_for(self._trained.idle_steps(requests), batch, rows)
        self._clock.lap()
        return trained

    def _candidates(self, batch: Sequence[Request], plan: LookupPlan) -> list[int]:
        """Rows of the requests whose lookup is worth less than a trained draft."""
        if len(batch) == 1 and plan.nodes.get(0) and not self._trained.may_exceed(plan.gain):
            return []
        rows = [row for row in range(len(batch)) if plan.tokens.get(row, 0.0) < self._best_trained]
        if len(batch) == 1 or not any(plan.nodes.values()):
            return rows
        gains = self._trained.gains(batch, self._rows, plan.node_cost)
        return [row for row in rows if not plan.nodes.get(row) or gains[row] > plan.gains[row]]

    def trim(self, batch: Sequence[Request], drafts: Sequence[Draft], rows: int) -> list[Draft]:
        if self._only_looks_up:
            return self._lookups.trim(batch, drafts, rows)
        self._clock.trained += self._clock.lap()
        trimmed, trained = list(drafts), list[int]()
        for row, (request, draft) in enumerate(zip(batch, drafts, strict=True)):
            found, nodes = self._found.get(request.key, (None, []))
            if draft is found:
                trimmed[row] = draft.only(nodes)
            elif draft.tree.num_drafted:
                trained.append(row)
        if not trained:
            return trimmed
        whole = self._trained.trees and all(can_be_cut(drafts[row]) for row in trained)
        offers, planned = list[Offer](), self._trained.planned
        for row in trained:
            draft = with_claims(drafts[row]) if whole else drafts[row]
            self._drafts[batch[row].key] = draft
            if draft.features:
                of_draft = offers_of(path_probs(draft, self._rates.of), row)
                offers += [o for o in of_draft if whole or is_graft(draft.features[o.place - 1])]
        beside = replace(self._trained.beside, seconds=planned.seconds) if whole else planned
        trimmed = without_losses(trimmed, offers, beside, self.costs, rows)
        self._clock.trained += self._clock.lap()
        return trimmed

    # After a step

    def observe(self, outcomes: Sequence[Outcome], draft_seconds: float) -> None:
        self._lookups.observe(outcomes, self._clock.lookups)
        if self._only_looks_up:
            return
        self._clock.lap()
        trained: list[Outcome] = []
        proposals: dict[int, Draft] = {}
        for outcome in outcomes:
            if draft := self._drafts.get(outcome.request.key):
                told = [node for node, feature in enumerate(draft.features, 1) if feature]
                self._rates.learn(draft.only(told), outcome)
                proposals[outcome.request.key] = trained_part(draft)
                trained.append(without_grafts(outcome))
        self._clock.trained += self._clock.lap()
        # The drafter's learning is left out: it must see every step, whether it drafts or not.
        self._trained.learn(trained, self._clock.trained, proposals)

    def release(self, request: Request) -> None:
        self._lookups.release(request)
        self._trained.release(request)
        super().release(request)
