"""The interface of controllers, which decide how much to draft and when to stop.

A controller gives every request a budget before a step and learns from the step's outcome. It
changes how much is drafted and never the distribution of the output. Under the rule `coupled` all
controllers give the same output, provided that bits do not depend on the number of nodes
(invariant 7).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from annotated_types import Ge, Le
from pydantic import field_validator
from typing_extensions import override

from tokenleap.core.config import Config
from tokenleap.core.per_request import PerRequest, drop_request
from tokenleap.runtime.costs import CostCurve

if TYPE_CHECKING:
    from tokenleap.core.tree import Draft
    from tokenleap.decode import Outcome
    from tokenleap.request import Request


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
    probability: how clearly the noise decides for it (`drafters.growth`). It may be near 1 where q
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


class Controller(ABC):
    """Decides before each step how much to draft, and learns from the outcome.

    What a user makes is a template: each drafter of each target has a copy of it (`serving`), with
    the state that `setup` creates.

    Args:
        num_speculative_tokens: the draft length the user asked for. A controller may take it as a
            constant, a start or a limit.
        options: the controller's own options.
        costs: the cost of a pass by its number of positions. All controllers of a target share it.
            It is measured before the first controller that declares `needs_costs` runs.
        levels: number of nodes at each level of a full draft, as far as known beforehand, if the
            drafter drafts trees; None for chains.
        level_share: `DrafterTraits.level_share`: time of a further level, in first ones.
        stops_early: `DrafterTraits.stops_early`: its chains can end below improbable tokens.
    """

    class Options(Config):
        """The controller's own options."""

    name: ClassVar[str]
    summary: ClassVar[str]
    needs_costs: ClassVar[bool] = False
    """Whether it chooses by the cost of target passes."""
    resting: bool = False
    """Whether this step is one of several without drafts that were planned at once: the drafter is
    not asked, and the controller learns nothing. The pass is not timed if all controllers rest."""

    def __init__(
        self,
        num_speculative_tokens: int,
        options: Config | None = None,
        costs: CostCurve | None = None,
        levels: Sequence[int] | None = None,
        *,
        level_share: float = 1.0,
        stops_early: bool = False,
    ) -> None:
        self.num_speculative_tokens = num_speculative_tokens
        self.options = self.Options() if options is None else options
        self.costs = CostCurve() if costs is None else costs
        self.levels, self.level_share, self.stops_early = levels, level_share, stops_early
        self.setup()

    def serving(
        self,
        costs: CostCurve,
        levels: Sequence[int] | None,
        *,
        level_share: float,
        stops_early: bool,
        at_least: int = 0,
    ) -> Self:
        """A copy with fresh state, for drafts of `at_least` so many tokens of one drafter."""
        made = copy(self)
        made.num_speculative_tokens = max(self.num_speculative_tokens, at_least)
        made.costs, made.levels = costs, levels
        made.level_share, made.stops_early = level_share, stops_early
        made.setup()
        return made

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

    def release(self, request: Request) -> None:
        """Forget a request that has ended: all `PerRequest` state."""
        drop_request(self, request.key)


def within(request: Request, length: int) -> Budget:
    """A budget of `length` tokens, cut where the output must end.

    A path of depth d yields d + 1 tokens. So the depth is at most one less than the number of
    tokens that the request may still generate.
    """
    return fitted(Budget(length, length), request)


def fitted(budget: Budget, request: Request) -> Budget:
    """The budget, cut in the same way."""
    most = max(0, request.remaining - 1)
    return budget if budget.depth <= most else replace(budget, depth=most)


class Fixed(Controller):
    """`num_speculative_tokens`, cut where the output must end."""

    name: ClassVar[str] = "fixed"
    summary: ClassVar[str] = "always num_speculative_tokens"

    @override
    def budgets(self, batch: Sequence[Request], rows: int) -> list[Budget]:
        return [within(request, self.num_speculative_tokens) for request in batch]


class Heuristic(Controller):
    """Longer drafts after one that was accepted whole, shorter ones after any other.

    This is Transformers' schedule for assistant models: plus 2, minus 1, never below 1. It starts
    at `num_speculative_tokens`, or at `max_length` if that is less.
    """

    class Options(Config):
        """Options of `heuristic`.

        Args:
            max_length: longest draft, in tokens.
            grow: tokens that a draft gains after one that was accepted whole.
            shrink: tokens that it loses otherwise.
        """

        max_length: Annotated[int, Ge(1), Le(256)] = 20
        grow: Annotated[int, Ge(0)] = 2
        shrink: Annotated[int, Ge(0)] = 1

    options: Options
    name: ClassVar[str] = "heuristic"
    summary: ClassVar[str] = "grows on full acceptance, shrinks otherwise (Transformers' schedule)"

    @override
    def setup(self) -> None:
        start = min(self.num_speculative_tokens, self.options.max_length)
        self._lengths = PerRequest(lambda: start)

    @override
    def budgets(self, batch: Sequence[Request], rows: int) -> list[Budget]:
        return [within(request, self._lengths[request.key]) for request in batch]

    @override
    def observe(self, outcomes: Sequence[Outcome], draft_seconds: float) -> None:
        for outcome in outcomes:
            if not outcome.draft.tree.num_drafted:
                continue
            key = outcome.request.key
            length = self._lengths[key]
            if outcome.accepted.reason:
                length = max(1, length - self.options.shrink)
            else:
                length = min(self.options.max_length, length + self.options.grow)
            self._lengths[key] = length


class BatchTable(Controller):
    """Takes the table's entry for the largest batch size that is not above the current one.

    The more requests share a pass, the less idle compute is left for verifying drafts. Serving
    systems therefore shorten drafts, or stop drafting, as the batch grows.
    """

    class Options(Config):
        """Options of `batch`.

        Args:
            lengths: draft length by the smallest batch size it is for; 1 must have an entry.
        """

        lengths: Mapping[Annotated[int, Ge(1)], Annotated[int, Ge(0)]] = {1: 8, 4: 4, 8: 2, 16: 0}

        @field_validator("lengths")
        @classmethod
        def _starts_at_1(cls, value: Mapping[int, int]) -> Mapping[int, int]:
            if 1 not in value:
                raise ValueError("the table needs an entry for batch size 1")
            return value

    options: Options
    name: ClassVar[str] = "batch"
    summary: ClassVar[str] = "a table of lengths by batch size, capped by num_speculative_tokens"

    @override
    def budgets(self, batch: Sequence[Request], rows: int) -> list[Budget]:
        lengths = self.options.lengths
        entry = max(size for size in lengths if size <= max(1, rows))
        length = min(lengths[entry], self.num_speculative_tokens)
        return [within(request, length) for request in batch]


LOWEST, HIGHEST = 0.01, 0.95


class Confidence(Controller):
    """Stops drafting below a token to which the drafter gave a low probability.

    Each request has its own threshold on the probability of the token or of the path down to it.
    For a token that was drawn under the rule `coupled`, a drafter with a model gives its clarity
    instead of q (`Budget`). A draft with a rejected token raises the threshold, and one that was
    accepted whole lowers it (Transformers' `assistant_confidence_threshold`). EAGLE-2 and Kangaroo
    use similar criteria. Drafters without probabilities of their own, such as `ngram`, are never
    stopped.
    """

    class Options(Config):
        """Options of `confidence`.

        Args:
            threshold: drafting stops below a token less probable than this.
            of: compare the probability of the `token` or the product along the `path`.
            step: how much an outcome moves the threshold; 0 keeps it fixed.
        """

        threshold: Annotated[float, Ge(0), Le(1)] = 0.4
        of: Literal["token", "path"] = "token"
        step: Annotated[float, Ge(0), Le(1)] = 0.02

    options: Options
    name: ClassVar[str] = "confidence"
    summary: ClassVar[str] = "stops below a token that is less probable than an adaptive threshold"

    @override
    def setup(self) -> None:
        threshold = self.options.threshold
        self._thresholds = PerRequest(lambda: threshold)

    @override
    def budgets(self, batch: Sequence[Request], rows: int) -> list[Budget]:
        return [self._budget(request) for request in batch]

    def _budget(self, request: Request) -> Budget:
        threshold = self._thresholds[request.key]
        budget = within(request, self.num_speculative_tokens)
        if self.options.of == "path":
            return replace(budget, min_path_prob=threshold)
        return replace(budget, min_token_prob=threshold)

    @override
    def observe(self, outcomes: Sequence[Outcome], draft_seconds: float) -> None:
        for outcome in outcomes:
            if not outcome.draft.tree.num_drafted or not self.options.step:
                continue
            key = outcome.request.key
            threshold = self._thresholds[key]
            threshold += self.options.step if outcome.accepted.reason else -self.options.step
            self._thresholds[key] = min(HIGHEST, max(LOWEST, threshold))
