"""Agreement between the processes that compute one model together.

Under tensor parallelism, every process runs the same engine on the same requests, and a pass needs
all of them. So nothing that only one process knows may decide what is computed: a measured time, a
random seed, the content of a file. `Peers` is where such things come in. It is that of a process
without others, and returns what it gets; `runtime/sharded.py` has that of several.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TypeVar

T = TypeVar("T")


def num_processes(environment: Mapping[str, str] = os.environ) -> int:
    """How many processes `torchrun` has started, this one included; 1 without it."""
    return max(1, _number(environment, "WORLD_SIZE")) if "RANK" in environment else 1


def own_rank(environment: Mapping[str, str] = os.environ) -> int:
    return _number(environment, "RANK")


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    return int(text) if text.isdecimal() else 0


class OutOfStepError(AssertionError):
    """The processes of one model do not compute the same things; nothing catches it."""


class Peers:
    """The processes that compute a model: this one alone."""

    rank: int = 0
    size: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this process is the one that measures, draws, reads and writes for all."""
        return self.rank == 0

    def agreed(self, number: float) -> float:
        """The number of the first process, in all of them."""
        return number

    def from_first(self, make: Callable[[], T]) -> T:
        """Give all processes the value, or the error, that the first one makes."""
        return make()


ALONE = Peers()
