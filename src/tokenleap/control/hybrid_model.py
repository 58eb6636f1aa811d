"""`cost_model` for drafters that have a lookup and a trained draft: see `drafters/hybrid.py`.

In every step and for every request, one of three is verified: the lookup, a trained draft, or
nothing. `LookupModel` estimates what the lookups are worth after they were made, and `CostModel`
what trained drafts are worth before they are made. Both count expected tokens per second of
measured time, so their estimates can be compared:

1. Look up, and plan the step without trained drafts (`LookupModel.plan`).
2. The requests whose lookup is worth less than a trained draft are candidates. Plan the step in
   which they have trained drafts and the others keep their lookups (`CostModel.budgets_beside`).
3. Take the better plan of the two.

A trained draft may contain the beginning of the lookup. The rest of the lookup is then appended to
it, as far as that pays. How often such tokens are right is learnt by their features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from tokenleap.control.base import NO_BUDGET, Budget, Controller, Expected
from tokenleap.control.cost_model import CostModel
from tokenleap.control.evidence import AcceptanceRates, is_graft, path_probs
from tokenleap.control.lookup_model import LookupModel, LookupPlan, how_many
from tokenleap.control.rest import Rest
from tokenleap.core import clock
from tokenleap.core.acceptance import Accepted

if TYPE_CHECKING:
    from tokenleap.core.tree import Draft
    from tokenleap.decode import Outcome
    from tokenleap.request import Request

__all__ = ["HybridModel"]


_BEST_RATE = 0.8
"""No trained draft is compared with a lookup that expects more tokens than this acceptance rate
would give."""


_MOST_ROWS = 4
"""Most requests of a step in which trained drafts are considered. With 8 on two cores, a pass is
bound by computing: trained drafts then cost more than they bring (docs/results.md)."""


_LONGEST_REST = 15
"""Most steps in a row in which nothing is planned, because nothing paid in the step before: a plan
takes a few percent of a pass."""


@dataclass
class _Clock:
    """Seconds of this step's lookups and trained drafts, from one call of a method to the next."""

    lookups: float = 0.0
    trained: float = 0.0
    since: float = 0.0

    def lap(self) -> float:
        """Seconds since the last lap."""
        now = clock.now()
        seconds, self.since = now - self.since, now
        return seconds


class HybridModel(Controller):
    """Lookups of at most `num_speculative_tokens` tokens, or trained drafts of at most `levels`."""

    class Options(CostModel.Options):
        """See `CostModel.Options`."""

    name: ClassVar[str] = CostModel.name
    summary: ClassVar[str] = CostModel.summary
    needs_costs: ClassVar[bool] = True

    def setup(self) -> None:
        """See `Controller.setup`."""
        levels = self.levels or [1] * self.num_speculative_tokens
        self._lookups = LookupModel(self.num_speculative_tokens, self.options, self.costs)
        self._trained = CostModel(
            sum(levels),
            self.options,
            self.costs,
            levels,
            at_once=self.at_once,
            stops_early=self.stops_early,
        )
        self._trained.patient = True  # in the meantime there are lookups
        self._best_trained = sum(_BEST_RATE**level for level in range(1, len(levels) + 1))
        self._rates = AcceptanceRates()  # of looked-up tokens in trained drafts
        self._rows = 1
        self._found: dict[int, tuple[Draft, list[int]]] = {}  # key -> lookup, nodes that pay
        self._drafts: dict[int, Draft] = {}  # key -> trained draft, before grafts were cut
        self._clock = _Clock()
        self._rest = Rest()
        self._resting = False  # whether this step is one of a rest

    # Before a step

    def budgets(self, batch: Sequence[Request], rows: int) -> list[Budget]:
        """See `Controller.budgets`: those of the lookups."""
        self._resting = self._goes_on_resting(batch, rows)
        if self._resting:
            return [NO_BUDGET] * len(batch)
        self._rows, self._found, self._drafts = rows, {}, {}
        budgets = self._lookups.budgets(batch, rows)
        self._clock = _Clock(since=clock.now())
        return budgets

    def _goes_on_resting(self, batch: Sequence[Request], rows: int) -> bool:
        rest = self._rest
        if rest.goes_on(batch, rows):
            return True
        if rest.taken:
            self._lookups.rest(rest.taken)
            self._trained.rest(rest.waiting, rest.taken)
        self._rest = Rest()
        return False

    def choose(
        self, batch: Sequence[Request], budgets: Sequence[Budget], found: Sequence[Draft]
    ) -> list[Budget]:
        """See `drafters.hybrid.Chooser`."""
        if self._resting:
            return list(budgets)
        self._clock.lookups += self._clock.lap()
        rows = self._rows
        plan = self._lookups.plan(batch, found, rows)
        for row, (request, draft) in enumerate(zip(batch, found, strict=True)):
            self._found[request.key] = draft, plan.nodes.get(row, [])
        candidates = self._candidates(batch, plan)
        requests = [batch[row] for row in candidates]
        others = set(range(len(batch))).difference(candidates)
        self._trained.skip([batch[row] for row in sorted(others)])
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
        if not drafting:
            idle = min(self._lookups.idle_steps(), self._trained.idle_steps(requests))
            keys = tuple(request.key for request in batch)
            self._rest = Rest(keys, rows, requests, min(idle, _LONGEST_REST))
        self._clock.lap()
        return trained

    def _candidates(self, batch: Sequence[Request], plan: LookupPlan) -> list[int]:
        """Rows of the requests whose lookup is worth less than a trained draft."""
        if self._rows > _MOST_ROWS:
            return []
        rows = [row for row in range(len(batch)) if plan.tokens.get(row, 0.0) < self._best_trained]
        if len(batch) == 1 or not any(plan.nodes.values()):
            return rows
        gains = self._trained.gains(batch, self._rows, plan.node_cost)
        return [row for row in rows if not plan.nodes.get(row) or gains[row] > plan.gains[row]]

    def trim(self, batch: Sequence[Request], drafts: Sequence[Draft], rows: int) -> list[Draft]:
        """See `Controller.trim`: cuts lookups, and what was appended to trained drafts."""
        if self._resting:
            return list(drafts)
        self._clock.trained += self._clock.lap()
        trimmed = list(drafts)
        grafts: list[tuple[float, int, int]] = []  # probability, place in the batch, node
        for place, (request, draft) in enumerate(zip(batch, drafts, strict=True)):
            found, nodes = self._found.get(request.key, (None, []))
            if draft is found:
                trimmed[place] = draft.only(nodes)
            elif draft.tree.num_drafted:
                self._drafts[request.key] = draft
                grafts += [(p, place, node) for node, p in self._grafts(draft)]
        if grafts:
            self._cut_grafts(trimmed, grafts, rows)
        return trimmed

    def _grafts(self, draft: Draft) -> list[tuple[int, float]]:
        """The looked-up nodes that are not in the trained draft, with their path probabilities."""
        if not draft.features:
            return []
        probs = path_probs(draft, self._rates.of)
        return [
            (node, p)
            for node, (p, feature) in enumerate(zip(probs, draft.features, strict=True), 1)
            if is_graft(feature)
        ]

    def _cut_grafts(
        self, drafts: list[Draft], grafts: list[tuple[float, int, int]], rows: int
    ) -> None:
        """Keep the most probable grafts, as many as pay."""
        grafts.sort(key=lambda graft: -graft[0])
        positions = rows + sum(draft.tree.num_drafted for draft in drafts) - len(grafts)
        planned = self._trained.planned
        beside = Expected(planned.tokens, positions, planned.seconds)
        count, _ = how_many([p for p, _, _ in grafts], self.costs, rows, beside)
        cut: dict[int, set[int]] = {}
        for _, place, node in grafts[count:]:
            cut.setdefault(place, set()).add(node)
        for place, nodes in cut.items():
            draft = drafts[place]
            kept = [node for node in range(1, len(draft.tree)) if node not in nodes]
            drafts[place] = draft.only(kept)

    # After a step

    def observe(self, outcomes: Sequence[Outcome], draft_seconds: float) -> None:
        """Learn which lookups and which levels of trained drafts were right, and their costs."""
        if self._resting:
            return
        self._lookups.observe(outcomes, self._clock.lookups)
        trained = []
        for outcome in outcomes:
            if draft := self._drafts.get(outcome.request.key):
                if draft.features:
                    self._rates.learn(_looked_up(draft), outcome)
                trained.append(_without_grafts(outcome))
        # Its learning is left out: it must see every step, whether it drafts or not.
        self._trained.observe(trained, self._clock.trained)

    def release(self, request: Request) -> None:
        """Forget the request; what was learnt from its drafts stays."""
        self._lookups.release(request)
        self._trained.release(request)
        self._found.pop(request.key, None)
        self._drafts.pop(request.key, None)


def _looked_up(draft: Draft) -> Draft:
    """The nodes of a trained draft with grafts that the lookup proposed."""
    return draft.only([node for node, feature in enumerate(draft.features, 1) if feature])


def _without_grafts(outcome: Outcome) -> Outcome:
    """What became of the trained draft alone."""
    draft, accepted = outcome.draft, outcome.accepted
    kept = [node for node, f in enumerate(draft.features, 1) if not is_graft(f)]
    if len(kept) == len(draft.features):
        return outcome
    last = kept[-1] if kept else 0
    path = tuple(node for node in accepted.path if node <= last)
    rejected = tuple(node for node in accepted.rejected if node <= last)
    token = accepted.token
    if len(path) < len(accepted.path):
        token = draft.tree.tokens[accepted.path[len(path)]]
    reason = accepted.reason if rejected else ""
    return replace(
        outcome, draft=draft.only(kept), accepted=Accepted(path, token, rejected, reason)
    )
