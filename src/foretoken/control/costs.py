"""What a forward pass costs, by the number of positions it computes: a measured curve.

Leviathan et al. take the cost of verifying for a constant; on a real machine it is flat only as
long as reading the weights outweighs computing with them.
"""

from __future__ import annotations

from bisect import bisect_left

__all__ = ["CostCurve"]

_WEIGHT_OF_NEW = 0.1
"""How much one more measurement moves a known point: slow enough to ride over noise."""


class CostCurve:
    """Seconds per pass; linear between measured points, proportional beyond the last.

    Args:
        points: seconds by number of positions, to start from.
    """

    def __init__(self, points: dict[int, float] | None = None) -> None:
        self._seconds: dict[int, float] = {}
        self._sizes: list[int] = []
        for size, seconds in (points or {}).items():
            self.observe(size, seconds)

    def observe(self, positions: int, seconds: float) -> None:
        """Take one measurement into account."""
        if positions in self._seconds:
            known = self._seconds[positions]
            self._seconds[positions] = known + _WEIGHT_OF_NEW * (seconds - known)
        else:
            self._seconds[positions] = seconds
            self._sizes.insert(bisect_left(self._sizes, positions), positions)

    def __len__(self) -> int:
        return len(self._sizes)

    def __call__(self, positions: int) -> float:
        """Expected seconds of a pass over this many positions; 1 where nothing is known."""
        sizes, seconds = self._sizes, self._seconds
        if not sizes:
            return 1.0
        at = bisect_left(sizes, positions)
        if at == len(sizes):
            return seconds[sizes[-1]] * positions / sizes[-1]
        if at == 0 or sizes[at] == positions:
            return seconds[sizes[at]]
        low, high = sizes[at - 1], sizes[at]
        share = (positions - low) / (high - low)
        return seconds[low] + share * (seconds[high] - seconds[low])
