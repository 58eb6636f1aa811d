"""`draft_model`: a second, smaller model with the same vocabulary guesses token by token.

Leviathan et al., "Fast Inference from Transformers via Speculative Decoding"; Chen et al.,
"Accelerating Large Language Model Decoding with Speculative Sampling". The model has its own KV
and draws under the request's own sampling parameters, so that q is as close to p as it can be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

from annotated_types import Ge
from pydantic import FiniteFloat
from torch import Tensor

from foretoken.config import Config
from foretoken.control import Budget
from foretoken.drafters.base import Drafter
from foretoken.law import Law
from foretoken.request import Request
from foretoken.target import Target
from foretoken.tree import Draft, chain

__all__ = ["DraftModelDrafter", "DraftModelOptions"]


class DraftModelOptions(Config):
    """Options of `draft_model`.

    Args:
        draft_temperature: temperature of the draft; None takes the request's. 0 drafts the argmax.
    """

    draft_temperature: Annotated[FiniteFloat, Ge(0)] | None = None


@dataclass
class _Row:
    """The draft being made for one request."""

    request: Request
    budget: Budget
    length: int
    pending: list[int]
    """Tokens whose KV the draft model lacks; the logits after the last one are wanted."""
    drafted: list[int] = field(default_factory=list)
    laws: list[Law] = field(default_factory=list)
    path_prob: float = 1.0

    def append(self, token: int, law: Law) -> None:
        """Draft a token, and end the draft below it if the budget says so."""
        self.drafted.append(token)
        self.laws.append(law)
        self.pending = [token]
        token_prob = law.prob(token)
        self.path_prob *= token_prob
        if self.budget.stops_below(token_prob, self.path_prob):
            self.length = len(self.drafted)


class DraftModelDrafter(Drafter):
    """Chains, sampled from the draft model for all requests of the batch together.

    Args:
        model: the draft model, with the target's vocabulary.
        options: see `DraftModelOptions`.
        coupled: whether to draw with the target's own noise.
    """

    def __init__(self, model: Target, options: DraftModelOptions, *, coupled: bool) -> None:
        self._model = model
        self._options = options
        self._coupled = coupled
        self._cached: dict[int, list[int]] = {}  # tokens whose KV the model holds

    def propose(self, batch: Sequence[Request], budgets: Sequence[Budget]) -> list[Draft]:
        """One pass of the draft model per drafted position, over all requests still drafting."""
        rows = [
            self._catch_up(request, budget)
            for request, budget in zip(batch, budgets, strict=True)
        ]
        while drafting := [row for row in rows if len(row.drafted) < row.length]:
            keys = [row.request.key for row in drafting]
            scores = self._model.verify(keys, [chain(row.pending) for row in drafting])
            for row, logits in zip(drafting, scores, strict=True):
                self._extend(row, logits)
        return [Draft(chain([r.request.root, *r.drafted]), tuple(r.laws)) for r in rows]

    def _catch_up(self, request: Request, budget: Budget) -> _Row:
        """Roll back what was not committed, compute what is new except the last token."""
        key, tokens = request.key, request.token_ids
        # The draft model's own context may be shorter than the target's.
        length = max(0, min(budget.chain, self._model.max_model_len - len(tokens)))
        if not length:
            return _Row(request, budget, 0, [])
        if key not in self._cached:
            self._model.add(key)
            self._cached[key] = []
        cached = self._cached[key]
        agreed = common_prefix(cached, tokens[:-1])
        self._model.rollback(key, agreed)
        self._cached[key] = tokens[:-1]
        if len(tokens) - 1 - agreed > 1:  # more than the token that an accepted draft leaves over
            self._model.prefill(key, tokens[agreed:-1])
            agreed = len(tokens) - 1
        return _Row(request, budget, length, tokens[agreed:])

    def _extend(self, row: _Row, logits: Tensor) -> None:
        """Commit what was just computed and draw the next token from it."""
        request, depth = row.request, len(row.drafted)
        self._model.commit(request.key, range(len(row.pending)))
        self._cached[request.key] = [*request.token_ids, *row.drafted]
        law = request.sampler.law(
            logits[-1], [*request.output_ids, *row.drafted], self._options.draft_temperature
        )
        noise = request.noise.at(len(request.token_ids)).drafting(coupled=self._coupled)
        row.append(noise.draw(law, depth), law)

    def release(self, request: Request) -> None:
        """Free the request's row."""
        if self._cached.pop(request.key, None) is not None:
            self._model.remove(request.key)


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    length = 0
    for a, b in zip(first, second, strict=False):
        if a != b:
            break
        length += 1
    return length
