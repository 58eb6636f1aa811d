"""`horizontal_cascade`: better drafters for early positions, cheaper ones for later positions.

The horizontal cascade of Chen et al., "Cascade Speculative Drafting for Even Faster LLM Inference".
A late token of a draft is useful only if all tokens before it are accepted, so it should cost less.
Each drafter continues the chain of the drafters before it. The q of a token is that of the drafter
that drew it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isnan

from torch import Tensor

from tokenleap.control import Budget
from tokenleap.core.distribution import Distribution
from tokenleap.core.tree import Draft, chain
from tokenleap.decode import Outcome, StepTimes
from tokenleap.drafters.base import Drafter
from tokenleap.drafters.options.combined import HorizontalOptions
from tokenleap.errors import CompatibilityError
from tokenleap.request import Request

__all__ = ["HorizontalCascade", "HorizontalOptions"]


@dataclass
class _Chain:
    """The chain drafted for one request so far."""

    request: Request
    budget: Budget
    tokens: list[int] = field(default_factory=list)
    distributions: list[Distribution] = field(default_factory=list)
    path_prob: float = 1.0
    stopped: bool = False

    def rest(self, max_tokens: int) -> Budget:
        """The budget of the next drafter, for at most `max_tokens` tokens."""
        left = self.budget.chain - len(self.tokens)
        length = 0 if self.stopped else min(left, max_tokens)
        min_path_prob = self.budget.min_path_prob / self.path_prob if self.path_prob else 0.0
        return replace(self.budget, nodes=length, depth=length, min_path_prob=min_path_prob)

    def add(self, draft: Draft) -> None:
        """Append a drafter's chain."""
        self.tokens += draft.tree.tokens[1:]
        self.distributions += draft.q
        for token_prob in _token_probs(draft):
            self.path_prob *= token_prob
            self.stopped = self.budget.stops_below(token_prob, self.path_prob)

    def draft(self) -> Draft:
        return Draft(chain([self.request.root, *self.tokens]), tuple(self.distributions))


def _token_probs(draft: Draft) -> list[float]:
    """The probability of each token of a chain, by which its drafter decides where to stop."""
    drafted = list(zip(draft.q, draft.tree.tokens[1:], strict=True))
    if not draft.path_probs:
        return [q.prob(token) for q, token in drafted]
    above, probs = 1.0, []
    for (q, token), below in zip(drafted, draft.path_probs, strict=True):
        if isnan(below):  # of an appended token, only q is known
            probs.append(q.prob(token))
        else:
            probs.append(below / above if above else 0.0)
        above = below
    return probs


class HorizontalCascade(Drafter):
    """Chains that the first drafter begins and the next ones continue.

    Args:
        drafters: the drafters in order of position.
        options: see `HorizontalOptions`.

    Raises:
        CompatibilityError: a drafter proposes trees, or a drafter after the first one reads the
            target's KV or hidden states, which end with the committed tokens.
    """

    def __init__(self, drafters: Sequence[Drafter], options: HorizontalOptions) -> None:
        for index, drafter in enumerate(drafters):
            method = options.drafters[index]["method"]
            if drafter.drafts_trees:
                raise CompatibilityError(
                    f"a horizontal cascade joins chains, and drafter '{method}' proposes trees."
                )
            if index and drafter.reads_target_kv:
                raise CompatibilityError(
                    f"'{method}' drafts from the target's own KV, which ends with the committed "
                    "tokens: in a horizontal cascade it can only come first."
                )
        self.reads_target_kv = drafters[0].reads_target_kv
        if any(drafter.hidden_layers for drafter in drafters[1:]):
            raise CompatibilityError(
                "a drafter that reads hidden states, which end with the committed tokens, can only "
                "come first in a horizontal cascade."
            )
        self.hidden_layers = drafters[0].hidden_layers
        self.quotes_references = any(drafter.quotes_references for drafter in drafters)
        self.follows_prediction = any(drafter.follows_prediction for drafter in drafters)
        self._stages = [_Stage(*pair) for pair in zip(drafters, options.tokens, strict=True)]

    def propose(self, batch: Sequence[Request], budgets: Sequence[Budget]) -> list[Draft]:
        """One chain per request; the drafters extend it in turn."""
        chains = [_Chain(*pair) for pair in zip(batch, budgets, strict=True)]
        for lane, stage in enumerate(self._stages):
            stage.extend(chains, lane)
        return [drafted.draft() for drafted in chains]

    def observe(self, outcomes: Sequence[Outcome], times: StepTimes) -> None:
        """Every drafter sees the outcomes of the requests that it has drafted for."""
        for stage in self._stages:
            stage.observe(outcomes, times)

    def observe_prefill(self, request: Request, start: int, hidden: Mapping[int, Tensor]) -> None:
        """Show the hidden states to the first drafter, the only one that may need them."""
        self._stages[0].observe_prefill(request, start, hidden)

    def rewind(self, request: Request) -> None:
        """Nothing to do: `_Stage.extend` rewinds a drafter whose tokens differ from the text."""

    def release(self, request: Request) -> None:
        """Every drafter forgets the request."""
        for stage in self._stages:
            stage.release(request)

    def forget(self) -> None:
        """Every drafter forgets earlier requests."""
        for stage in self._stages:
            stage.forget()

    def ignore_times(self) -> None:
        """No drafter decides by the clock."""
        for stage in self._stages:
            stage.ignore_times()


class _Stage:
    """One drafter of the cascade, and for each request the tokens that it was shown last.

    Args:
        drafter: the drafter.
        max_tokens: most tokens that it adds to a chain.
    """

    def __init__(self, drafter: Drafter, max_tokens: int) -> None:
        self._drafter = drafter
        self._max_tokens = max_tokens
        self._seen: dict[int, list[int]] = {}

    def extend(self, chains: Sequence[_Chain], lane: int) -> None:
        """Extend the chains whose budget allows it; `lane` is the number of this stage."""
        budgets = [drafted.rest(self._max_tokens) for drafted in chains]
        growing = [pair for pair in zip(chains, budgets, strict=True) if pair[1].chain]
        if not growing:
            return
        # As in an ensemble, each stage has its own noise: a position may be drafted by one stage in
        # this step and by another one in a later step.
        shown = [
            drafted.request.extended(drafted.tokens, drafted.request.noise.in_lane(lane))
            for drafted, _ in growing
        ]
        for request in shown:
            seen = self._seen.get(request.key, [])
            if request.token_ids[: len(seen)] != seen:
                self._drafter.rewind(request)
            self._seen[request.key] = request.token_ids
        drafts = self._drafter.propose(shown, [budget for _, budget in growing])
        for (drafted, _), draft in zip(growing, drafts, strict=True):
            drafted.add(draft)

    def observe(self, outcomes: Sequence[Outcome], times: StepTimes) -> None:
        if self._drafter.hidden_layers:  # it needs all outcomes
            for outcome in outcomes:
                self._seen.setdefault(outcome.request.key, [])  # so that `release` reaches it
        else:
            outcomes = [outcome for outcome in outcomes if outcome.request.key in self._seen]
        if outcomes:
            self._drafter.observe(outcomes, times)

    def observe_prefill(self, request: Request, start: int, hidden: Mapping[int, Tensor]) -> None:
        self._seen.setdefault(request.key, [])  # so that `release` reaches the drafter
        self._drafter.observe_prefill(request, start, hidden)

    def release(self, request: Request) -> None:
        if self._seen.pop(request.key, None) is not None:
            self._drafter.release(request)

    def forget(self) -> None:
        self._drafter.forget()

    def ignore_times(self) -> None:
        self._drafter.ignore_times()
