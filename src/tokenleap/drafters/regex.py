"""`regex`: proposes the tokens that a grammar forces, at no cost.

Examples are the keys, quotes and punctuation of a JSON schema, the fixed parts of a regular
expression, and the rest of a choice when only one choice is left. The grammar is the one of the
request's own `structured_outputs`; its mask gives these tokens p = 1. For requests without one, the
option `expected` names a form that the output probably has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tokenleap.control import Budget
from tokenleap.core.grammar import Grammar, Grammars
from tokenleap.core.tree import Draft, chain
from tokenleap.drafters.base import Drafter
from tokenleap.drafters.options.lookups import RegexOptions
from tokenleap.request import Request

__all__ = ["RegexDrafter", "RegexOptions"]


class RegexDrafter(Drafter):
    """Chains of forced tokens; q is one-hot. It proposes nothing where there is a choice.

    Args:
        options: see `RegexOptions`.
        grammars: compiles `expected` for the target's tokens.
    """

    def __init__(self, options: RegexOptions, grammars: Grammars) -> None:
        form = options.expected
        assert not isinstance(form, Mapping), "the validator converts it"
        self._expected = None if form is None else grammars.compile(form)

    def propose(self, batch: Sequence[Request], budgets: Sequence[Budget]) -> list[Draft]:
        """Chains of the tokens that the grammar forces."""
        return [
            self._propose(request, budget) for request, budget in zip(batch, budgets, strict=True)
        ]

    def _propose(self, request: Request, budget: Budget) -> Draft:
        grammar = self._grammar(request)
        if grammar is None or budget.chain < 1:
            return Draft.empty(request.root)
        forced = grammar.forced(request.output_ids)[: budget.chain]
        return Draft.deterministic(chain([request.root, *forced]))

    def _grammar(self, request: Request) -> Grammar | None:
        # One grammar serves all requests without their own: it moves to the output it is given.
        return self._expected if request.sampler.grammar is None else request.sampler.grammar
