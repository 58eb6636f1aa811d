"""Chains drawn from counted successors: what `ngram_table` and `corpus_ngram` share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from tokenleap.control import Budget
from tokenleap.core.distribution import Distribution
from tokenleap.core.tree import Draft, chain
from tokenleap.core.truncation import truncated
from tokenleap.drafters.base import Drafter
from tokenleap.drafters.options.lookups import CountedOptions
from tokenleap.request import Request

__all__ = ["CountedChains", "CountedOptions"]


class CountedChains(Drafter):
    """Chains whose q comes from counts.

    Args:
        options: see `CountedOptions`.
        coupled: whether to draw with the target's own noise.
        context_length: most tokens that `successors` reads.
    """

    def __init__(self, options: CountedOptions, *, coupled: bool, context_length: int) -> None:
        self._options = options
        self._coupled = coupled
        self._context_length = context_length

    @abstractmethod
    def successors(
        self, request: Request, context: Sequence[int], temperature: float
    ) -> Distribution | None:
        """The distribution of the next token; one-hot at temperature 0, None where there is none.

        Args:
            request: the request that is drafted for.
            context: the last tokens, drafted ones included.
            temperature: see `CountedOptions.draft_temperature`.
        """

    def propose(self, batch: Sequence[Request], budgets: Sequence[Budget]) -> list[Draft]:
        """Chains that end where nothing is known to follow."""
        return [
            self._propose(request, budget) for request, budget in zip(batch, budgets, strict=True)
        ]

    def _propose(self, request: Request, budget: Budget) -> Draft:
        temperature = self._temperature(request)
        noise = request.noise.at(len(request.token_ids)).drafting(coupled=self._coupled)
        context = request.token_ids[-self._context_length :]
        tokens, distributions, path_prob = [request.root], [], 1.0
        for depth in range(budget.chain):
            found = self.successors(request, context, temperature)
            if found is None:
                break
            distributions.append(self._truncated(found))
            tokens.append(noise.draw(distributions[-1], depth))
            token_prob = distributions[-1].prob(tokens[-1])
            path_prob *= token_prob
            if budget.stops_below(token_prob, path_prob):
                break
            context = [*context[1 - self._context_length :], tokens[-1]]
        return Draft(chain(tokens), tuple(distributions))

    def _truncated(self, found: Distribution) -> Distribution:
        top_k, top_p = self._options.draft_top_k, self._options.draft_top_p
        if found.certain is not None or (top_k is None and top_p is None):
            return found
        return truncated(found, top_k or 0, 1.0 if top_p is None else top_p)

    def _temperature(self, request: Request) -> float:
        if self._options.draft_temperature is None:
            return 0.0 if request.params.greedy else 1.0
        return self._options.draft_temperature
