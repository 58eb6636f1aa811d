"""A controller that is not shown what captures take.

Controllers choose by what passes cost. A pass or a draft in which a graph is captured takes many
times as long as it will ever take again, and is no measure of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from foretoken.control import Budget, Controller
from foretoken.request import Request
from foretoken.runtime.cuda.graphs import Captures
from foretoken.runtime.cuda.network import CudaNetwork
from foretoken.tree import Draft

if TYPE_CHECKING:
    from foretoken.decode import Outcome, StepTimes

__all__ = ["WithoutCaptures"]


class WithoutCaptures(Controller):
    """A controller for one `decode.step`, to which its times are shown without captures.

    Args:
        controller: decides and learns.
        network: of the target. Whatever others capture in the step they do while drafting.
    """

    name: ClassVar[str] = "without_captures"
    summary: ClassVar[str] = "a controller that is not shown what captures take"

    def __init__(self, controller: Controller, network: CudaNetwork) -> None:
        self._controller, self._network = controller, network
        self._before = Captures.seconds, network.capture_seconds
        super().__init__(controller.num_speculative_tokens, costs=controller.costs)

    def budgets(self, batch: Sequence[Request]) -> list[Budget]:
        """The controller's."""
        return self._controller.budgets(batch)

    def trim(self, batch: Sequence[Request], drafts: Sequence[Draft]) -> list[Draft]:
        """The controller's."""
        return self._controller.trim(batch, drafts)

    def observe(self, outcomes: Sequence[Outcome], times: StepTimes) -> None:
        """Pass on what the step brought, and the seconds of its own work."""
        all_before, own_before = self._before
        own = self._network.capture_seconds - own_before
        others = Captures.seconds - all_before - own
        draft, verify = max(0.0, times.draft - others), max(0.0, times.verify - own)
        self._controller.observe(outcomes, replace(times, draft=draft, verify=verify))
