"""`cascade`: the draft model is itself accelerated by a drafter, to any depth.

Spector and Ré, "Accelerating LLM Inference with Staged Speculative Decoding"; the vertical cascade
of Chen et al., "Cascade Speculative Drafting". The middle model drafts by running the very same
`step()`, with itself as the target. As the inner rule is lossless, its tokens have exactly the
middle model's law, which is the q the outer rule is given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from annotated_types import Ge, Le

from foretoken.acceptance.base import AcceptanceRule
from foretoken.common_prefix import common_prefix
from foretoken.control import Budget, Fixed
from foretoken.drafters.base import Drafter, DrafterOptions
from foretoken.drafters.room import shared_out
from foretoken.law import Law
from foretoken.request import Request
from foretoken.target import Target
from foretoken.tree import Draft, chain

__all__ = ["Cascade", "CascadeOptions"]


class CascadeOptions(DrafterOptions):
    """Options of `cascade`.

    Args:
        drafter: configuration of the inner drafter: `method` and that method's own fields; it may
            be a cascade again.
        inner_num_speculative_tokens: most tokens the inner drafter proposes to the middle model.
    """

    drafter: Mapping[str, Any]
    inner_num_speculative_tokens: Annotated[int, Ge(1), Le(64)] = 3


class Cascade(Drafter):
    """Chains drawn from a middle model, which an inner drafter accelerates.

    Args:
        model: the middle model.
        drafter: the inner drafter.
        rule: the inner acceptance rule; must be lossless, or q would be wrong.
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
        self._model = model
        self._drafter = drafter
        self._rule = rule
        self._controller = Fixed(options.inner_num_speculative_tokens)
        self._coupled = coupled
        self._inner: dict[int, Request] = {}

    def propose(self, batch: Sequence[Request], budgets: Sequence[Budget]) -> list[Draft]:
        """Inner steps until every request has its tokens."""
        lengths = self._lengths(batch, budgets)
        inner = {r.key: self._catch_up(r) for r in batch if lengths[r.key]}
        laws: dict[int, list[Law]] = {key: [] for key in inner}
        while drafting := [key for key in inner if len(laws[key]) < lengths[key]]:
            self._advance({key: inner[key] for key in drafting}, laws)
        return [
            self._draft(request, budget, inner.get(request.key), laws)
            for request, budget in zip(batch, budgets, strict=True)
        ]

    def _lengths(self, batch: Sequence[Request], budgets: Sequence[Budget]) -> dict[int, int]:
        """Tokens to draft, by key; none where the middle model's context or memory is full."""
        lengths = {
            request.key: max(0, min(budget.chain, self._model.most_tokens - len(request.token_ids)))
            for request, budget in zip(batch, budgets, strict=True)
        }
        wanted = [request for request in batch if lengths[request.key]]
        ahead = max(lengths.values(), default=0) + self._controller.num_speculative_tokens
        most = self._model.most_tokens  # all that one row alone may have
        admitted, in_the_way = shared_out(
            self._model,
            {request.key: min(len(request.token_ids) + ahead, most) for request in wanted},
            {key: len(inner.token_ids) for key, inner in self._inner.items()},
        )
        for key in in_the_way:
            self._free(key)
        return {key: length if key in admitted else 0 for key, length in lengths.items()}

    def _advance(self, inner: Mapping[int, Request], laws: dict[int, list[Law]]) -> None:
        # The loop imports drafters; a drafter that runs the loop has to wait until it is there.
        from foretoken.decode import step

        outcomes = step(
            self._model, self._drafter, self._rule, self._controller, list(inner.values())
        )
        for key, outcome in zip(inner, outcomes, strict=True):
            laws[key] += [outcome.p[node] for node in (0, *outcome.accepted.path)]

    def _draft(
        self,
        request: Request,
        budget: Budget,
        inner: Request | None,
        laws: Mapping[int, list[Law]],
    ) -> Draft:
        """What the middle model generated, up to the budget or where it was not sure."""
        if inner is None:
            return Draft.empty(request.root)
        tokens: list[int] = []
        path_prob = 1.0
        generated = inner.token_ids[len(request.token_ids) :]
        for token, law in zip(generated, laws[request.key], strict=False):
            tokens.append(token)
            token_prob = law.prob(token)
            path_prob *= token_prob
            if len(tokens) == budget.chain or budget.stops_below(token_prob, path_prob):
                break
        return Draft(chain([request.root, *tokens]), tuple(laws[request.key][: len(tokens)]))

    def _catch_up(self, request: Request) -> Request:
        """The inner request with the committed tokens, its KV by law 1."""
        # Fresh noise in every step, unless the rule wants the target's own.
        position = len(request.token_ids)
        noise = request.noise if self._coupled else request.noise.derived(position)
        before = self._inner.get(request.key)
        key = None if before is None else before.key
        inner = request.shadow(noise, self._model.most_tokens, key)
        if before is None:
            self._model.add(inner.key)
            agreed = 0
        else:
            cached = before.token_ids[: self._model.cached(inner.key)]
            agreed = common_prefix(cached, inner.token_ids[:-1])
            if inner.token_ids[: len(before.token_ids)] != before.token_ids:
                self._drafter.rewind(inner)
        self._inner[request.key] = inner
        self._model.rollback(inner.key, agreed)
        self._model.prefill(inner.key, inner.token_ids[agreed:-1])
        return inner

    def rewind(self, request: Request) -> None:
        """Nothing to do: the inner request is compared with the committed tokens anyway."""

    def release(self, request: Request) -> None:
        """Free the inner request."""
        self._free(request.key)

    def forget(self) -> None:
        """The inner drafter forgets earlier requests."""
        self._drafter.forget()

    def _free(self, key: int) -> None:
        inner = self._inner.pop(key, None)
        if inner is not None:
            self._drafter.release(inner)
            self._model.remove(inner.key)
