"""A network that writes down how many positions each of its passes computes."""

from __future__ import annotations

from typing import Any

from tokenleap.runtime.inputs import PassInputs
from tokenleap.runtime.target import Target

__all__ = ["counted"]


class Counting:
    """Stands before a network (see `Network`)."""

    def __init__(self, network: Any) -> None:
        self._network = network
        self.least_nodes = network.least_nodes
        self.exact_trees, self.pads_rows = network.exact_trees, network.pads_rows
        self.num_layers = network.num_layers
        self.positions: list[int] = []

    def forward(self, inputs: PassInputs, *rest: Any, **named: Any) -> Any:
        """See `Network.forward`."""
        assert inputs.positions.shape == inputs.tokens.shape
        counts = [len(row) for row in inputs.rows]
        # Only the padding of a single row is computed.
        self.positions.append(inputs.nodes if len(counts) == 1 else sum(counts))
        return self._network.forward(inputs, *rest, **named)


def counted(target: Target) -> list[int]:
    """Positions of each of the target's passes from now on."""
    counting = Counting(target.network)
    target.network = counting  # type: ignore[assignment]
    return counting.positions
