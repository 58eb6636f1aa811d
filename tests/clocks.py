"""The clock that the suite runs under: time passes with the work, not with the machine.

So what is drafted is the same in every run. It imports nothing of the tests, because the processes
of `programs.py` run under it, too (`fork_server.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenleap.core import clock
from tokenleap.runtime.passes import Passes

__all__ = ["WorkClock"]

_TICK = 2.0**-20
"""About a microsecond. Its sums are exact: a difference does not depend on when it was read."""


class WorkClock:
    """A look at it takes a tick, and a pass some for each of its layers and nodes.

    Passes take about as long as those of tiny models: one over ten nodes twice as long as over one.
    """

    def __init__(self) -> None:
        self._ticks = 0

    def now(self) -> float:
        """Seconds since the beginning."""
        self._ticks += 1
        return self._ticks * _TICK

    def install(self, replace: Callable[[Any, str, Any], object]) -> None:
        """Replace the library's clock.

        Args:
            replace: `setattr`, or one that is undone.
        """
        replace(clock, "now", self.now)
        forward, grow = Passes._forward, Passes.grow

        def timed_forward(passes: Passes, keys: Any, nodes: Any, *more: Any) -> Any:
            self._count(passes, sum(map(len, nodes)))
            return forward(passes, keys, nodes, *more)

        def timed_grow(passes: Passes, *arguments: Any) -> Any:
            before = passes.num_passes
            found = grow(passes, *arguments)
            if found is not None:
                for _ in range(passes.num_passes - before):
                    self._count(passes, len(found))
            return found

        replace(Passes, "_forward", timed_forward)
        replace(Passes, "grow", timed_grow)

    def _count(self, passes: Passes, nodes: int) -> None:
        self._ticks += 10 * passes.network.num_layers * (9 + nodes)
