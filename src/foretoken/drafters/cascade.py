"""`cascade`: the draft model is itself accelerated by a drafter, to any depth.

Spector and Ré, "Accelerating LLM Inference with Staged Speculative Decoding"; the vertical cascade
of Chen et al., "Cascade Speculative Drafting". The draft model is called the middle model here. It
drafts by running `decode.step` with itself as the target and an inner drafter. The inner rule is
lossless, so the drafted tokens have exactly the middle model's distribution. That distribution is
the q of the outer rule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from foretoken.control.base import Budget, within
from foretoken.core.acceptance.base import AcceptanceRule
from foretoken.core.common_prefix import common_prefix
from foretoken.core.distribution import Distribution
from foretoken.core.tree import Draft, chain
from foretoken.decode import Outcome, StepTimes, step
from foretoken.drafters.admission import most_tokens, open_row, rows_that_fit
from foretoken.drafters.base import Drafter
from foretoken.drafters.options.combined import CascadeOptions
from foretoken.request import Request
from foretoken.runtime.target import Target

__all__ = ["Cascade", "CascadeOptions"]


@dataclass(frozen=True)
class _InnerSpeculation:
    """The drafting side of the middle model's steps (see `decode.Speculates`).

    Args:
        drafter: drafts for the middle model.
        length: its draft length, in tokens.
        acceptance: the inner rule, which must be lossless.
    """

    drafter: Drafter
    length: int
    acceptance: AcceptanceRule

    def draft(self, batch: Sequence[Request]) -> list[Draft]:
        """Draft with the same length in every step."""
        return self.drafter.propose(batch, [within(request, self.length) for request in batch])

    def rule(self, _: Request) -> AcceptanceRule:
        """The inner rule, for all requests."""
        return self.acceptance

    def hidden_layers(self, _: Sequence[Request]) -> tuple[int, ...]:
        """Layers of the middle model whose hidden states the inner drafter needs."""
        return self.drafter.hidden_layers

    def observe(self, outcomes: Sequence[Outcome], times: StepTimes) -> float:
        """The inner drafter learns. The outer step measures the time of the whole cascade."""
        self.drafter.observe(outcomes, times)
        return 0.0


class Cascade(Drafter):
    """Chains drawn from a middle model, which an inner drafter accelerates.

    Args:
        model: the middle model.
        drafter: the inner drafter.
        rule: the inner acceptance rule. It must be lossless, else q would not be the distribution
            the tokens were drawn from.
        options: see `CascadeOptions`.
        coupled: whether to draw with the target's own noise.
    """

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
        """Run inner steps until every request has its draft length."""
        lengths = self._lengths(batch, budgets)
        inner = {r.key: self._catch_up(r) for r in batch if lengths[r.key]}
        distributions: dict[int, list[Distribution]] = {key: [] for key in inner}
        while drafting := [key for key in inner if len(distributions[key]) < lengths[key]]:
            self._advance({key: inner[key] for key in drafting}, distributions)
        return [
            self._draft(request, budget, inner.get(request.key), distributions)
            for request, budget in zip(batch, budgets, strict=True)
        ]

    def _lengths(self, batch: Sequence[Request], budgets: Sequence[Budget]) -> dict[int, int]:
        """Request key -> tokens to draft; 0 if the middle model's context or memory is full.

        They are also 0 if the source is too long for the middle model's encoder.
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
        return {key: length if key in admitted else 0 for key, length in lengths.items()}

    def _advance(
        self, inner: Mapping[int, Request], distributions: dict[int, list[Distribution]]
    ) -> None:
        keys = {request.key: key for key, request in inner.items()}
        for outcome in step(self._model, self._speculation, list(inner.values())):
            key = keys[outcome.request.key]
            distributions[key] += [outcome.p[node] for node in (0, *outcome.accepted.path)]
        for request in inner.values():
            if request.failure is not None:
                raise request.failure

    def _draft(
        self,
        request: Request,
        budget: Budget,
        inner: Request | None,
        distributions: Mapping[int, list[Distribution]],
    ) -> Draft:
        """The tokens that the middle model generated, up to the budget's limits."""
        if inner is None:
            return Draft.empty(request.root)
        tokens: list[int] = []
        path_prob = 1.0
        generated = inner.token_ids[len(request.token_ids) :]
        for token, distribution in zip(generated, distributions[request.key], strict=False):
            tokens.append(token)
            token_prob = distribution.prob(token)
            path_prob *= token_prob
            if len(tokens) == budget.chain or budget.stops_below(token_prob, path_prob):
                break
        return Draft(
            chain([request.root, *tokens]), tuple(distributions[request.key][: len(tokens)])
        )

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
