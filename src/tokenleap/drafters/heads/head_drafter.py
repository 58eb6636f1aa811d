"""`HeadDrafter`: a drafting model that reads the target's hidden states of all committed tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from tokenleap.decode import Outcome, StepTimes
from tokenleap.drafters.model_drafter import ModelDrafter
from tokenleap.drafters.scorer import Scorer
from tokenleap.drafters.shapes import Shape
from tokenleap.drafters.tree_options import TreeOptions
from tokenleap.request import Request

__all__ = ["Head", "HeadDrafter"]


class Head(Scorer, Protocol):
    """A `Scorer` that is shown hidden states."""

    def keep(self, request: Request, start: int, hidden: Mapping[int, Tensor]) -> None:
        """Keep what is needed of the states of the committed tokens from `start` on.

        Args:
            request: the request.
            start: index of the first of n tokens.
            hidden: layer id -> [n, E] the target's hidden states.
        """
        ...

    def rewind(self, request: Request) -> None:
        """Forget what belongs to tokens that were taken back."""
        ...


class HeadDrafter(ModelDrafter):
    """Chains and trees from a trained head.

    Args:
        head: the head.
        layers: ids of the target's layers whose hidden states it reads.
        options, shape, coupled: see `ModelDrafter`.
    """

    _scorer: Head

    def __init__(
        self,
        head: Head,
        layers: Sequence[int],
        options: TreeOptions,
        shape: Shape,
        *,
        coupled: bool,
    ) -> None:
        super().__init__(head, options, shape, coupled=coupled)
        self.hidden_layers = tuple(sorted(layers))

    def observe_prefill(self, request: Request, start: int, hidden: Mapping[int, Tensor]) -> None:
        """See `Drafter.observe_prefill`."""
        self._scorer.keep(request, start, hidden)

    def observe(self, outcomes: Sequence[Outcome], times: StepTimes) -> None:
        """Take the hidden states of the committed nodes."""
        for outcome in outcomes:
            hidden, kept = outcome.hidden, len(outcome.committed)
            if kept <= len(outcome.accepted.path):  # the end of the output cut the accepted path
                hidden = {layer: states[:kept] for layer, states in hidden.items()}
            self._scorer.keep(outcome.request, outcome.root, hidden)

    def rewind(self, request: Request) -> None:
        """See `Drafter.rewind`."""
        self._scorer.rewind(request)
