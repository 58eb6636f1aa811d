"""What a target's passes cost, timed when a controller first needs to know."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch

from foretoken.core.tree import chain
from foretoken.runtime.costs import CostCurve
from foretoken.runtime.probing import PROBE_KEY
from foretoken.runtime.target import Target

__all__ = ["measure_costs"]

SIZES = (1, 2, 4, 8, 16, 32, 64)
ROWS = (4, 16)
CONTEXT = 128
ROUNDS = 5
MAX_SECONDS = 2.0


@torch.inference_mode()
def measure_costs(target: Target, most_rows: int = max(ROWS)) -> CostCurve:
    """Seconds of a pass by number of positions and of rows: medians over a few rounds of all sizes.

    Sizes take turns, because the next second of a shared machine may be twice as fast. This takes
    half a second for a small model. For a large one whatever was not measured within `MAX_SECONDS`
    is left out: the curve is extended and corrected as it is used.

    Args:
        target: whose passes are timed.
        most_rows: more rows than these are not tried.

    Raises:
        SlabFull: there is no memory for it.
    """
    keys = [PROBE_KEY - row for row in range(max(ROWS))]
    others = target.num_rows
    target.add(keys[0])
    try:
        target.prefill(keys[0], [0] * min(CONTEXT, target.max_model_len // 2))
        cached = target.cached(keys[0])
        sizes = [(1, size) for size in SIZES if size < target.max_model_len - cached]
        for rows in ROWS:
            if rows <= most_rows and target.has_room(others + rows, cached + 1):
                for key in keys[1:rows]:
                    if key not in target:
                        target.fork(keys[0], key)
                sizes.append((rows, rows))
        seconds = _seconds(target, keys, sizes)
    finally:
        for key in keys:
            if key in target:
                target.remove(key)
        target.shrink()
    return CostCurve(seconds)


def _seconds(
    target: Target, keys: Sequence[int], sizes: Sequence[tuple[int, int]]
) -> dict[tuple[int, int], float]:
    """Medians by (rows, nodes), of the sizes that half the time was enough to warm up."""
    times: dict[tuple[int, int], list[float]] = {}
    began = time.perf_counter()

    def run(rows: int, nodes: int) -> float:
        start = time.perf_counter()
        target.verify(keys[:rows], [chain([0] * (nodes // rows))] * rows)
        return time.perf_counter() - start

    for size in sizes:
        if not times or time.perf_counter() - began < MAX_SECONDS / 2:
            run(*size)
            times[size] = []
    for _ in range(ROUNDS):
        for size, taken in times.items():
            if not taken or time.perf_counter() - began < MAX_SECONDS:
                taken.append(run(*size))
    return {size: statistics.median(taken) for size, taken in times.items()}
