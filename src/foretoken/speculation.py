"""`Speculation`: who drafts for which request, how much, and which rule accepts.

It routes every request of a batch to its strategy (drafter, controller, acceptance rule), so that
requests with different ones share a pass. Drafters cannot change the output, only how soon it
comes; so a drafter that fails is no reason to fail a request, let alone its neighbours: the request
goes on without drafts (invariant 3), and `Metrics.drafter_failure` says why.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from foretoken.control import Budget, Controller
from foretoken.core.acceptance.base import AcceptanceRule
from foretoken.core.tree import Draft
from foretoken.decode import Outcome, StepTimes
from foretoken.drafters.base import Drafter, layers_of
from foretoken.errors import CompatibilityError
from foretoken.request import Request
from foretoken.runtime.slab_buffers import SlabFull

__all__ = ["Speculation", "Strategy"]

NOT_FAULTS = (AssertionError, SlabFull)
"""Our own mistakes must come to light; and where drafting fills the slab, the engine makes room."""


@dataclass(frozen=True)
class Strategy:
    """How a request speculates.

    Args:
        drafter: proposes.
        controller: says how much.
        rule: says what is kept.

    Raises:
        CompatibilityError: the rule does not fit the drafter (invariant 5).
    """

    drafter: Drafter
    controller: Controller
    rule: AcceptanceRule

    def __post_init__(self) -> None:
        if not self.drafter.drafts_trees:  # chains fit every rule
            return
        name, drafter = self.rule.name, type(self.drafter).__name__
        if not self.rule.takes_trees:
            raise CompatibilityError(
                f"acceptance rule '{name}' takes chains only, and {drafter} proposes trees."
            )
        if self.rule.needs_independent_siblings and not self.drafter.independent_siblings:
            raise CompatibilityError(
                f"acceptance rule '{name}' takes siblings drawn independently only, and those of "
                f"{drafter} are not: draft chains, or trees with expansion "
                "'sample_with_replacement'."
            )


@dataclass(frozen=True)
class _Part:
    """The requests of a batch that share a strategy."""

    strategy: Strategy
    requests: list[Request]


class Speculation:
    """The strategies of all requests of a target (see `decode.Speculates`).

    Args:
        default: the strategy of requests that none was assigned to.
    """

    def __init__(self, default: Strategy) -> None:
        self.default = default
        self._assigned: dict[int, Strategy] = {}
        self._failed: set[int] = set()  # keys of requests whose drafter was given up
        self._seconds: dict[int, float] = {}  # of proposing in this step, by id of the strategy

    def assign(self, request: Request, strategy: Strategy) -> None:
        """Let this strategy serve the request until it is released."""
        if strategy is not self.default:
            self._assigned[request.key] = strategy

    def strategy(self, request: Request) -> Strategy:
        """The request's own, or the default."""
        return self._assigned.get(request.key, self.default)

    def rule(self, request: Request) -> AcceptanceRule:
        """See `decode.Speculates`."""
        return self.strategy(request).rule

    def release(self, request: Request) -> None:
        """Forget a request that has ended."""
        strategy = self.strategy(request)
        if request.key not in self._failed:
            self._release_drafter(strategy.drafter, request)
        strategy.controller.release(request)
        self._failed.discard(request.key)
        self._assigned.pop(request.key, None)

    # Before a step

    def draft(self, batch: Sequence[Request]) -> list[Draft]:
        """See `decode.Speculates`: each strategy drafts for its requests together."""
        self._seconds.clear()
        parts = self._parts(batch)
        if len(parts) == 1:
            return self._draft(parts[0], len(batch))
        drafts: dict[int, Draft] = {}
        for part in parts:
            made = self._draft(part, len(batch))
            drafts.update((r.key, draft) for r, draft in zip(part.requests, made, strict=True))
        return [drafts[request.key] for request in batch]

    def _draft(self, part: _Part, rows: int) -> list[Draft]:
        strategy, requests = part.strategy, part.requests
        budgets = strategy.controller.budgets(requests, rows)
        began = time.perf_counter()
        drafts = self._propose_to_healthy(strategy.drafter, requests, budgets)
        self._seconds[id(strategy)] = time.perf_counter() - began
        return strategy.controller.trim(requests, drafts, rows)

    def _propose_to_healthy(
        self, drafter: Drafter, requests: list[Request], budgets: Sequence[Budget]
    ) -> list[Draft]:
        """Drafts for requests whose drafter has not failed; empty ones for the others."""
        if not self._failed:
            return self._propose(drafter, requests, budgets)
        drafts = {request.key: Draft.empty(request.root) for request in requests}
        pairs = [p for p in zip(requests, budgets, strict=True) if p[0].key not in self._failed]
        if pairs:
            made = self._propose(drafter, [r for r, _ in pairs], [budget for _, budget in pairs])
            drafts.update((r.key, draft) for (r, _), draft in zip(pairs, made, strict=True))
        return [drafts[request.key] for request in requests]

    def _propose(
        self, drafter: Drafter, requests: Sequence[Request], budgets: Sequence[Budget]
    ) -> list[Draft]:
        """Their drafts; after a failure one by one, to find whose it was: that one has none."""
        if drafter.looks_up and not any(budget.nodes for budget in budgets):
            return [Draft.empty(request.root) for request in requests]
        try:
            drafts = drafter.propose(requests, budgets)
            _check(drafts, requests)
            return drafts
        except NOT_FAULTS:
            raise
        except Exception as error:
            if len(requests) == 1:
                self._give_up(drafter, requests[0], error)
                return [Draft.empty(requests[0].root)]
        pairs = zip(requests, budgets, strict=True)
        return [self._propose(drafter, [request], [budget])[0] for request, budget in pairs]

    # After a step

    def observe(self, outcomes: Sequence[Outcome], times: StepTimes) -> float:
        """See `decode.Speculates`: the cost curve, drafters and controllers learn."""
        parts = self._parts([outcome.request for outcome in outcomes])
        by_key = {outcome.request.key: outcome for outcome in outcomes}
        self._observe_costs(parts, outcomes, times.verify)
        learning = 0.0
        for part in parts:
            own = [by_key[request.key] for request in part.requests]
            began = time.perf_counter()
            self._show(part.strategy.drafter, own, times)
            seconds = time.perf_counter() - began
            learning += seconds
            proposing = self._seconds.get(id(part.strategy), 0.0)
            part.strategy.controller.observe(own, proposing + seconds)
        return learning

    def _observe_costs(
        self, parts: Sequence[_Part], outcomes: Sequence[Outcome], seconds: float
    ) -> None:
        """Show the pass to the cost curves that controllers choose by, once each."""
        controllers = [part.strategy.controller for part in parts]
        curves = {id(c.costs): c.costs for c in controllers if c.needs_costs}
        positions = sum(len(outcome.draft.tree) for outcome in outcomes)
        for curve in curves.values():
            curve.observe(positions, seconds, len(outcomes))

    def _show(self, drafter: Drafter, outcomes: Sequence[Outcome], times: StepTimes) -> None:
        """The drafter sees what came of its requests, but for those it failed for.

        After a failure one by one: it may then see an outcome twice, and learn badly.
        """
        if self._failed:
            outcomes = [o for o in outcomes if o.request.key not in self._failed]
        if not outcomes:
            return
        try:
            drafter.observe(outcomes, times)
            return
        except NOT_FAULTS:
            raise
        except Exception as error:
            if len(outcomes) == 1:
                self._give_up(drafter, outcomes[0].request, error)
                return
        for outcome in outcomes:
            self._show(drafter, [outcome], times)

    # Hidden states

    def hidden_layers(self, batch: Sequence[Request]) -> tuple[int, ...]:
        """See `decode.Speculates`: ascending; empty if no drafter asks."""
        return layers_of([self.strategy(request).drafter for request in batch])

    def observe_prefill(self, request: Request, start: int, hidden: Mapping[int, Tensor]) -> None:
        """Show a request's drafter the hidden states of prompt tokens (see `Drafter`)."""
        drafter = self.strategy(request).drafter
        if not hidden or request.key in self._failed:
            return
        try:
            drafter.observe_prefill(request, start, hidden)
        except NOT_FAULTS:
            raise
        except Exception as error:
            self._give_up(drafter, request, error)

    # Without drafts

    def plain(self) -> Plain:
        """The same without drafts, for a step in which there is no memory for them."""
        return Plain(self)

    def observe_plain(self, outcomes: Sequence[Outcome], times: StepTimes) -> float:
        """After a step without drafts: drafters see it; it is no measure for controllers."""
        began = time.perf_counter()
        by_key = {outcome.request.key: outcome for outcome in outcomes}
        for part in self._parts([outcome.request for outcome in outcomes]):
            self._show(part.strategy.drafter, [by_key[r.key] for r in part.requests], times)
        return time.perf_counter() - began

    # Inside

    def _parts(self, batch: Sequence[Request]) -> list[_Part]:
        """The requests of each strategy, in order."""
        if not self._assigned:
            return [_Part(self.default, list(batch))] if batch else []
        parts: dict[int, _Part] = {}
        for request in batch:
            strategy = self.strategy(request)
            parts.setdefault(id(strategy), _Part(strategy, [])).requests.append(request)
        return list(parts.values())

    def _give_up(self, drafter: Drafter, request: Request, error: Exception) -> None:
        """No more drafts for this request."""
        self._failed.add(request.key)
        request.metrics.drafter_failure = _in_one_line(error)
        self._release_drafter(drafter, request)

    def _release_drafter(self, drafter: Drafter, request: Request) -> None:
        try:
            drafter.release(request)
        except AssertionError:
            raise
        except Exception as error:
            if request.metrics.drafter_failure is None:
                request.metrics.drafter_failure = _in_one_line(error)


@dataclass(frozen=True)
class Plain:
    """Steps without drafts under the same rules (see `decode.Speculates`)."""

    speculation: Speculation

    def draft(self, batch: Sequence[Request]) -> list[Draft]:
        """Nothing for anyone."""
        return [Draft.empty(request.root) for request in batch]

    def rule(self, request: Request) -> AcceptanceRule:
        """The request's own."""
        return self.speculation.rule(request)

    def hidden_layers(self, batch: Sequence[Request]) -> tuple[int, ...]:
        """As with drafts: drafters have the hidden states of all committed tokens."""
        return self.speculation.hidden_layers(batch)

    def observe(self, outcomes: Sequence[Outcome], times: StepTimes) -> float:
        """See `Speculation.observe_plain`."""
        return self.speculation.observe_plain(outcomes, times)


def _check(drafts: Sequence[Draft], requests: Sequence[Request]) -> None:
    """Refuse what would make a pass fail, or read outside of the embedding."""
    if len(drafts) != len(requests):
        raise ValueError(f"{len(drafts)} drafts for {len(requests)} requests")
    for draft, request in zip(drafts, requests, strict=True):
        tokens, vocab_size = draft.tree.tokens, request.sampler.vocab_size
        if tokens[0] != request.root:
            raise ValueError(f"the draft's root is token {tokens[0]}, not {request.root}")
        if not 0 <= min(tokens) <= max(tokens) < vocab_size:
            raise ValueError(f"the draft has token ids outside the vocabulary of {vocab_size}")


def _in_one_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
