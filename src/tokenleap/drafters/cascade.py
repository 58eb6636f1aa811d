"""`cascade`: the draft model is itself accelerated by a drafter, to any depth.

Spector and Ré, "Accelerating LLM Inference with Staged Speculative Decoding"; the vertical cascade
of Chen et al., "Cascade Speculative Drafting". The draft model is called the middle model here. It
drafts by running `decode.step` with itself as the target and an inner drafter. The inner rule is
lossless, so the drafted tokens have exactly the middle model's distribution. That distribution is
the q of the outer rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tokenleap.control.base import Budget, within
from tokenleap.core.acceptance.base import AcceptanceRule
from tokenleap.core.distribution import Distribution
from tokenleap.core.references import common_prefix
from tokenleap.core.tree import Draft, chain
from tokenleap.decode import Outcome, StepTimes, step
from tokenleap.drafters.base import Drafter
from tokenleap.drafters.draft_model import most_tokens, open_row, rows_that_fit
from tokenleap.drafters.options import CascadeOptions
from tokenleap.request import Request
from tokenleap.runtime.target import Target

__all__ = ["Cascade", "CascadeOptions"]


@dataclass(frozen=True)
class _InnerSpeculation:
    """The drafting side of the middle model's steps (see `decode.Speculates`)."""

    drafter: Drafter
    length: int
    acceptance: AcceptanceRule

    def draft(self, batch: Sequence[Request]) -> list[Draft]:
        """Draft with the same length in every step."""
        return self.drafter.propose(batch, [within(request, self.length) for request in batch])

    def rule(self, _: Request) -> AcceptanceRule:
        """The inner rule, for all requests."""
        return self.acceptance

    def give_up(self, _: Request, error: Exception) -> None:
        """A failure of the inner drafter is one of the cascade."""
        raise error

    def hidden_layers(self, _: Sequence[Request]) -> tuple[int, ...]:
        """Layers of the middle model whose hidden states the inner drafter needs."""
        return self.drafter.hidden_layers

    def observe(self, outcomes: Sequence[Outcome], times: StepTimes) -> float:
        """The inner drafter learns. The outer step measures the time of the whole cascade."""
        self.drafter.observe(outcomes, times)
        return 0.0


@dataclass
class _Chain:
    """What the middle model drafts for a request.

    Attributes:
        inner: the middle model's request; its tokens begin with the outer request's.
        budget: limits of the draft; its depth is as far as the middle model can go.
        tokens: drafted so far, and `q` and `path_probs` as in `Draft`. Those of greedy requests are
            probabilities at temperature 1, since q is one-hot. Those of sampled ones are q's, also
            under the rule `coupled`: clarity (`drafters.drawing`) takes a fifth of a level's time.
    """

    inner: Request
    root: int
    budget: Budget
    tokens: list[int] = field(default_factory=list)
    q: list[Distribution] = field(default_factory=list)
    path_probs: list[float] = field(default_factory=list)
    ended: bool = False

    def grow(self, outcome: Outcome) -> None:
        """Append what a step of the middle model has generated, up to the limits."""
        p, nodes = outcome.p, (0, *outcome.accepted.path)
        generated = self.inner.token_ids[self.root + 1 + len(self.tokens) :]
        for token, node in zip(generated, nodes, strict=False):
            surely = (p.untempered(node) if p.greedy else p[node]).prob(token)
            path_prob = surely * (self.path_probs[-1] if self.path_probs else 1.0)
            self.tokens.append(token)
            self.q.append(p[node])
            self.path_probs.append(path_prob)
            full = len(self.tokens) == self.budget.chain
            self.ended = full or self.budget.stops_below(surely, path_prob)
            if self.ended:
                break

    def draft(self) -> Draft:
        """The draft for the target."""
        tree = chain([self.inner.token_ids[self.root], *self.tokens])
        return Draft(tree, tuple(self.q), path_probs=tuple(self.path_probs))


class Cascade(Drafter):
    """Chains drawn from a middle model, which an inner drafter accelerates.

    Args:
        rule: the inner acceptance rule. It must be lossless, else q would not be the distribution
            the tokens were drawn from.
    """

    stops_early = True

    def __init__(
        self,
        model: Target,
        drafter: Drafter,
        rule: AcceptanceRule,
        options: CascadeOptions,
        *,
        coupled: bool,
    ) -> None:
        assert rule.lossless
        self.quotes_references = drafter.quotes_references
        self.follows_prediction = drafter.follows_prediction
        self._model = model
        self._drafter = drafter
        self._speculation = _InnerSpeculation(drafter, options.inner_num_speculative_tokens, rule)
        self._coupled = coupled
        self._inner: dict[int, Request] = {}  # outer key -> the middle model's request

    def propose(self, batch: Sequence[Request], budgets: Sequence[Budget]) -> list[Draft]:
        """Run inner steps until every request has its draft."""
        limits = self._limits(batch, budgets)
        chains = {
            request.key: _Chain(self._catch_up(request), len(request.token_ids) - 1, limit)
            for request, limit in zip(batch, limits, strict=True)
            if limit.chain
        }
        while drafting := [each for each in chains.values() if not each.ended]:
            self._advance(drafting)
        return [
            chains[request.key].draft() if request.key in chains else Draft.empty(request.root)
            for request in batch
        ]

    def _limits(self, batch: Sequence[Request], budgets: Sequence[Budget]) -> list[Budget]:
        """The budgets as far as the middle model's context goes; empty if its memory is full.

        They are also empty if the source is too long for the middle model's encoder.
        """
        most = {r.key: most_tokens(self._model, r.source) for r in batch}  # each row alone
        lengths = {
            request.key: max(0, min(budget.chain, most[request.key] - len(request.token_ids)))
            for request, budget in zip(batch, budgets, strict=True)
        }
        wanted = [request for request in batch if lengths[request.key]]
        ahead = max(lengths.values(), default=0) + self._speculation.length
        sources = {key: inner.source for key, inner in self._inner.items()}
        sources |= {request.key: request.source for request in wanted}
        admitted, to_free = rows_that_fit(
            self._model,
            {r.key: min(len(r.token_ids) + ahead, most[r.key]) for r in wanted},
            {key: len(inner.token_ids) for key, inner in self._inner.items()},
            {key: self._model.state_bytes(source) for key, source in sources.items()},
        )
        for key in to_free:
            self._free(key)
        return [
            replace(budget, depth=lengths[request.key] if request.key in admitted else 0)
            for request, budget in zip(batch, budgets, strict=True)
        ]

    def _advance(self, chains: Sequence[_Chain]) -> None:
        """One step of the middle model for these chains."""
        by_key = {each.inner.key: each for each in chains}
        outcomes = step(self._model, self._speculation, [each.inner for each in chains])
        for each in chains:
            if each.inner.failure is not None:
                raise each.inner.failure
        for outcome in outcomes:
            by_key[outcome.request.key].grow(outcome)

    def _catch_up(self, request: Request) -> Request:
        """The inner request, brought up to the committed tokens, with its KV (invariant 1)."""
        # New noise in every step, unless the outer rule couples the draft with the target.
        position = len(request.token_ids)
        noise = request.noise if self._coupled else request.noise.derived(position)
        before = self._inner.get(request.key)
        key = None if before is None else before.key
        inner = request.shadow(noise, self._model.most_tokens, key)
        if before is None:
            open_row(self._model, inner.key, inner.source)
            agreed = 0
        else:
            cached = before.token_ids[: self._model.cached(inner.key)]
            agreed = common_prefix(cached, inner.token_ids[:-1])
            if inner.token_ids[: len(before.token_ids)] != before.token_ids:
                self._drafter.rewind(inner)
                if self._drafter.hidden_layers:  # it is shown all of them anew
                    agreed = 0
        self._inner[request.key] = inner
        self._model.rollback(inner.key, agreed)
        layers = self._drafter.hidden_layers
        hidden = self._model.prefill(inner.key, inner.token_ids[agreed:-1], layers)
        if hidden:
            self._drafter.observe_prefill(inner, agreed, hidden)
        return inner

    def rewind(self, request: Request) -> None:
        """Nothing to do: `_catch_up` rolls the inner request back to the common prefix."""

    def release(self, request: Request) -> None:
        """Free the inner request and its KV; after a failure its numbers, which may be NaN, too."""
        inner = self._inner.get(request.key)
        if inner is not None:
            inner.fail_with(request)
            if inner.failed:
                self._model.wipe(inner.key)
        self._free(request.key)

    def forget(self) -> None:
        """The inner drafter forgets earlier requests."""
        self._drafter.forget()

    def ignore_times(self) -> None:
        """The inner drafter does not decide by the clock: its drafts may change the bits of q."""
        self._drafter.ignore_times()

    def _free(self, key: int) -> None:
        inner = self._inner.pop(key, None)
        if inner is not None:
            self._drafter.release(inner)
            self._model.remove(inner.key)
