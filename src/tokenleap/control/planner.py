"""The best step, given what drafts are expected to bring and to cost; for `cost_model`.

What a step may verify is offered in pieces: a level of a draft that is yet to be made, or a token
that was looked up. `best_plan` takes as many as give the batch the most expected tokens per second.
Everything here is a function of numbers. What they are estimated from is in `estimates.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import itemgetter, truediv
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from tokenleap.control.base import Budget

if TYPE_CHECKING:
    from tokenleap.core.tree import Draft
    from tokenleap.request import Request


Costs: TypeAlias = Callable[[float, int, float], float]
"""Seconds of a pass, by its positions, its rows, and the most positions of a row: `CostCurve`."""


@dataclass(frozen=True)
class Expected:
    """Expected tokens and costs of a step.

    Args:
        tokens: committed tokens of all its requests.
        positions: nodes that the pass verifies, roots included.
        seconds: time of drafting.
        longest: most positions of one of them.
    """

    tokens: float
    positions: float
    seconds: float = 0.0
    longest: float = 1.0

    @staticmethod
    def plain(rows: int) -> Expected:
        return Expected(rows, rows)

    def rate(self, costs: Costs, rows: int) -> float:
        """Tokens per second in a pass over this many rows."""
        return self.tokens / (self.seconds + self.verifying(costs, rows))

    def verifying(self, costs: Costs, rows: int) -> float:
        """Seconds of that pass."""
        return costs(self.positions, rows, self.longest)


class Offer(NamedTuple):
    """Nodes that a step may verify; their parents are in an earlier offer of the same row.

    Attributes:
        worth: expected tokens per node, at most that of the parents' offer.
        positions: expected number of nodes.
        place: the row's level (from 0), or its node.
        levels: time of drafting them, in first levels of one request; 0 if they are drafted.
        likely: probability that there is something to draft.
    """

    worth: float
    tokens: float
    positions: float
    row: int
    place: int
    levels: float = 0.0
    likely: float = 1.0


@dataclass(frozen=True)
class Plan:
    """The offers to take, and what the step is then expected to bring."""

    taken: Sequence[Offer]
    rate: float
    expected: Expected

    def depths(self, rows: int) -> list[int]:
        depths = [0] * rows
        for offer in self.taken:
            depths[offer.row] += 1
        return depths


def best_plan(
    offers: Iterable[Offer],
    beside: Expected,
    costs: Costs,
    rows: int,
    *,
    least: float = 0.0,
    per_level: float = 0.0,
) -> Plan:
    """Take offers in the order of their worth, as many as maximize the tokens per second.

    Args:
        offers: those of a row in the order of their levels or nodes.
        beside: the step without them.
        costs: time of a pass.
        rows: all rows of the pass.
        least: tokens per second that have to be exceeded; otherwise nothing is taken.
        per_level: seconds of drafting the first level of one request.
    """
    ranked = sorted(offers, key=itemgetter(0), reverse=True)  # stable: no offer before its parents
    tokens, positions, drafting = beside.tokens, beside.positions, beside.seconds
    longest, of_row = beside.longest, dict[int, float]()
    levels = _DraftedLevels()
    rate, best, expected = least, 0, beside
    # Not by NumPy: for a few offers, its calls take several times as long.
    for count, offer in enumerate(ranked, 1):
        tokens += offer.tokens
        positions += offer.positions
        if per_level:
            drafting = beside.seconds + levels.seconds_with(offer, per_level)
        of_row[offer.row] = row = of_row.get(offer.row, 1.0) + offer.positions
        longest = max(longest, row)
        of_count = tokens / (drafting + costs(positions, rows, longest))
        if of_count > rate:
            rate, best, expected = of_count, count, Expected(tokens, positions, drafting, longest)
    return Plan(ranked[:best], rate, expected)


# Which nodes of drafts that are made to verify.


def worth_verifying(
    offers: Sequence[Offer], beside: Expected, costs: Costs, rows: int
) -> tuple[Plan, float]:
    """The drafted nodes that pay, and what each adds to the pass, in plain passes."""
    least = beside.rate(costs, rows)
    plan = best_plan(offers, beside, costs, rows, least=least)
    if not plan.taken:
        return plan, 0.0
    added = plan.expected.verifying(costs, rows) - beside.verifying(costs, rows)
    return plan, added / costs(rows, rows, 1.0) / len(plan.taken)


@dataclass(frozen=True)
class LookupPlan:
    """Which looked-up tokens of a step to verify.

    Args:
        nodes: row of the batch -> nodes of its draft to keep, for every request with a lookup.
        gains: row -> saving as a share of the time of a plain pass.
        node_cost: what each of these nodes adds to the pass, as a share of the same.
        gain: tokens per second over those without drafts.
    """

    nodes: dict[int, list[int]]
    tokens: dict[int, float]
    gains: dict[int, float]
    node_cost: float
    gain: float

    def expected(self, rows: int, left_out: Collection[int] = ()) -> Expected:
        """Expected tokens and costs of the step without the drafts of some rows."""
        kept = [row for row in self.nodes if row not in left_out]
        tokens = sum(self.tokens[row] for row in kept)
        nodes = [len(self.nodes[row]) for row in kept]
        return Expected(rows + tokens, rows + sum(nodes), longest=1 + max(nodes, default=0))


def can_be_cut(draft: Draft) -> bool:
    """Whether nodes may be left out for their probability, which is known: none was sampled."""
    return draft.is_one_hot and len(draft.path_probs) > 0


def offers_of(path_probs: Sequence[float], row: int) -> list[Offer]:
    """All nodes of a draft, by the probabilities of the paths down to them."""
    return [Offer(p, p, 1, row, node) for node, p in enumerate(path_probs, 1)]


def without_losses(
    drafts: Sequence[Draft],
    offers: Sequence[Offer],
    beside: Expected,
    costs: Costs,
    rows: int,
) -> list[Draft]:
    """The drafts without those of the offered nodes that do not pay.

    Args:
        beside: tokens and time of drafting of the step without these nodes.
    """
    trimmed = list(drafts)
    if not offers:
        return trimmed
    positions = rows + sum(draft.tree.num_drafted for draft in drafts) - len(offers)
    plan, _ = worth_verifying(offers, replace(beside, positions=positions), costs, rows)
    cut = {(offer.row, offer.place) for offer in offers}
    cut -= {(offer.row, offer.place) for offer in plan.taken}
    for row in {row for row, _ in cut}:
        draft = drafts[row]
        trimmed[row] = draft.only([n for n in range(1, len(draft.tree)) if (row, n) not in cut])
    return trimmed


# The time of drafts that are yet to be made.


_SHARED = 0.7
"""Part of the time of a level of one request that further requests of the same pass share. With an
EAGLE head, the levels of 8 requests take 3 times as long as those of one."""


def levels_of_one(deepest: float, drafted: float) -> float:
    """The cost of drafting, in levels of one request."""
    return _SHARED * deepest + (1 - _SHARED) * drafted


class _DraftedLevels:
    """The levels that a plan drafts, one offer after the other."""

    def __init__(self) -> None:
        self._upto: dict[int, float] = {}  # row -> time of its levels
        self._likely = self._deepest = self._all = 0.0

    def seconds_with(self, offer: Offer, per_level: float) -> float:
        """Add an offer; the time of all. P(any has a draft) is taken at its lower bound."""
        upto = self._upto[offer.row] = self._upto.get(offer.row, 0.0) + offer.levels
        self._likely, self._deepest = max(self._likely, offer.likely), max(self._deepest, upto)
        self._all += offer.levels
        return per_level * self._likely * levels_of_one(self._deepest, self._all)


@dataclass(frozen=True)
class Chances:
    """Expectations of the drafts of R requests with L levels.

    Args:
        drafts: [R] the probability that there is a draft at all.
        passed: [R, L] the probability that a level of a draft is accepted.
        nodes: [L] expected number of nodes.
        times: [L] time of drafting a level, in first levels of a draft.
    """

    drafts: Sequence[float]
    passed: Sequence[Sequence[float]]
    nodes: Sequence[float]
    times: Sequence[float]

    def offers(self) -> Iterable[Offer]:
        """The levels of all drafts."""
        for row, (has, of_row) in enumerate(zip(self.drafts, self.passed, strict=True)):
            # A level needs those above it, so it is worth no more than they are.
            worths = accumulate(map(truediv, of_row, self.nodes), min)
            levels = zip(worths, of_row, self.nodes, self.times, strict=True)
            for level, (worth, reached, nodes, time) in enumerate(levels):
                yield Offer(worth, has * reached, has * nodes, row, level, time, has)

    def gains(self, rows: int, node_cost: float, level_cost: float) -> list[float]:
        """For each request the saving of its best draft, if all of them share the drafting.

        Args:
            node_cost: what a node adds to a pass, as a share of the time of a plain pass.
        """
        requests = len(self.drafts)
        per_level = level_cost * levels_of_one(1.0, float(requests)) / requests
        gains = []
        for has, of_row in zip(self.drafts, self.passed, strict=True):
            levels = [
                has * (reached / rows - nodes * node_cost) - per_level * time
                for reached, nodes, time in zip(of_row, self.nodes, self.times, strict=True)
            ]
            gains.append(max(accumulate(levels)))
        return gains


@dataclass
class Rest:
    """Steps that are planned at once, because a plan takes time, too.

    They have no drafts, or drafts of the same `budgets`. It ends early if other requests are in the
    step.
    """

    keys: tuple[int, ...] = ()
    rows: int = 0
    steps: int = 0
    budgets: Sequence[Budget] = ()
    taken: int = 0

    @staticmethod
    def of(batch: Sequence[Request], rows: int, steps: int, budgets: Sequence[Budget] = ()) -> Rest:
        """Steps after one of this batch."""
        return Rest(tuple(request.key for request in batch), rows, steps, budgets)

    @property
    def waiting(self) -> tuple[int, ...]:
        """Keys of the requests that have no drafts in the meantime."""
        return () if self.budgets else self.keys

    def goes_on(self, batch: Sequence[Request], rows: int) -> bool:
        """Whether the step of this batch is another one of them; it is then counted.

        Without drafts, requests may have ended meanwhile.
        """
        if not self.steps:
            return False
        keys = tuple(request.key for request in batch)
        if self.budgets:
            same = rows == self.rows and keys == self.keys
        else:
            same = rows <= self.rows and set(self.keys).issuperset(keys)
        if not same:
            return False
        self.steps, self.taken = self.steps - 1, self.taken + 1
        return True
