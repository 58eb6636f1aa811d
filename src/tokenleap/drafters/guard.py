"""`Guard`: calls drafters so that a failure affects only the request it was for.

A drafter affects the speed and not the quality of the output. So if one fails for a request, that
request continues without drafts (invariant 3), and `Metrics.drafter_failure` says why. Only a slab
without room (`SlabFull`) is no failure of a drafter.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from torch import Tensor

from tokenleap.control import Budget
from tokenleap.core.distribution import Distribution
from tokenleap.core.tree import Draft
from tokenleap.decode import Outcome, StepTimes
from tokenleap.drafters.base import Drafter
from tokenleap.errors import in_one_line
from tokenleap.request import Request
from tokenleap.runtime.kv_slab import SlabFull

__all__ = ["Guard"]

_log = logging.getLogger(__name__)


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
        if drafter.looks_up and not any(budget.nodes for budget in budgets):
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
        if not drafter.drafts_trees and not tree.is_chain:
            raise ValueError("the draft is a tree, and the drafter's `drafts_trees` is False")
        if not 0 <= min(tokens) <= max(tokens) < max(vocab_size, drafter.token_limit):
            raise ValueError(f"the draft has token ids outside the vocabulary of {vocab_size}")
        # Other sequences make their distributions when they are read.
        if isinstance(draft.q, tuple | list) and not all(
            isinstance(q, Distribution) for q in draft.q
        ):
            raise TypeError("the draft's q must be of type Distribution")
