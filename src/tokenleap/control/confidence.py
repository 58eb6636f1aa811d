"""`confidence`: stop drafting below a token to which the drafter gave a low probability.

Each request has its own threshold on the probability of the token or of the path down to it. For a
token that was drawn under the rule `coupled`, a drafter with a model gives its clarity instead of q
(`Budget`). A draft with a rejected token raises the threshold, and one that was accepted whole
lowers it (Transformers' `assistant_confidence_threshold`). EAGLE-2 and Kangaroo use similar
criteria. Drafters without probabilities of their own, such as `ngram`, are never stopped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from annotated_types import Ge, Le

from tokenleap.control.base import Budget, Controller, within
from tokenleap.core.config import Config

if TYPE_CHECKING:
    from tokenleap.decode import Outcome
    from tokenleap.request import Request

__all__ = ["Confidence"]

LOWEST, HIGHEST = 0.01, 0.95


class Confidence(Controller):
    """Drafts up to `num_speculative_tokens`, fewer if a token falls under the threshold."""

    class Options(Config):
        """Options of `confidence`.

        Args:
            threshold: every request's initial threshold.
            of: compare the probability of the `token` or the product along the `path`.
            step: how much an outcome moves the threshold; 0 keeps it fixed.
        """

        threshold: Annotated[float, Ge(0), Le(1)] = 0.4
        of: Literal["token", "path"] = "token"
        step: Annotated[float, Ge(0), Le(1)] = 0.02

    name: ClassVar[str] = "confidence"
    summary: ClassVar[str] = "stops below a token that is less probable than an adaptive threshold"

    def setup(self) -> None:
        """See `Controller.setup`."""
        self._thresholds: dict[int, float] = {}

    def budgets(self, batch: Sequence[Request], rows: int) -> list[Budget]:
        """See `Controller.budgets`."""
        return [self._budget(request) for request in batch]

    def _budget(self, request: Request) -> Budget:
        assert isinstance(self.options, self.Options)
        threshold = self._thresholds.get(request.key, self.options.threshold)
        budget = within(request, self.num_speculative_tokens)
        if self.options.of == "path":
            return replace(budget, min_path_prob=threshold)
        return replace(budget, min_token_prob=threshold)

    def observe(self, outcomes: Sequence[Outcome], draft_seconds: float) -> None:
        """Move the threshold of every request that drafted."""
        assert isinstance(self.options, self.Options)
        for outcome in outcomes:
            if not outcome.draft.tree.num_drafted or not self.options.step:
                continue
            key = outcome.request.key
            threshold = self._thresholds.get(key, self.options.threshold)
            threshold += self.options.step if outcome.accepted.reason else -self.options.step
            self._thresholds[key] = min(HIGHEST, max(LOWEST, threshold))

    def release(self, request: Request) -> None:
        """Forget the request's threshold."""
        self._thresholds.pop(request.key, None)
