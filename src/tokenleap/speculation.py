"""`Speculation`: who drafts for which request, how much, and which rule accepts.

Each request has a strategy (drafter, controller, acceptance rule), and requests with different
strategies share a pass. A drafter that fails affects only the request it failed for
(`drafters/guard.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from torch import Tensor

from tokenleap.control import Budget, Controller
from tokenleap.core import clock
from tokenleap.core.acceptance.base import AcceptanceRule
from tokenleap.core.distribution import Distribution
from tokenleap.core.tree import Draft
from tokenleap.decode import Outcome, StepTimes
from tokenleap.drafters.base import Drafter, layers_of
from tokenleap.drafters.online import Learner
from tokenleap.drafters.shapes import MAX_NODES
from tokenleap.errors import CompatibilityError, in_one_line
from tokenleap.request import Request
from tokenleap.runtime.kv_slab import SlabFull

_log = logging.getLogger(__name__)

_MOST_LOGITS = 2**26
"""Most logits of the drafted nodes of a step (256 MB): with many rows, drafts are shorter."""


class Guard:
    """Calls drafters, and remembers for which requests one has failed.

    Attributes:
        failed: keys of requests whose drafter failed, until they are released.
    """

    def __init__(self) -> None:
        self.failed: set[int] = set()

    def propose(
        self, drafter: Drafter, requests: Sequence[Request], budgets: Sequence[Budget]
    ) -> list[Draft]:
        """Propose for all; after a failure for each request alone, to find the one that fails."""
        if drafter.traits.looks_up and not any(budget.nodes for budget in budgets):
            return [request.undrafted() for request in requests]
        try:
            drafts = drafter.propose(requests, budgets)
            _check(drafter, drafts, requests)
            return drafts
        except SlabFull:  # the scheduler makes room in the slab
            raise
        except Exception as error:
            if len(requests) == 1:
                self.give_up(drafter, requests[0], error)
                return [requests[0].undrafted()]
        pairs = zip(requests, budgets, strict=True)
        return [self.propose(drafter, [request], [budget])[0] for request, budget in pairs]

    def observe(self, drafter: Drafter, outcomes: Sequence[Outcome], times: StepTimes) -> None:
        """Show a drafter the outcomes of its requests.

        After a failure it is shown them one by one, to find the request that fails. It may then see
        an outcome twice, which makes only its drafts worse.
        """
        try:
            drafter.observe(outcomes, times)
            return
        except Exception as error:
            if len(outcomes) == 1:
                self.give_up(drafter, outcomes[0].request, error)
                return
        for outcome in outcomes:
            self.observe(drafter, [outcome], times)

    def observe_prefill(
        self, drafter: Drafter, request: Request, start: int, hidden: Mapping[int, Tensor]
    ) -> None:
        """Show a drafter the hidden states of prompt tokens."""
        try:
            drafter.observe_prefill(request, start, hidden)
        except Exception as error:
            self.give_up(drafter, request, error)

    def release(self, drafter: Drafter, request: Request) -> None:
        """Let a drafter forget a request, unless it has failed for it and so has forgotten it."""
        if request.key not in self.failed:
            self._release(drafter, request)
        self.failed.discard(request.key)

    def give_up(self, drafter: Drafter, request: Request, error: Exception) -> None:
        """Stop drafting for this request."""
        self.failed.add(request.key)
        failure = request.metrics.drafter_failure = in_one_line(error)
        _log.warning("a drafter failed, and its request goes on without drafts: %s", failure)
        self._release(drafter, request)

    def _release(self, drafter: Drafter, request: Request) -> None:
        try:
            drafter.release(request)
        except Exception as error:
            if request.metrics.drafter_failure is None:
                request.metrics.drafter_failure = in_one_line(error)


def _check(drafter: Drafter, drafts: Sequence[Draft], requests: Sequence[Request]) -> None:
    """Refuse drafts that would make the pass or the rule fail, or index outside the embedding."""
    if len(drafts) != len(requests):
        raise ValueError(f"{len(drafts)} drafts for {len(requests)} requests")
    for draft, request in zip(drafts, requests, strict=True):
        if not isinstance(draft, Draft):
            raise TypeError(f"a draft is a Draft, not {type(draft).__name__}")
        tree, vocab_size = draft.tree, request.sampler.vocab_size
        tokens = tree.tokens
        if not {*map(type, tokens), *map(type, tree.parents)} <= {int}:
            raise TypeError("the draft's token ids and parents must be of type int")
        if tokens[0] != request.root:
            raise ValueError(f"the draft's root is token {tokens[0]}, not {request.root}")
        if not drafter.traits.drafts_trees and not tree.is_chain:
            raise ValueError("the draft is a tree, and the drafter's `drafts_trees` is False")
        if not 0 <= min(tokens) <= max(tokens) < max(vocab_size, drafter.traits.token_limit):
            raise ValueError(f"the draft has token ids outside the vocabulary of {vocab_size}")
        # Other sequences make their distributions when they are read.
        if isinstance(draft.q, tuple | list) and not all(
            isinstance(q, Distribution) for q in draft.q
        ):
            raise TypeError("the draft's q must be of type Distribution")


@dataclass(frozen=True, eq=False)
class Strategy:
    """How a request speculates.

    Args:
        drafter: proposes tokens.
        controller: decides how many.
        rule: decides which are accepted.
        learner: teaches the drafter while it serves; None if it does not learn.

    Raises:
        CompatibilityError: the rule does not fit the drafter (invariant 5).
    """

    drafter: Drafter
    controller: Controller
    rule: AcceptanceRule
    learner: Learner | None = None

    def __post_init__(self) -> None:
        if not self.drafter.traits.drafts_trees:  # chains fit every rule
            return
        name, drafter = self.rule.name, type(self.drafter).__name__
        if not self.rule.takes_trees:
            raise CompatibilityError(
                f"acceptance rule '{name}' takes chains only, and {drafter} proposes "
                "trees: choose another rule, or make the drafter draft chains."
            )
        if self.rule.needs_independent_siblings and not self.drafter.traits.independent_siblings:
            raise CompatibilityError(
                f"acceptance rule '{name}' needs siblings that are drawn independently, and those "
                f"of {drafter} are not: draft chains, or trees with expansion "
                "'sample_with_replacement'."
            )

    def forget(self) -> None:
        """Forget what was learnt from earlier outputs."""
        self.drafter.forget()
        if self.learner is not None:
            self.learner.forget()


class Speculation:
    """The strategies of all requests of a target (see `decode.Speculates`).

    Args:
        default: the strategy of requests without one of their own.
    """

    def __init__(self, default: Strategy) -> None:
        self.default = default
        self._drafts = True  # whether steps have drafts
        self._assigned: dict[int, Strategy] = {}
        self._guard = Guard()
        self._seconds: dict[int, float] = {}  # id of a strategy -> proposing, this step
        self._rows = 0  # requests of this step
        self._learners: dict[int, Learner] = {}  # of the last step, by their id

    def assign(self, request: Request, strategy: Strategy) -> None:
        """Use this strategy for the request until it is released."""
        if strategy is not self.default:
            self._assigned[request.key] = strategy

    def strategy(self, request: Request) -> Strategy:
        """The strategy assigned to the request, or the default."""
        return self._assigned.get(request.key, self.default)

    def rule(self, request: Request) -> AcceptanceRule:
        """A request's acceptance rule."""
        return self.strategy(request).rule

    def release(self, request: Request) -> None:
        """Forget a request that has ended."""
        strategy = self.strategy(request)
        self._guard.release(strategy.drafter, request)
        if strategy.learner is not None:
            strategy.learner.release(request)
        strategy.controller.release(request)
        self._assigned.pop(request.key, None)

    # Before a step

    def draft(self, batch: Sequence[Request]) -> list[Draft]:
        """See `decode.Speculates`: each strategy drafts for its requests together."""
        self._seconds.clear()
        self._rows = len(batch)
        groups = self._groups(batch) if self._drafts else []
        if len(groups) == 1 and len(groups[0][1]) == len(batch):
            return self._draft(*groups[0])
        drafts = {request.key: request.undrafted() for request in batch}
        for strategy, requests in groups:
            made = self._draft(strategy, requests)
            drafts.update((r.key, draft) for r, draft in zip(requests, made, strict=True))
        return [drafts[request.key] for request in batch]

    @contextmanager
    def without_drafts(self) -> Iterator[None]:
        """Steps in here have no drafts. Drafters miss no hidden state that they need."""
        self._drafts = False
        try:
            yield
        finally:
            self._drafts = True

    def _draft(self, strategy: Strategy, requests: Sequence[Request]) -> list[Draft]:
        budgets = strategy.controller.budgets(requests, self._rows)
        if strategy.controller.resting:
            return [request.undrafted() for request in requests]
        most = max(MAX_NODES, _MOST_LOGITS // requests[0].sampler.vocab_size) // self._rows
        if max(budget.nodes for budget in budgets) > most:
            budgets = [replace(budget, nodes=min(budget.nodes, most)) for budget in budgets]
        began = clock.now()
        drafts = self._guard.propose(strategy.drafter, requests, budgets)
        self._seconds[id(strategy)] = clock.now() - began
        return strategy.controller.trim(requests, drafts, self._rows)

    # After a step

    def give_up(self, request: Request, error: Exception) -> None:
        """See `decode.Speculates`: what its drafter proposed could not be judged."""
        self._guard.give_up(self.strategy(request).drafter, request, error)

    def observe(self, outcomes: Sequence[Outcome], times: StepTimes) -> float:
        """See `decode.Speculates`: the cost curve, drafters and controllers learn."""
        groups = self._groups([outcome.request for outcome in outcomes])
        by_key = {outcome.request.key: outcome for outcome in outcomes}
        if self._drafts:
            self._observe_costs([each for each, _ in groups], outcomes, times.verify + times.accept)
        learning = 0.0
        for strategy, requests in groups:
            own, seconds = [by_key[request.key] for request in requests], 0.0
            if self._drafts or strategy.drafter.traits.hidden_layers:
                began = clock.now()
                self._guard.observe(strategy.drafter, own, times)
                seconds = clock.now() - began
                learning += seconds
            if self._drafts and not strategy.controller.resting:
                proposing = self._seconds.get(id(strategy), 0.0)
                strategy.controller.observe(own, proposing + seconds)
            self._teach(strategy, own)
        return learning

    def _observe_costs(
        self, strategies: Sequence[Strategy], outcomes: Sequence[Outcome], seconds: float
    ) -> None:
        """Add the pass to every cost curve that a controller of the batch uses.

        Acceptance belongs to it: it takes longer for more nodes, and for a small model this
        decides whether drafts pay. If a request failed after the pass, its nodes are unknown. The
        pass is then left out.
        """
        if len(outcomes) != self._rows:
            return
        controllers = [strategy.controller for strategy in strategies]
        curves = {id(c.costs): c.costs for c in controllers if c.needs_costs}
        nodes = [len(outcome.draft.tree) for outcome in outcomes]
        for curve in curves.values():
            if all(controller.resting for controller in controllers):
                curve.settle()
            else:
                curve.observe(sum(nodes), seconds, len(nodes), max(nodes))

    # Hidden states

    def hidden_layers(self, batch: Sequence[Request]) -> tuple[int, ...]:
        """See `decode.Speculates`: ascending; empty if no drafter asks."""
        return layers_of([strategy.drafter for strategy, _ in self._groups(batch)])

    def observe_prefill(self, request: Request, start: int, hidden: Mapping[int, Tensor]) -> None:
        """Show a request's drafter the hidden states of prompt tokens (see `Drafter`)."""
        if not hidden or request.key in self._guard.failed:
            return
        drafter, learner = self.strategy(request).drafter, self.strategy(request).learner
        self._guard.observe_prefill(drafter, request, start, hidden)
        if learner is not None:
            learner.observe_prefill(request, start, hidden)

    # Learning while serving

    def _teach(self, strategy: Strategy, outcomes: Sequence[Outcome]) -> None:
        """Show a step to the learner of a strategy."""
        if strategy.learner is not None:
            strategy.learner.observe(outcomes)
            self._learners[id(strategy.learner)] = strategy.learner

    def prefilled(self, request: Request) -> None:
        """A step computed prompt tokens of this request: its drafter may learn after it."""
        learner = self.strategy(request).learner
        if learner is not None and request.key not in self._guard.failed:
            self._learners[id(learner)] = learner

    def learn(self, seconds: float) -> None:
        """Between two steps: let the drafters learn whose requests the last step advanced.

        Args:
            seconds: how long it took.
        """
        learners, self._learners = list(self._learners.values()), {}
        for learner in learners:
            learner.work(seconds / len(learners))

    # Inside

    def _groups(self, batch: Sequence[Request]) -> list[tuple[Strategy, Sequence[Request]]]:
        """The requests by strategy, without those whose drafter has failed."""
        if not self._assigned and not self._guard.failed:
            return [(self.default, batch)] if batch else []
        groups: dict[Strategy, list[Request]] = {}
        for request in batch:
            if request.key not in self._guard.failed:
                groups.setdefault(self.strategy(request), []).append(request)
        return list(groups.items())
