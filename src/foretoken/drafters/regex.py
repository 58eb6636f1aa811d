"""`regex`: under a grammar, whatever is forced next is proposed for free.

Keys, quotes and punctuation of a JSON schema, the fixed parts of a regular expression, the rest of
a choice that can no longer be another: no model is needed to guess them. The grammar is that of the
request's own `structured_outputs`, whose mask makes sure that p agrees. For requests without any,
the drafter may be given a form that the output is merely expected to have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from foretoken.control import Budget
from foretoken.core.grammar import Grammar, Grammars
from foretoken.core.params import Structured
from foretoken.core.tree import Draft, chain
from foretoken.drafters.base import Drafter, DrafterOptions
from foretoken.request import Request

__all__ = ["RegexDrafter", "RegexOptions"]


class RegexOptions(DrafterOptions):
    """Options of `regex`.

    Args:
        expected: the form that outputs without `structured_outputs` are expected to have, given
            as these are; drafting ends where an output leaves it. None drafts nothing for them.
    """

    expected: Structured | None = None


class RegexDrafter(Drafter):
    """Deterministic: q is one-hot. Proposes nothing where there is a choice.

    Args:
        options: see `RegexOptions`.
        grammars: compiles `expected` for the target's tokens.
    """

    def __init__(self, options: RegexOptions, grammars: Grammars) -> None:
        form = options.expected
        assert not isinstance(form, Mapping), "the validator made it `StructuredOutputs`"
        self._expected = None if form is None else grammars.compile(form)

    def propose(self, batch: Sequence[Request], budgets: Sequence[Budget]) -> list[Draft]:
        """Chains of what is forced."""
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
        # One grammar serves all requests without their own: it goes to where it is asked.
        return self._expected if request.sampler.grammar is None else request.sampler.grammar
