"""The interface of controllers, which decide how much to draft and when to stop.

A controller gives every request a budget before a step and learns from the step's outcome. It
changes how much is drafted and never the distribution of the output. Under the rule `coupled` all
controllers give the same output, provided that bits do not depend on the number of nodes
(invariant 7).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from tokenleap.core.config import Config
from tokenleap.runtime.costs import CostCurve

if TYPE_CHECKING:
    from tokenleap.core.tree import Draft
    from tokenleap.decode import Outcome
    from tokenleap.request import Request

__all__ = ["NO_BUDGET", "Budget", "Controller", "Expected"]


@dataclass(frozen=True)
class Budget:
    """Limits of one draft.

    Args:
        nodes: largest number of drafted nodes.
        depth: largest depth of a drafted node; a chain of n tokens has depth n.
        min_token_prob: draft nothing below a token to which the drafter gave a smaller probability.
            The token itself stays: no node is dropped for its value (invariant 2).
        min_path_prob: the same for the product of the probabilities along the path.

    Under the rule `coupled`, drafters with a model take the clarity of a drawn token for its
    probability: how clearly the noise decides for it (`drafters.drawing`). It may be near 1 where q
    is small. A cascade takes q.
    """

    nodes: int
    depth: int
    min_token_prob: float = 0.0
    min_path_prob: float = 0.0

    @property
    def chain(self) -> int:
        """Length of the longest chain that fits."""
        return max(0, min(self.nodes, self.depth))

    def stops_below(self, token_prob: float, path_prob: float) -> bool:
        """Whether to draft nothing below a token with these probabilities."""
        return token_prob < self.min_token_prob or path_prob < self.min_path_prob


NO_BUDGET = Budget(0, 0)
"""Nothing is to be drafted."""


@dataclass(frozen=True)
class Expected:
    """What a step is expected to bring and to cost.

    Args:
        tokens: committed tokens of all its requests.
        positions: nodes that the pass verifies, roots included.
        seconds: time of drafting.
    """

    tokens: float
    positions: float
    seconds: float = 0.0

    @staticmethod
    def plain(rows: int) -> Expected:
        """A step without drafts."""
        return Expected(rows, rows)

    def rate(self, costs: CostCurve, rows: int) -> float:
        """Tokens per second in a pass over this many rows."""
        return self.tokens / (self.seconds + costs(self.positions, rows))


class Controller(ABC):
    """Decides before each step how much to draft, and learns from the outcome.

    Args:
        num_speculative_tokens: the draft length the user asked for. A controller may take it as a
            constant, a start or a limit.
        options: the controller's own options.
        costs: the cost of a pass by its number of positions. All controllers of a target share it.
            It is measured before the first controller that declares `needs_costs` runs.
        levels: number of nodes at each level of a full draft, as far as known beforehand, if the
            drafter drafts trees; None for chains.
        at_once: whether one pass of the drafter makes all levels (see `Drafter.drafts_at_once`).
        stops_early: whether its chains can end below improbable tokens (see `Drafter.stops_early`).
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
        *,
        at_once: bool = False,
        stops_early: bool = False,
    ) -> None:
        self.num_speculative_tokens = num_speculative_tokens
        self.options = self.Options() if options is None else options
        self.costs = CostCurve() if costs is None else costs
        self.levels, self.at_once, self.stops_early = levels, at_once, stops_early
        self.setup()

    def setup(self) -> None:  # noqa: B027
        """Create the controller's own state; the default has none."""

    @abstractmethod
    def budgets(self, batch: Sequence[Request], rows: int) -> list[Budget]:
        """One budget per request, never deeper than the request may still use.

        Args:
            batch: this controller's requests.
            rows: number of requests in the whole step, those of other controllers included.
        """

    def trim(self, batch: Sequence[Request], drafts: Sequence[Draft], rows: int) -> list[Draft]:
        """Cut drafts before they are verified; the default keeps them whole.

        Unless the rule ignores q, only deterministic tokens may be cut. Dropping a sampled token
        for its value would change the output's distribution (invariant 2).
        """
        return list(drafts)

    def observe(self, outcomes: Sequence[Outcome], draft_seconds: float) -> None:  # noqa: B027
        """Learn from the step's outcomes; the default learns nothing.

        The pass's duration is already in `costs`: `Speculation` reports it to the curve.

        Args:
            outcomes: those of this controller's requests.
            draft_seconds: time their drafter took to propose and to learn from the outcomes, in
                this process. Before it decides by them, or by times of its own, a controller gives
                them to `costs.agreed`.
        """

    def release(self, request: Request) -> None:  # noqa: B027
        """Forget a request that has ended; the default keeps nothing."""


def within(request: Request, length: int) -> Budget:
    """A budget of `length` tokens, cut where the output must end.

    A path of depth d yields d + 1 tokens. So the depth is at most one less than the number of
    tokens that the request may still generate.
    """
    return Budget(length, max(0, min(length, request.remaining - 1)))
