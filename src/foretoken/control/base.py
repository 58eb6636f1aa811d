"""The seam between the loop and the controllers: how much to draft, and when to stop.

A controller gives every request a budget before a step and learns from its outcome. It changes how
much is drafted and never the distribution of the output. Under the rule `coupled`, where bits do
not depend on the number of nodes, the output is the same under all controllers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from foretoken.core.config import Config
from foretoken.core.tree import Draft
from foretoken.decode import Outcome
from foretoken.request import Request
from foretoken.runtime.costs import CostCurve

__all__ = ["Budget", "Controller"]


@dataclass(frozen=True)
class Budget:
    """Limits of one draft.

    Args:
        nodes: most drafted nodes.
        depth: deepest drafted node; a chain has as many nodes as its depth.
        min_token_prob: draft nothing below a token that the drafter gave less probability. The
            token itself stays: by the drafting invariant no node is dropped for its value.
        min_path_prob: the same for the product of probabilities along the path.
    """

    nodes: int
    depth: int
    min_token_prob: float = 0.0
    min_path_prob: float = 0.0

    @property
    def chain(self) -> int:
        """Longest chain that fits."""
        return max(0, min(self.nodes, self.depth))

    def stops_below(self, token_prob: float, path_prob: float) -> bool:
        """Whether nothing should be drafted below a token of these probabilities."""
        return token_prob < self.min_token_prob or path_prob < self.min_path_prob


class Controller(ABC):
    """Decides before each step, learns after it.

    Args:
        num_speculative_tokens: the draft length the user asked for; what it means to a controller
            is its own business (a constant, a start, a limit).
        options: the controller's own options.
        costs: what a pass costs by number of positions; shared by the controllers of a target that
            declare `needs_costs`, and measured for them at first.
        levels: nodes at each level of a full draft, as far as they are known beforehand, of a
            drafter of trees; None for chains.
    """

    class Options(Config):
        """The controller's own options."""

    name: ClassVar[str]
    summary: ClassVar[str]
    needs_costs: ClassVar[bool] = False
    """Whether it chooses by the cost of target passes."""

    def __init__(
        self,
        num_speculative_tokens: int,
        options: Config | None = None,
        costs: CostCurve | None = None,
        levels: Sequence[int] | None = None,
    ) -> None:
        self.num_speculative_tokens = num_speculative_tokens
        self.options = self.Options() if options is None else options
        self.costs = CostCurve() if costs is None else costs
        self.levels = levels
        self.setup()

    def setup(self) -> None:  # noqa: B027
        """Make the controller's own state; some have none."""

    @abstractmethod
    def budgets(self, batch: Sequence[Request], rows: int) -> list[Budget]:
        """One budget per request, never deeper than the request may still use.

        Args:
            batch: the requests that are this controller's.
            rows: of the whole step: these requests, and those of other controllers.
        """

    def trim(self, batch: Sequence[Request], drafts: Sequence[Draft], rows: int) -> list[Draft]:
        """The part of the drafts that is verified; most controllers limit drafts by `budgets` only.

        Only deterministic tokens may be cut, unless the rule does not read q: dropping a sampled
        token for its value would change the output's distribution (invariant 2).
        """
        return list(drafts)

    def observe(self, outcomes: Sequence[Outcome], draft_seconds: float) -> None:  # noqa: B027
        """Learn from what the step brought; some learn nothing.

        What the pass took is in `costs` by now: who runs the step tells the curve.

        Args:
            outcomes: of this controller's requests.
            draft_seconds: what their drafter took to propose, and to learn from the outcomes.
        """

    def release(self, request: Request) -> None:  # noqa: B027
        """Forget a request that has ended; some keep nothing."""


def within(request: Request, length: int) -> Budget:
    """A budget of `length` tokens, cut where the output must end.

    A path of depth d yields d + 1 tokens, so that it need not be deeper than one less than may
    still be generated.
    """
    return Budget(length, max(0, min(length, request.remaining - 1)))
