"""The log-probability of a given output under a model: what a lossy rule costs in p.

The output is fed through the library's own loop. A drafter drafts the given tokens, and a rule
keeps whatever was drafted, so encoder-decoders, quantized weights and long outputs need no code of
their own here.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import ClassVar

from tokenleap.control import Budget
from tokenleap.core.acceptance.base import AcceptanceRule, Accepted, TargetDistributions
from tokenleap.core.noise import StepNoise
from tokenleap.core.params import SamplingParams
from tokenleap.core.tree import Draft, chain
from tokenleap.drafters.base import Drafter
from tokenleap.llm import LLM
from tokenleap.request import Request

__all__ = ["mean_logprob"]

CHUNK = 32
"""Tokens per pass."""


class _GivenOutput(Drafter):
    """Drafts the tokens of a given output."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._token_ids = list(token_ids)

    def propose(self, batch: Sequence[Request], budgets: Sequence[Budget]) -> list[Draft]:
        return [self._draft(*each) for each in zip(batch, budgets, strict=True)]

    def _draft(self, request: Request, budget: Budget) -> Draft:
        begin = len(request.output_ids)
        drafted = self._token_ids[begin : begin + budget.chain]
        return Draft.deterministic(chain([request.root, *drafted]))


class _KeepAll(AcceptanceRule):
    """Keeps every drafted token; the last of them is the token after the path."""

    name: ClassVar[str] = "keep_all"
    lossless: ClassVar[bool] = False
    takes_trees: ClassVar[bool] = False

    def __init__(self, last: int) -> None:
        super().__init__()
        self._last = last

    def accept(self, draft: Draft, p: TargetDistributions, noise: StepNoise) -> Accepted:
        drafted = draft.tree.num_drafted
        if not drafted:  # no room for a draft before the last token
            return Accepted((), self._last)
        return Accepted(tuple(range(1, drafted)), draft.tree.tokens[drafted])


def mean_logprob(llm: LLM, prompt: Sequence[int], token_ids: Sequence[int]) -> float:
    """Mean log-probability of an output's tokens, in nats, at temperature 1 without truncation."""
    params = SamplingParams(temperature=0, max_tokens=len(token_ids), logprobs=0, ignore_eos=True)
    config = {
        "method": _GivenOutput(token_ids),
        "acceptance": _KeepAll(token_ids[-1]),
        "controller": "fixed",
        "num_speculative_tokens": CHUNK,
    }
    (output,) = llm.generate([list(prompt)], params, speculative_config=config)
    assert output.token_ids == tuple(token_ids)
    assert output.logprobs is not None
    return fmean(each.logprob for each in output.logprobs)
