"""A drafter of your own: it remembers which token followed which in all generated text.

    python examples/custom_drafter.py

It learns from every step, and drafts for each token the one that followed it last. The page
docs/extending.md explains the parts, and how to register such a drafter under a name.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from itertools import islice, pairwise

from tokenleap import LLM, SamplingParams
from tokenleap.control import Budget
from tokenleap.core.tree import Draft, chain
from tokenleap.decode import Outcome, StepTimes
from tokenleap.drafters.base import Drafter
from tokenleap.request import Request


class SuccessorDrafter(Drafter):
    """Chains of tokens that were not sampled: q is one-hot."""

    def __init__(self) -> None:
        self._successor: dict[int, int] = {}

    def propose(self, batch: Sequence[Request], budgets: Sequence[Budget]) -> list[Draft]:
        """One chain per request; it ends at a token without a known successor."""
        drafts = []
        for request, budget in zip(batch, budgets, strict=True):
            drafted = islice(self._after(request.root), budget.chain)
            drafts.append(Draft.deterministic(chain([request.root, *drafted])))
        return drafts

    def _after(self, token: int) -> Iterator[int]:
        while token in self._successor:
            token = self._successor[token]
            yield token

    def observe(self, outcomes: Sequence[Outcome], times: StepTimes) -> None:
        """Remember the successor of every committed token."""
        for outcome in outcomes:
            new = outcome.request.token_ids[-len(outcome.committed) - 1 :]
            self._successor.update(pairwise(new))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--max-tokens", type=int, default=60)
    options = parser.parse_args(arguments)

    llm = LLM(options.model)
    params = SamplingParams(temperature=0, max_tokens=options.max_tokens)
    prompt = "The twelve months are January, February, March,"
    plain = llm.generate(prompt, params)[0]
    config = {"method": SuccessorDrafter(), "num_speculative_tokens": 4}
    for attempt in ("first", "second"):  # the second time it has learnt the text
        out = llm.generate(prompt, params, speculative_config=config)[0]
        rate = out.metrics.acceptance_rate
        print(f"{attempt:>6} time: {out.metrics.target_passes} passes, {rate:.0%} accepted")
        assert out.token_ids == plain.token_ids
    print(plain.text)


if __name__ == "__main__":
    main()
